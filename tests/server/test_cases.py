"""What broke other engines, asked of the server: text, templates, determinism and limits."""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from containers import MTP_FIXTURE, container
from server.faults import PATIENCE, held, until
from server.processes import ENVIRONMENT

from coli.builtin import DEMO_MODEL
from coli.options import DraftOptions, EngineOptions, GenerateOptions

HELLO = [{"role": "user", "content": "hello"}]


def ask(server, messages=HELLO, **more):
    arguments = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 16, **more}
    return server.client.chat.completions.create(**arguments)


def text_of(server, messages=HELLO, **more) -> str:
    return ask(server, messages, **more).choices[0].message.content


def test_characters_split_over_tokens_come_whole_in_streams(server):
    """K03, K04: samples so hot that bytes of all kinds come; pieces hold no half characters, and no byte symbols."""
    for seed in range(6):
        whole = text_of(server, temperature=100, seed=seed, max_tokens=60)
        chunks = ask(server, temperature=100, seed=seed, max_tokens=60, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == whole
        assert "Ġ" not in whole
    assert text_of(server, [{"role": "user", "content": "say \N{GRINNING FACE}漢字"}])


def test_a_damaged_tokenizer_is_one_line(tmp_path):
    """K06"""
    shutil.copytree(DEMO_MODEL, tmp_path / "demo")
    path = tmp_path / "demo" / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:1000])
    command = [sys.executable, "-m", "coli", "serve", "--port", "0", "--model", tmp_path / "demo"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (1, "")
    assert "tokenizer.json" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_template_may_refuse_a_role_and_use_the_usual_helpers(start, templated):
    """K07, K09: the template's own reason, a 400; helpers are there, what is not is named with its line."""
    refusing = start(model=templated(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}{{ messages | tojson }}"
    ))  # fmt: skip
    assert text_of(refusing)
    with pytest.raises(openai.BadRequestError, match="no system role") as refused:
        ask(refusing, [{"role": "system", "content": "be good"}, *HELLO])
    assert refused.value.param == "messages"
    unknown = start(model=templated("{{ messages[0].content }}\n{{ surprise(1) }}"))
    with pytest.raises(openai.BadRequestError, match="line 2"):
        ask(unknown)


def test_special_tokens_in_texts_of_users_are_text(server):
    """K14: each is several tokens, and the same text elsewhere ends nothing."""
    special = next(iter(server.worker._llm.tokenizer.special_tokens.values()))
    plain = ask(server, [{"role": "user", "content": ""}]).usage.prompt_tokens
    assert ask(server, [{"role": "user", "content": special}]).usage.prompt_tokens > plain + 1


def test_exactly_one_beginning(server):
    """K15: whether template or tokenizer adds it."""
    tokenizer = server.worker._llm.tokenizer
    ids = server.worker._llm.prompt_ids("hello")
    first = list(tokenizer.prefix_ids)
    assert not first or ids[: 2 * len(first)] != first * 2


def test_an_answer_without_an_end_is_bounded(start):
    """K16, D07: by the server's default, and by the context; the reason says so."""
    server = start(defaults=GenerateOptions(max_tokens=20))
    body = {"model": "demo", "messages": HELLO, "extra_body": {"ignore_eos": True}}
    answer = server.client.chat.completions.create(**body)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 20)
    answer = server.client.chat.completions.create(**body, max_tokens=100_000)
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 512)


def test_a_prompt_longer_than_the_context_is_an_error_with_both_numbers(server):
    """D06"""
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens, the context is 512") as refused:
        ask(server, [{"role": "user", "content": "long " * 600}])
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("engine", [{"threads": 1}, {"cap": 6}, {"io": "direct"}], ids=str)
def test_threads_and_memory_change_no_byte(start, server, tmp_path, engine):
    """D05: and where experts come from does not either."""
    other = start(slots=1, engine=EngineOptions(**engine, usage_save=False, gate_save=False, usage=tmp_path / "u"))
    for more in ({}, {"temperature": 1.0, "seed": 5}):
        assert text_of(other, max_tokens=40, **more) == text_of(server, max_tokens=40, **more)


def test_requests_that_an_mtp_head_drafts_for_side_by_side_get_what_they_get_alone(start):
    """Slots, shared forwards and the rows a head keeps for each change no byte."""
    server = start(model=container(MTP_FIXTURE, None), slots=3, drafts=DraftOptions(gate="always", draft=2))

    def complete(at: int) -> str:
        more = {"temperature": 0.8 * (at % 2), "seed": at, "max_tokens": 20 + 3 * at}
        prompt = "The river " * (1 + at % 3) + str(at)
        body = {"model": "demo", "prompt": prompt, "extra_body": {"ignore_eos": True}, **more}
        return server.client.completions.create(**body).choices[0].text

    alone = [complete(at) for at in range(6)]
    with ThreadPoolExecutor(6) as pool, held(server) as go:
        together = pool.map(complete, range(6))
        until(lambda: server.worker.waiting >= 3)
        go.set()
        assert list(together) == alone
    assert server.worker.draft_counters()["mtp"]["proposed"] > 100
    assert server.worker.counts.step_rows > server.worker.counts.steps


def test_a_json_body_may_be_any_json_text(server):
    """Escapes, numbers as floats, surrogates: read, or refused with a status, never a 500."""
    import httpx

    for content, status in ((r"\u0041\ud83d\ude00", 200), (r"\ud83d", 400), (r"\u0000", 200)):
        data = f'{{"messages": [{{"role": "user", "content": "{content}"}}], "max_tokens": 1}}'
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=data, timeout=PATIENCE)
        assert answer.status_code == status, answer.text
        assert json.loads(answer.text)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repeat_penalty"])
def test_what_is_no_number_is_refused(server, field):
    import httpx

    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        data = f'{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 1, "{field}": {value}}}'
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=data, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
