"""The demo model's data and tokenizer (no torch): each answer can be copied from its prompt, token by token."""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from pathlib import Path
from random import Random

import jinja2
import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo_data
import demo_tokenizer

# Fields whose value is worked out rather than copied.
REWRITTEN = {"status", "priority", "date", "kind", "quantity", "due", "name"}


def samples(task: str, count: int = 60) -> list[demo_data.Sample]:
    rng = Random(f"test {task}")
    return [demo_data.TASKS[task](rng) for _ in range(count)]


def copied_values(record: dict[str, object]) -> list[str]:
    """Values of a parsed record that must stand in the prompt as they are."""
    found = []
    for key, value in record.items():
        if isinstance(value, dict):
            found += copied_values(value)
        elif key not in REWRITTEN and value != "":
            found.append(str(value))
    return found


def parse(line: str) -> dict[str, object]:
    parsed: dict[str, object] = json.loads(line, parse_float=str, parse_int=str)
    return parsed


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = Random(5)
    texts = [text for _ in range(1500) for sample in [demo_data.sample(rng)] for text in (sample.prompt, sample.answer)]
    return demo_tokenizer.train_tokenizer(texts)


@pytest.mark.parametrize("task", demo_data.TASKS)
def test_equal_seeds_give_equal_samples_and_other_seeds_other_ones(task: str) -> None:
    make = demo_data.TASKS[task]
    assert [make(Random(n)) for n in range(20)] == [make(Random(n)) for n in range(20)]
    assert len({make(Random(n)).prompt for n in range(100)}) > (20 if task == "sentence" else 90)


@pytest.mark.parametrize("task", [task for task in demo_data.TASKS if task != "sentence"])
def test_every_answer_line_is_compact_json(task: str) -> None:
    for sample in samples(task):
        for line in sample.answer.split("\n"):
            outside_strings = re.sub(r'"[^"]*"', "", line)
            assert len(parse(line)) >= 1
            assert " " not in outside_strings


@pytest.mark.parametrize("task", [task for task in demo_data.TASKS if task != "sentence"])
def test_every_copied_value_stands_in_the_prompt_letter_by_letter(task: str) -> None:
    for sample in samples(task):
        for line in sample.answer.split("\n"):
            for value in copied_values(parse(line)):
                assert value in sample.prompt


def test_ndjson_has_one_record_per_line_of_text_and_one_schema() -> None:
    for sample in samples("ndjson"):
        lines = sample.answer.split("\n")
        assert len(lines) == len(sample.prompt.split("\n")) - 1
        assert len({tuple(parse(line)) for line in lines}) == 1


def test_the_order_record_is_the_one_of_the_ndjson_order_grammar() -> None:
    pattern = re.compile(
        r'\{"id":\d+,"customer":"[^"]+","status":"(open|paid|shipped|cancelled)",'
        r'"priority":"(low|normal|high)","total":\d+\.\d\d,"notes":"[^"]*"\}'
    )
    assert all(pattern.fullmatch(sample.answer) for sample in samples("order"))


def test_render_keeps_the_digits_of_amounts_and_letters_outside_ascii() -> None:
    assert demo_data.render({"total": Decimal("12.50")}) == '{"total":12.50}'
    assert demo_data.render({"name": "Zoë"}) == '{"name":"Zoë"}'


def test_tokens_decode_to_the_text_they_came_from(tokenizer: Tokenizer) -> None:
    for task in demo_data.TASKS:
        for sample in samples(task, 20):
            for text in (sample.prompt, sample.answer):
                assert tokenizer.decode(tokenizer.encode(text).ids) == text
    odd = "tabs\tand  spaces — 東京 🎈\r\n"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


def test_a_word_has_the_same_tokens_after_a_space_in_the_plural_and_in_json(tokenizer: Tokenizer) -> None:
    alone = tokenizer.encode("lamp").tokens
    assert tokenizer.encode("3 lamps").tokens == ["3", "Ġ", *alone, "s"]
    assert tokenizer.encode('"lamp"').tokens == ['"', *alone, '"']


def test_copied_values_are_copied_token_by_token(tokenizer: Tokenizer) -> None:
    """Copying must be induction: the tokens of the value in JSON stand in the prompt's tokens, in a row."""
    total = missing = 0
    for task in demo_data.RECORDS:
        for sample in samples(task):
            prompt = tokenizer.encode(sample.prompt).ids
            for value in copied_values(parse(sample.answer)):
                ids = tokenizer.encode(value).ids
                total += 1
                missing += not any(prompt[i : i + len(ids)] == ids for i in range(len(prompt)))
    assert missing <= 0.03 * total  # a phrase may begin with a little word that took the space before it


def test_json_punctuation_and_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode('"id":407,"').tokens == ['"', "id", '"', ":", "4", "0", "7", ",", '"']


def test_the_chat_template_writes_what_training_reads() -> None:
    template = jinja2.Environment().from_string(demo_tokenizer.CHAT_TEMPLATE)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    text = template.render(messages=turns, add_generation_prompt=True)
    assert text == "<|user|>Be brief.\nHi<|assistant|>Hello!<|end|><|user|>Bye<|assistant|>"


def test_the_mixture_contains_every_task() -> None:
    rng = Random(1)
    assert {demo_data.sample(rng).task for _ in range(500)} == set(demo_data.TASKS)
