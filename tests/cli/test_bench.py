"""`coli bench`: llama-bench's names, what it prints where, and what it refuses."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from containers import container
from forward_runs import Runner

from coli.builtin import DEMO_MODEL
from coli.model.transformer import Transformer
from coli.options import EngineOptions
from coli.tools import bench
from coli.tools.bench_forecast import BenchForecast
from coli.tools.sizes import model_sizes

QUICK = ("--no-probe", "-r", "2", "-t", "1", "--quiet")
LLAMA_BENCH = {
    "cpu_info", "backends", "model_filename", "model_type", "model_size", "model_n_params", "n_batch", "n_threads",
    "type_k", "type_v", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts",
    "samples_ns", "samples_ts",
}  # fmt: skip
OURS = {
    "expert_hit_rate", "bytes_per_token", "cache", "peak_memory_bytes", "bandwidth_share", "integer_share",
    "time_shares", "forecast_ts",
}  # fmt: skip


def results(coli, *args: object) -> list[dict]:
    done = coli("bench", *QUICK, "-o", "json", *args)
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


@pytest.fixture
def nothing_written():
    before = sorted(path.name for path in DEMO_MODEL.iterdir())
    yield
    assert sorted(path.name for path in DEMO_MODEL.iterdir()) == before


def test_every_combination_has_llama_bench_s_fields_and_ours(coli, nothing_written):
    found = results(coli, "-p", "9,4", "-n", "3", "-d", "0,20", "-t", "1,2")
    keys = [(r["n_threads"], r["n_depth"], r["n_prompt"], r["n_gen"]) for r in found]
    assert keys == [(t, d, p, n) for t in (1, 2) for d in (0, 20) for p, n in ((9, 0), (4, 0), (0, 3))]
    for result in found:
        assert result.keys() >= LLAMA_BENCH | OURS
        count = result["n_prompt"] or result["n_gen"]
        assert len(result["samples_ns"]) == 2
        speeds = [count * 1e9 / ns for ns in result["samples_ns"]]
        assert result["avg_ts"] == pytest.approx(sum(speeds) / 2, rel=1e-4)
        assert result["stddev_ts"] == pytest.approx(abs(speeds[0] - speeds[1]) / 2**0.5, rel=1e-2, abs=1e-3)
        assert result["peak_memory_bytes"] > result["model_size"]
        assert sum(result["time_shares"].values()) == pytest.approx(1, abs=1e-3)
        assert result["expert_hit_rate"] == 1.0  # warm, and there is room for all
        assert result["bytes_per_token"] == 0
        assert result["bandwidth_share"] is result["forecast_ts"] is None


def test_decoding_has_the_plan_s_forecast_beside_it():
    options = bench.BenchOptions(tests=(bench.Test(4, 0, 0), bench.Test(0, 4, 0)), threads=(1,), repetitions=1)
    expected = BenchForecast(DEMO_MODEL, {1: bench.Ceiling(weights_bytes_per_s=1e9)})
    engine = EngineOptions(usage_save=False, gate_save=False)
    prompt, decoding = bench.bench(DEMO_MODEL, engine, options, print, forecast=expected)
    sizes = model_sizes(DEMO_MODEL)
    tps = 1e9 / (sizes.dense_read_bytes + sizes.cycle_bytes)
    assert prompt["forecast_ts"] is None
    assert decoding["forecast_ts"] == pytest.approx((tps, tps), abs=1e-3)  # there is room for all


def test_sizes_and_parameters_are_the_container_s(coli):
    (result,) = results(coli, "-p", "0", "-n", "2", "-m", container("qwen3_moe-padvocab", "f32"))
    facts = json.loads(coli("info", "--json", container("qwen3_moe-padvocab", "f32")).out)
    assert result["model_size"] == facts["dense_bytes"] + facts["expert_bytes"]
    assert result["model_type"] == "qwen3_moe f32, experts f32"


def test_cold_reads_what_warm_has_in_memory(coli, nothing_written):
    warm, cold = results(coli, "-p", "12", "-n", "0", "--cache", "warm,cold")
    assert (warm["cache"], cold["cache"]) == ("warm", "cold")
    assert cold["bytes_per_token"] > 0 == warm["bytes_per_token"]
    assert cold["expert_hit_rate"] < warm["expert_hit_rate"]


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("gpt_oss-base", bench.Test(150, 0, 120)),
        ("gpt_oss-base", bench.Test(0, 80, 120)),
        ("gpt_oss-base", bench.Test(0, 0, 120, n_rows=7)),
        ("phimoe-longrope", bench.Test(30, 0, 40)),  # the prompt ends beyond the short factors, the context before
    ],
)
def test_a_context_is_read_once_and_not_while_time_is_taken(name, test, monkeypatch):
    """Neither a window that was left behind nor longrope's other factors make a repetition read it again."""
    read, computed, forward = [], [], Transformer.forward

    def watched(self, cache, token_ids, positions, *rest, **options):
        (read if cache.length < test.n_depth else computed).append(len(token_ids))
        assert list(positions) == list(range(cache.length, cache.length + len(token_ids)))
        return forward(self, cache, token_ids, positions, *rest, **options)

    monkeypatch.setattr(Transformer, "forward", watched)
    options = bench.BenchOptions(tests=(test,), threads=(1,), repetitions=3)
    engine = EngineOptions(usage_save=False, gate_save=False)
    list(bench.bench(container(name, "q8"), engine, options, print))
    assert sum(read) == test.n_depth
    each = {test.n_prompt, test.n_rows, 1} - {0}
    assert set(computed) <= each


def test_what_is_measured_behind_a_window_is_what_a_cache_of_everything_gives():
    """Rows taken back and computed again have the bits of the first time."""
    runner = Runner(container("gpt_oss-base", "f32"))
    ids, rows = [(7 * i) % 300 for i in range(300)], np.arange(150)

    def logits(cache):
        return runner.model.forward(cache, np.array(ids[150:]), 150 + rows, None, rows, prefill=False).copy()

    cache = runner.cache(512)
    runner.model.forward(cache, np.array(ids[:150]), rows, None, np.array([], np.int64), prefill=True)
    held = cache.held_windows()
    first = logits(cache)
    for _ in range(2):
        cache.return_to(held)
        assert cache.length == 150
        assert np.array_equal(logits(cache), first)


def test_a_dense_model_has_no_hit_rate(coli):
    (result,) = results(coli, "-p", "3", "-n", "0", "-m", container("llama-bias-sharded", "f32"))
    assert result["expert_hit_rate"] is None
    assert result["cache"] == "dense"


def test_the_table_begins_as_llama_bench_s(coli):
    done = coli("bench", *QUICK, "-p", "5", "-n", "3", "-d", "7")
    lines = done.out.splitlines()
    assert lines[0].startswith("| model | size | params | backend | threads | test | t/s |")
    assert len(lines) == 4
    assert {line.count(" | ") for line in lines} == {14}
    assert "| pp5 @ d7 |" in lines[2]
    assert "| tg3 @ d7 |" in lines[3]
    assert " ± " in lines[3]


def test_csv_and_json_lines_hold_the_same_fields(coli):
    lines = [json.loads(line) for line in coli("bench", *QUICK, "-p", "5", "-n", "3", "-o", "jsonl").out.splitlines()]
    rows = list(csv.DictReader(io.StringIO(coli("bench", *QUICK, "-p", "5", "-n", "3", "-o", "csv").out)))
    assert [list(row) for row in rows] == [list(line) for line in lines]
    assert [row["n_prompt"] for row in rows] == ["5", "0"]
    assert json.loads(rows[0]["time_shares"]).keys() == lines[0]["time_shares"].keys()


def test_json_is_o_json(coli):
    assert isinstance(json.loads(coli("bench", *QUICK, "-p", "2", "-n", "0", "--json").out), list)


def test_several_models_follow_each_other(coli):
    found = results(coli, "-p", "2", "-n", "0", "-m", DEMO_MODEL, "-m", container("olmoe-base", "f32"))
    assert [Path(r["model_filename"]).name for r in found] == ["demo", "olmoe-base-f32"]


def test_no_usage_history_is_written(coli, monkeypatch, tmp_path):
    path = container("olmoe-base", "f32")
    monkeypatch.setenv("COLI_USAGE", str(tmp_path / "usage.json"))
    results(coli, "-p", "4", "-n", "2", "-m", path)
    assert not (path / "usage.json").exists()
    assert list(tmp_path.iterdir()) == []


def test_shares_are_of_the_measured_ceilings():
    options = bench.BenchOptions(tests=(bench.Test(0, 4, 0),), repetitions=1)
    ceilings = {1: bench.Ceiling(1e12, 1e12)}  # beyond any machine, and not so far that shares round to nothing
    engine = EngineOptions()
    options = bench.BenchOptions(tests=options.tests, threads=(1,), repetitions=1)
    (result,) = bench.bench(DEMO_MODEL, engine, options, lambda line: None, ceilings=ceilings)
    work = result["bandwidth_share"] * 1e12 / result["avg_ts"]
    assert 1e5 < work < result["model_size"]  # what one id reads, the lookup embedding and idle experts aside
    assert 0 < result["integer_share"] < 1
    assert 0 <= result["time_shares"]["python"] <= 1


def test_a_forecast_stands_beside_the_measurement():
    options = bench.BenchOptions(tests=(bench.Test(2, 0, 0),), threads=(1,), repetitions=1)
    (result,) = bench.bench(
        DEMO_MODEL, EngineOptions(), options, lambda line: None, forecast=lambda llm, test: 10.0 * test.n_prompt
    )
    assert result["forecast_ts"] == 20.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-p", "0", "-n", "0"), "nothing to measure"),
        (("-p", "x"), "-p: expected whole numbers"),
        (("-p", "1,,2"), "-p: expected whole numbers"),
        (("-n", "-3"), "-n: expected whole numbers"),
        (("-d", "1.5"), "-d: expected whole numbers"),
        (("-r", "0"), "-r: expected a whole number from 1"),
        (("-r", "1,2"), "-r: expected a whole number from 1"),
        (("-t", "0"), "--threads"),
        (("-t", "1,x"), "--threads"),
        (("--cache", "hot"), "--cache: expected warm, cold"),
        (("-o", "sql"), "sql"),
        (("-d", "900000"), "positions, the model has"),
        (("-m", "nowhere"), "nowhere: no such file"),
        (("more",), "more"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(coli, args, words):
    done = coli("bench", "--quiet", "--no-probe", *args)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1


def test_a_dense_model_has_no_cold_cache(coli):
    done = coli("bench", *QUICK, "-m", container("llama-bias-sharded", "f32"), "--cache", "cold")
    assert done.status == 2
    assert "dense model" in done.err


def test_a_source_folder_is_told_to_be_converted(coli):
    source = Path(__file__).parent.parent / "oracle" / "olmoe-base"
    done = coli("bench", *QUICK, "-m", source)
    assert done.status == 2
    assert "coli convert" in done.err


def test_a_closed_pipe_ends_it(coli, monkeypatch):
    def closed(data: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("coli.cli.bench.write_output", closed)
    assert coli("bench", *QUICK, "-p", "2", "-n", "0").status == 141


@pytest.mark.parametrize("streams", [False, True])
def test_repetitions_have_ids_of_their_own_where_experts_stream(monkeypatch, streams):
    """Else a repetition would find what the one before it brought in."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(bench, "_streams", lambda loaded: streams)
    monkeypatch.setattr(bench, "_prompt", lambda loaded, session, ids: seen.append(tuple(ids)) or iter(()))
    options = bench.BenchOptions(tests=(bench.Test(6, 0, 0),), threads=(1,), repetitions=3)
    assert len(list(bench.bench(DEMO_MODEL, EngineOptions(usage_save=False, gate_save=False), options, print))) == 1
    assert (len(seen), len(set(seen))) == (4, 4 if streams else 1)
