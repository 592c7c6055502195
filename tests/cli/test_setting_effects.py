"""Settings through the command to what shows them (docs/settings.md): those no other test follows all the way."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import MTP_FIXTURE, container, expected

from coli.builtin import DEMO_MODEL, GRAMMARS
from coli.store.container import Container
from coli.store.usage import UsageFile, read_history

WANT = expected("olmoe-base")
PROMPT = ",".join(map(str, WANT["prompt_ids"]))
ORDER = "order 4102 by Anna Keller over 49.90 is paid, high priority."


@pytest.fixture
def run(coli, monkeypatch):
    """run(*arguments, NAME=value, ...): the report of a tiny model's answer."""

    def report(*args: object, model: Path | None = None, prompt: str = PROMPT, **variables: object) -> dict[str, Any]:
        fixed = ("--ngen", 24, "--ignore-eos", "--json", "-", "--prompt-ids", prompt)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            done = coli("run", "--model", model or container("olmoe-base", "f32"), *fixed, *args)
        assert done.status == 0, done.err
        return json.loads(done.out)

    return report


@pytest.mark.parametrize(
    ("flag", "variable", "value"),
    [("--top-k", "COLI_TOP_K", 1), ("--top-p", "NUCLEUS", 1e-6), ("--min-p", "COLI_MIN_P", 1)],
)
def test_a_choice_among_one_token_is_the_greedy_one(run, flag, variable, value):
    hot = ("--temp", 5, "--seed", 3)
    assert run(*hot)["token_ids"] != WANT["greedy_ids"][:24]
    assert run(*hot, flag, value)["token_ids"] == WANT["greedy_ids"][:24]
    assert run(*hot, **{variable: value})["token_ids"] == WANT["greedy_ids"][:24]


@pytest.mark.parametrize("flag", ["--presence-penalty", "--frequency-penalty", "--repeat-penalty"])
def test_a_penalty_out_of_all_proportion_leaves_no_token_twice(run, flag):
    long = ("--ngen", 150)
    assert len(set(run(*long)["token_ids"])) < 140
    assert len(set(run(*long, flag, 100)["token_ids"])) == 150


def test_a_stop_text_ends_the_answer_and_is_told(order):
    whole = order()["text"]
    stopped = order("--stop", "Anna", "--ignore-eos")
    assert (stopped["finish_reason"], stopped["text"]) == ("stop", whole[: whole.index("Anna")])


@pytest.mark.parametrize("given", [{"args": ("--ram", "50GB")}, {"RAM_GB": 50}])
def test_the_budget_is_the_one_given(run, given):
    assert run(*given.pop("args", ()), **given)["memory_budget_bytes"] == 50_000_000_000


def test_reading_ahead_shows_in_its_own_counter(run):
    small = {"model": DEMO_MODEL, "CAP": 8, "PIN": "off"}
    plain, ahead, by_variable = run(**small), run("--prefetch", **small), run(**small, COLI_PREFETCH=1)
    assert plain["prefetch"]["reads"] == 0 < ahead["prefetch"]["reads"]
    assert by_variable["prefetch"]["reads"] > 0
    assert plain["token_ids"] == ahead["token_ids"] == by_variable["token_ids"]


@pytest.fixture
def history(run, tmp_path) -> tuple[Path, int]:
    """(a history of the demo model whose every turn is an answer of `run`, many times over; record bytes)."""
    opened = Container.open(DEMO_MODEL)
    run("--no-drafts", model=DEMO_MODEL, COLI_USAGE=tmp_path / "once")
    counts = read_history(tmp_path / "once", opened.fingerprint, 6, 32).counts
    for _ in range(4):
        UsageFile(tmp_path / "usage.json", opened.fingerprint, 6, 32).save(np.round(1000 * counts).astype(np.int64))
    return tmp_path / "usage.json", opened.expert_layout(0).record_bytes


def test_pins_are_the_history_s_that_is_named_and_no_more_than_allowed(run, history):
    """What `auto` makes of a history, AUTOPIN with it, is in tests/store/test_usage.py: here every expert would fit."""
    path, record = history
    small = {"model": DEMO_MODEL, "CAP": 12, "USAGE_SAVE": 0}

    def pinned(*args: object, **variables: object) -> float:
        return run("--no-drafts", *args, **small, **variables)["pinned_hit_rate"]

    assert pinned(PIN="off") == pinned("--pin", "off") == 0
    assert pinned(PIN=path) == pinned("--pin", path) > 0
    few = [
        pinned(PIN=path, PIN_GB=f"{2 * record / 1e9:.9f}"),
        pinned("--pin", path, "--pin-gb", f"{2 * record / 1e9:.9f}"),
    ]
    assert 0 < few[0] == few[1] < pinned(PIN=path)


def test_the_history_is_written_unless_it_is_switched_off_and_loses_weight_as_told(run, tmp_path):
    model = container("olmoe-base", "f32")
    layers, experts = 2, 8
    fingerprint = Container.open(model).fingerprint

    def kept(name: str) -> float:
        return read_history(tmp_path / name, fingerprint, layers, experts).selections

    for name, decay in (("whole", 1), ("half", 0.5)):
        for _ in range(2):
            run("--no-drafts", COLI_USAGE=tmp_path / name, COLI_USAGE_DECAY=decay)
    assert kept("half") == pytest.approx(0.75 * kept("whole"), rel=1e-3)
    run(COLI_USAGE=tmp_path / "none", USAGE_SAVE=0)
    assert not (tmp_path / "none").exists()


def test_what_row_counts_cost_is_kept_unless_it_is_switched_off(run, tmp_path):
    (tmp_path / "corpus").write_text(" ".join(map(str, WANT["greedy_ids"])))
    args = ("--corpus", tmp_path / "corpus", "--ngen", 120)
    run(*args, COLI_GATE_FILE=tmp_path / "gate.json")
    run(*args, COLI_GATE_FILE=tmp_path / "none.json", COLI_GATE_SAVE=0)
    assert [path.name for path in tmp_path.glob("*.json")] == ["gate.json"]


@pytest.fixture
def order(coli, monkeypatch):
    """The report of an order's record by the demo model."""

    def report(*args: object, **variables: object) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, str(value))
            done = coli("run", "--ngen", 60, "--gate", "seed", "--json", "-", *args, ORDER)
        assert done.status == 0, done.err
        return json.loads(done.out)

    return report


def test_grammars_and_schemas_draft_no_more_at_a_time_than_allowed(order, tmp_path):
    schema = tmp_path / "order.json"
    fields = ("id", "customer", "status", "priority", "total", "notes")
    text = {"type": "object", "properties": {name: {} for name in fields}, "required": fields}
    schema.write_text(json.dumps({**text, "additionalProperties": False}))
    grammar = GRAMMARS / "ndjson-order.gbnf"
    plain = order("--no-drafts")
    for given in (("--grammar", grammar), ("--schema", schema)):
        drafted, single = order(*given), order(*given, "--grammar-draft", 1)
        assert drafted["token_ids"] == single["token_ids"] == plain["token_ids"]
        assert drafted["drafts"]["grammar"]["accepted"] > 0
        assert drafted["forwards"] < plain["forwards"]
    assert order(GRAMMAR=grammar)["drafts"] == order("--grammar", grammar)["drafts"]
    assert order(SCHEMA=schema)["drafts"] == order("--schema", schema)["drafts"]


def test_a_corpus_that_is_mostly_wrong_is_paused_below_the_share_asked_for(run, tmp_path):
    ids = run("--ngen", 200)["token_ids"]
    (tmp_path / "corpus").write_text(" ".join(str(i if at % 4 else (i + 1) % 300) for at, i in enumerate(ids)))
    args = ("--corpus", tmp_path / "corpus", "--gate", "seed", "--ngen", 200)
    never, always = (run(*args, "--corpus-minacc", share)["drafts"]["corpus"]["proposed"] for share in (0, 100))
    assert never > always
    assert run(*args, COLI_CORPUS_MINACC=100)["drafts"]["corpus"]["proposed"] == always


def test_a_head_drafts_unless_it_is_switched_off(run):
    model = container(MTP_FIXTURE, "f32")
    args = ("--gate", "always", "--draft", 2)
    drafted = run(*args, "--mtp", model=model)
    assert drafted["drafts"]["mtp"]["proposed"] > 0
    for off in (run(*args, "--no-mtp", model=model), run(*args, model=model, MTP=0)):
        assert off["token_ids"] == drafted["token_ids"]
        assert "mtp" not in off["drafts"] or off["drafts"]["mtp"]["proposed"] == 0
