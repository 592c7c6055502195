"""`coli trace` and `coli replay`: the routes of a real run, judged again."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from containers import container
from safetensors.numpy import save_file

from coli.builtin import DEMO_MODEL

PROMPT = "order 4102 by Anna Keller over 49.90 is paid, high priority."


@pytest.fixture
def trace(coli, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CAP", "10")
    done = coli("trace", "-o", tmp_path / "t.trace", "--ngen", 40, "--ignore-eos", PROMPT)
    assert done.status == 0, done.err
    assert "39 decode rows" in done.err
    return tmp_path / "t.trace"


def facts(coli, trace: Path, *args: object) -> dict:
    done = coli("replay", trace, "--json", *args)
    assert done.status == 0, done.err
    assert done.err == ""  # its own setup gave its own counts
    return json.loads(done.out)


def test_tracing_does_not_change_the_answer(coli, tmp_path):
    answer = coli("run", "--ngen", 40, PROMPT).out
    assert coli("trace", "-o", tmp_path / "t", "--ngen", 40, PROMPT).out == answer


def test_the_recorded_hit_rate_is_the_report_s(coli, tmp_path, monkeypatch):
    monkeypatch.setenv("CAP", "10")
    assert coli("trace", "-o", tmp_path / "t", "--json", tmp_path / "r", "--no-drafts", PROMPT).status == 0
    report = json.loads((tmp_path / "r").read_text())
    replayed = facts(coli, tmp_path / "t")
    assert replayed["rows"] == report["forwards"]
    assert 0 < replayed["recorded_hit_rate"] < 1


def test_more_memory_never_hits_less_and_belady_bounds_all(coli, trace):
    found = facts(coli, trace, "--warmup", 0)["replays"]
    by_policy: dict[str, list[float]] = {}
    for one in found:
        by_policy.setdefault(one["policy"], []).append(one["hit_rate"])
    assert set(by_policy) == {"lru", "lfru", "clock", "slru", "pinned", "belady"}
    for policy in ("lru", "belady"):
        assert by_policy[policy] == sorted(by_policy[policy])
    for rates in by_policy.values():
        assert all(rate <= best + 1e-12 for rate, best in zip(rates, by_policy["belady"], strict=True))


def test_budgets_are_shares_or_sizes(coli, trace):
    whole = facts(coli, trace, "--budgets", "100%", "--policies", "lru", "--warmup", 0.9)
    (one,) = whole["replays"]
    assert one["capacity_bytes"] == whole["experts_bytes"]
    assert facts(coli, trace, "--budgets", "1.5MB")["replays"][0]["capacity_bytes"] == 1_500_000


def test_the_table_has_a_row_for_every_budget(coli, trace):
    done = coli("replay", trace, "--budgets", "25%,50%", "--policies", "lru,belady")
    assert done.status == 0
    assert "(25%)" in done.out
    assert "(50%)" in done.out
    assert "belady" in done.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--policies", "best"), "--policies: expected some of lru"),
        (("--budgets", "0%"), "--budgets: expected a share"),
        (("--budgets", "some"), "--budgets: expected sizes like 2GB"),
        (("--budgets", "1MB,"), "--budgets: expected sizes like 2GB"),
        (("--budgets", "0.001%"), "--budgets: experts: 31 bytes are left"),
        (("--warmup", "nan"), "--warmup: expected a share"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(coli, trace, args, words):
    done = coli("replay", trace, *args)
    assert done.status == 2
    assert words in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"text", b'\x10\0\0\0\0\0\0\0{"__metadata__":'])
def test_what_is_no_trace_is_one_line_and_status_1(coli, tmp_path, content):
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    done = coli("replay", path)
    assert done.status == 1
    assert str(path) in done.err
    assert done.err.count("\n") == 1


def test_files_of_other_kinds_are_named(coli, tmp_path):
    """A conversation's rows, weights, and a trace whose facts are none: one line each, in our words."""
    path = tmp_path / "x"
    rows = {"0.keys": np.zeros((2, 3), np.uint16), "events": np.zeros((1, 3), np.int32)}
    facts = {"format": "coli-trace 1", "model": "[]", "run": '{"pools": 5}'}
    damaged = "damaged trace: not all of it is what a trace holds; record it again"
    for metadata, words in (
        ({"format": "coli session 2"}, "expected a trace (coli-trace 1), found coli session 2; name a file"),
        (None, "found another kind of file; name a file that `coli trace` wrote"),
        (facts, damaged),
        (facts | {"model": '{"record_bytes": 5}'}, damaged),
        ({"format": "coli-trace 1"}, damaged),
    ):
        save_file(rows, path, metadata)
        done = coli("replay", path)
        assert (done.status, done.out, done.err.count("\n")) == (1, "", 1)
        assert words in done.err
        assert "Error" not in done.err


def test_a_cut_trace_is_refused(coli, trace):
    trace.write_bytes(trace.read_bytes()[:-10])
    assert coli("replay", trace).status == 1


def test_a_dense_model_and_a_bad_output_are_refused_before_anything_is_computed(coli, tmp_path):
    done = coli("trace", "-o", tmp_path / "t", "--model", container("llama-bias-sharded", "f32"), PROMPT)
    assert done.status == 2
    assert "no routed experts" in done.err
    assert not (tmp_path / "t").exists()
    assert coli("trace", "-o", tmp_path, PROMPT).status == 2
    assert coli("trace", "-o", tmp_path / "no" / "t", PROMPT).status == 2
    assert coli("trace", PROMPT).status == 2


def test_the_trace_never_replaces_a_device_or_a_file_of_the_model(coli, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    before = (model / "coli.json").read_bytes()
    for output in (tmp_path / "pipe", model / "coli.json"):
        done = coli("trace", "--model", model, "--prompt-ids", "1,2", "--ngen", 2, "-o", output)
        assert done.status == 2
        assert str(output) in done.err
    assert (tmp_path / "pipe").is_fifo()
    assert (model / "coli.json").read_bytes() == before
