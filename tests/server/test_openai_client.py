"""The official client against a real server."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
import pytest
from pydantic import BaseModel
from server.faults import held, job_of, settled, until

from coli.options import DraftOptions

ORDER = [{"role": "user", "content": "List as NDJSON. Orders: 3 lamps for Ana at 20 each. 2 cups for Bo at 7 each."}]


def ask(server, at: int = 0, **more):
    arguments = {"model": "demo", "messages": ORDER, "temperature": 0, "max_tokens": 24, **more}
    return server.client.chat.completions.create(**arguments)


def text_of(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_models_are_listed_and_found(server):
    assert [model.id for model in server.client.models.list()] == ["demo"]
    assert server.client.models.retrieve("demo").owned_by == "coli"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


def test_a_stream_says_the_same_as_the_whole_answer_and_ends_with_usage(server):
    whole = ask(server)
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24


def test_same_request_alone_repeated_and_among_eight_others_gives_the_same_bytes(server):
    wanted = {"temperature": 0.9, "seed": 11, "max_tokens": 32}
    alone = ask(server, **wanted).choices[0].message.content
    assert ask(server, **wanted).choices[0].message.content == alone

    def other(at: int) -> str:
        messages = [{"role": "user", "content": f"{at} other words " * (1 + 3 * at)}]
        return ask(server, messages=messages, temperature=0.3 * (at % 3), seed=at, max_tokens=20 + at)

    with ThreadPoolExecutor(12) as pool, held(server) as go:
        others = [pool.submit(other, at) for at in range(8)]
        same = [pool.submit(ask, server, **wanted) for _ in range(3)]
        until(lambda: server.worker.waiting >= 6)
        go.set()
        assert [each.result().choices[0].message.content for each in same] == [alone] * 3
        assert all(each.result().usage.completion_tokens for each in others)
    assert server.worker.counts.step_rows > server.worker.counts.steps


def test_the_clients_own_ways_to_ask_are_answered(server):
    """The async client, the stream helper, raw responses, and `parse`, which asks for `strict`."""
    whole = ask(server).choices[0].message.content
    arguments = {"model": "demo", "messages": ORDER, "temperature": 0, "max_tokens": 24}

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.chat.completions.create(**arguments) for _ in range(4)))
            stream = await client.chat.completions.create(**arguments, stream=True)
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [*(answer.choices[0].message.content for answer in answers), "".join(text)]

    assert asyncio.run(crowd()) == [whole] * 5
    with server.client.chat.completions.stream(**{**arguments, "max_tokens": 400}) as stream:  # it wants an end
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        assert said == stream.get_final_completion().choices[0].message.content
        assert said.startswith(whole)
    raw = server.client.chat.completions.with_raw_response.create(**arguments)
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == whole

    class Order(BaseModel):
        customer: str

    with pytest.raises(openai.BadRequestError, match="strict") as refused:
        server.client.chat.completions.parse(**arguments, response_format=Order)
    assert refused.value.param == "response_format.json_schema.strict"


def test_seeds_decide_samples(server):
    texts = {ask(server, temperature=20, seed=seed).choices[0].message.content for seed in (1, 2, 1, 2)}
    assert len(texts) == 2


def test_stop_texts_end_the_answer_before_them_and_logprobs_end_with_it(server):
    whole = ask(server).choices[0].message.content
    stop = whole[10:14]
    answer = ask(server, stop=[stop], logprobs=True, top_logprobs=2).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert "".join(token.token for token in answer.logprobs.content).startswith(answer.message.content)
    streamed = list(ask(server, stop=[stop], logprobs=True, stream=True))
    told = [token for c in streamed if c.choices and c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert [token.logprob for token in told] == [token.logprob for token in answer.logprobs.content]


def test_greedy_answers_take_the_likeliest_token(server):
    answer = ask(server, logprobs=True, top_logprobs=3)
    for token in answer.choices[0].logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert token.logprob <= 0
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def test_completions_take_text_or_ids(server):
    create = server.client.completions.create
    by_text = create(model="demo", prompt="hello", temperature=0, max_tokens=8, logprobs=1)
    tokens = server.client.post("/../tokenize", body={"content": "hello"}, cast_to=object)["tokens"]
    by_ids = create(model="demo", prompt=tokens, temperature=0, max_tokens=8)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert len(by_text.choices[0].logprobs.tokens) == by_text.usage.completion_tokens
    streamed = create(model="demo", prompt="hello", temperature=0, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == by_text.choices[0].text


SCHEMA = {
    "type": "object",
    "properties": {"customer": {"type": "string"}, "item": {"type": "string"}},
    "required": ["customer", "item"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def eager(start):
    """A server that drafts whatever the clock says: what its gate would measure depends on the machine's load."""
    return start(drafts=DraftOptions(gate="always"))


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"grammar": 'root ::= "{\\"customer\\":\\"" [^"]+ "\\",\\"item\\":\\"" [^"]+ "\\"" .*'}},
    ],
    ids=["schema", "object", "gbnf"],
)
def test_grammars_draft_and_change_no_byte(server, eager, more):
    plain, drafted = ask(server), ask(eager, **more)
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    counts = drafted.coli["drafts"]["grammar"]
    assert counts["proposed"] >= counts["accepted"]
    if "json_object" not in json.dumps(more):
        assert counts["accepted"] > 0
        assert drafted.coli["forwards"] < drafted.usage.completion_tokens - 1  # one each without drafts


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
         "response_format.json_schema.strict"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*ORDER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "surprise": 1}]}, "messages[0].surprise"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"extra_body": {"metadata": {"stop": 5}}}, "metadata.stop"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": 5}}}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"grammar": "root ::= ("}}, "grammar"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "long " * 600}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)  # fmt: skip
def test_a_bad_field_is_a_400_that_names_it(server, more, field):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, **more)
    assert refused.value.param == field
    assert refused.value.body["message"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [("", "prompt"), ([], "prompt"), ([1, 10**6], "prompt"), ([1, -1], "prompt"), ([1, "a"], "prompt[1]"),
     ({}, "prompt"), (["a", "b"], "prompt"), ([[1, 2]], "prompt[0]"), ("long " * 600, "prompt"), (None, "prompt")],
    ids=str,
)  # fmt: skip
def test_a_bad_prompt_is_a_400_that_names_it(server, prompt, field):
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.completions.create(model="demo", prompt="", extra_body={"prompt": prompt})
    assert refused.value.param == field
    assert refused.value.body["message"].startswith(f"{field}: ")


def test_bad_ids_to_detokenize_are_a_400_that_names_them(server):
    for tokens, field in (([10**6], "tokens"), ([1, "a"], "tokens[1]")):
        with pytest.raises(openai.BadRequestError) as refused:
            server.client.post("/../detokenize", body={"tokens": tokens}, cast_to=object)
        assert refused.value.param == field


def test_the_second_turn_starts_from_the_first(server):
    messages = [{"role": "user", "content": "alpha beta gamma " * 20}]
    first = ask(server, messages=messages, max_tokens=8)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "go"}]
    second = ask(server, messages=messages, max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 1
    edited = [messages[0], {"role": "assistant", "content": "something else"}, messages[2]]
    assert ask(server, messages=edited).usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_turn_of_a_thousand_tokens_is_not_computed_again_and_an_edited_history_from_the_edit_on(start):
    server = start(context=2048, slots=2)
    computed = []

    def turn(messages):
        answer = ask(server, messages=messages, max_tokens=8)
        counts = server.worker.counts
        computed.append(counts.prompt_tokens - counts.cached_tokens - sum(computed))
        return answer

    messages = [{"role": "user", "content": "alpha beta gamma delta " * 64}]
    first = turn(messages)
    assert first.usage.prompt_tokens > 1000
    assert computed[0] == first.usage.prompt_tokens
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "go"}]
    second = turn(messages)
    assert computed[1] <= second.usage.prompt_tokens - first.usage.prompt_tokens + 1
    alone = ask(start(context=2048, slots=1), messages=messages, max_tokens=8)
    assert second.choices[0].message.content == alone.choices[0].message.content
    edited = [messages[0], {"role": "assistant", "content": "something else"}, messages[2]]
    third = turn(edited)
    assert third.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1
    assert computed[2] < 30
    longer = [{"role": "user", "content": messages[0]["content"][:1200] + " other " * 20}, *edited[1:]]
    cached = turn(longer).usage.prompt_tokens_details.cached_tokens
    assert 0.3 * first.usage.prompt_tokens < cached < first.usage.prompt_tokens


def test_a_client_that_gives_up_or_closes_its_stream_ends_the_answer(server):
    assert settled(server)
    cancelled = server.worker.counts.cancelled
    more = {"model": "demo", "messages": ORDER, "max_tokens": 400, "extra_body": {"ignore_eos": True}}

    async def give_up() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asking = asyncio.create_task(client.chat.completions.create(**more))
            job = await asyncio.to_thread(job_of, server)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(until, lambda: job.cancelled)

    with held(server, steps=2):
        asyncio.run(give_up())
    until(lambda: server.worker.counts.cancelled == cancelled + 1)
    with held(server, steps=2):
        stream = server.client.chat.completions.create(**more, stream=True)
        next(stream)
        job = job_of(server)
        stream.close()
        until(lambda: job.cancelled)
    until(lambda: server.worker.counts.cancelled == cancelled + 2)
    assert settled(server)
    with held(server), pytest.raises(openai.APITimeoutError):
        server.client.with_options(timeout=0.05).chat.completions.create(**more)
    assert settled(server)


def test_errors_have_the_clients_types(start):
    server = start(slots=1, api_key="secret")
    with pytest.raises(openai.AuthenticationError):
        ask(server)
    keyed = server.client.with_options(api_key="secret")
    with pytest.raises(openai.NotFoundError):
        keyed.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as refused:
        keyed.chat.completions.create(model="demo", messages=ORDER, temperature=-1)
    assert (refused.value.status_code, refused.value.param) == (400, "temperature")
    with pytest.raises(openai.NotFoundError):
        keyed.embeddings.create(model="demo", input="x")


def test_cold_and_warm_prompts_give_the_same_bytes(start, server):
    cold = ask(start(slots=1), temperature=1.0, seed=3)
    for _ in range(2):
        warm = ask(server, temperature=1.0, seed=3)
        assert warm.choices[0].message.content == cold.choices[0].message.content
    assert warm.usage.prompt_tokens_details.cached_tokens == cold.usage.prompt_tokens - 1


def test_drafts_of_a_request_are_its_own(start, server):
    drafting = start(drafts=DraftOptions(draft=6, gate="always"))
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: ask(drafting, temperature=0.7, seed=seed), range(4)))
    for seed, answer in enumerate(answers):
        plain = ask(server, temperature=0.7, seed=seed)
        assert answer.choices[0].message.content == plain.choices[0].message.content
    assert sum(answer.coli["drafts"]["ngram"]["proposed"] for answer in answers)


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
SHOWS_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[-1].content }}"


def test_tools_reach_the_template_and_calls_are_parsed_back(start, templated, monkeypatch):
    from coli.server import prompts, streams
    from coli.server.tool_calls import parse_calls

    server = start(model=templated(SHOWS_TOOLS))
    plain = ask(server, max_tokens=4)
    shown = ask(server, max_tokens=4, tools=TOOLS)
    assert shown.usage.prompt_tokens > plain.usage.prompt_tokens
    said = 'fine <tool_call>{"name": "look_up", "arguments": {"q": 1}}</tool_call>'
    for module in (prompts, streams):
        monkeypatch.setattr(module, "parse_calls", lambda text, names: parse_calls(said, names))
    answer = ask(server, max_tokens=4, tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert (answer.message.content, answer.message.tool_calls[0].function.name) == ("fine", "look_up")
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"q": 1}
    history = [*ORDER, answer.message.model_dump(exclude_none=True),
               {"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "4"}]  # fmt: skip
    assert ask(server, messages=history, max_tokens=2).choices
    chunks = list(ask(server, max_tokens=4, tools=TOOLS, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)


def test_a_template_that_refuses_is_a_400_with_its_reason(start, templated):
    server = start(model=templated("{{ raise_exception('no system role here') }}"))
    with pytest.raises(openai.BadRequestError, match="no system role here"):
        ask(server)


def test_a_model_without_a_template_completes_the_text(start, templated):
    server = start(model=templated(None))
    chat = ask(server, messages=[{"role": "user", "content": "hello"}]).choices[0].message.content
    plain = server.client.completions.create(model="demo", prompt="hello", temperature=0, max_tokens=24)
    assert chat == plain.choices[0].text
