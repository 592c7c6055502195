"""A replay counts what the run counted, and nothing beats Belady."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save
from store.fake_records import RECORD_BYTES, routes, write_records
from store.stores import consume, make_store

from coli.errors import CheckpointError
from coli.store.policy import OVERLAP, PoolSize
from coli.tools.replay import ORDERS, POLICIES, compare, replay, replay_setup
from coli.tools.trace import Trace, TracedModel, TraceRecorder, write_trace

L, E, A = 4, 32, 3
MODEL = TracedModel("f", L, E, A, dict.fromkeys(range(L), RECORD_BYTES))


def record_run(
    folder: Path,
    sizes: int | list[PoolSize],
    *,
    order: str = "lru",
    pinned: tuple[int, ...] = (),
    mode: str = "pread",
    forwards: int = 25,
) -> Trace:
    """A run with prefill chunks, verifies of several rows with rejections, and layers that ran from residency."""
    recorder = TraceRecorder()
    store = make_store(write_records(folder, L, E), E, sizes, mode, order=ORDERS[order], pinned=pinned, trace=recorder)
    rng = np.random.default_rng(5)
    for n, forward in enumerate(routes(8, forwards, L, E, A, rows=6)):
        prefill = n % 9 == 0
        rows = 6 if prefill else int(rng.integers(1, 5))
        for layer_idx, expert_ids in enumerate(forward):
            ids = expert_ids[:rows]
            if np.all(store.residency[layer_idx, ids]):
                store.touched(layer_idx, ids, prefill=prefill)
            else:
                consume(store, layer_idx, ids, prefill)
        if not prefill and n % 7:
            store.settle(np.sort(rng.choice(rows, int(rng.integers(1, rows + 1)), False)))
    trace = recorder.trace(MODEL, store.policy)
    assert store.stats().bytes_read == (trace.counts.misses + trace.counts.prefill_misses + len(pinned)) * RECORD_BYTES
    store.close()
    return trace


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [1, 9, 30, L * E, [PoolSize(3, OVERLAP)] * L])
@pytest.mark.parametrize("pinned", [(), (0, 1, 40)])
def test_a_replay_of_the_run_counts_what_the_run_counted(
    tmp_path: Path, order: str, sizes: int | list[PoolSize], pinned: tuple[int, ...]
) -> None:
    trace = record_run(tmp_path, sizes, order=order, pinned=pinned)
    assert replay_setup(trace, trace.setup, ORDERS[order]) == trace.counts
    assert trace.counts.misses > 0


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = record_run(tmp_path, 20)
    path = tmp_path / "run.trace"
    write_trace(path, trace)
    back = Trace.read(path)
    assert (back.model, back.setup, back.counts) == (trace.model, trace.setup, trace.counts)
    assert replay_setup(back, back.setup) == trace.counts
    assert back.tokens == trace.tokens > 0
    assert path.stat().st_size < 3 * trace.numbers.size + 12 * len(trace.events) + 2000


@pytest.mark.parametrize("capacity", [1, 4, 16, 40, 90])
def test_nothing_beats_belady(tmp_path: Path, capacity: int) -> None:
    trace = record_run(tmp_path, 20, forwards=60)
    rows = compare(trace, POLICIES, [capacity * RECORD_BYTES], warmup=0.0)
    hits = {row.policy: row.counts.hits + row.counts.prefill_hits for row in rows}
    assert hits["belady"] == max(hits.values())
    asked = {row.counts.hits + row.counts.misses for row in rows}
    assert len(asked) == 1


def test_belady_against_all_choices() -> None:
    """On a short trace, the best of all possible caches is found by trying every one."""
    rng = np.random.default_rng(0)
    model = TracedModel("f", 1, 5, 1, {0: RECORD_BYTES})
    for _ in range(30):
        wanted = rng.integers(0, 5, 9).tolist()
        recorder = TraceRecorder()
        for e in wanted:
            recorder.union(0, np.array([[e]]), prefill=False)
        from coli.store.policy import ResidencyPolicy

        trace = recorder.trace(model, ResidencyPolicy(1, 5, [0], [PoolSize(2)]))
        best = {frozenset[int](): 0}
        for e in wanted:
            after: dict[frozenset[int], int] = {}
            for held, hits in best.items():
                for gone in [None, *held, e]:
                    kept = (held | {e}) - {gone}
                    if len(kept) <= 2:
                        after[kept] = max(after.get(kept, 0), hits + (e in held))
            best = after
        assert replay(trace, "belady", 2 * RECORD_BYTES).counts.hits == max(best.values())


def test_more_memory_never_hits_less_for_lru_and_belady(tmp_path: Path) -> None:
    trace = record_run(tmp_path, 20, forwards=60)
    for policy in ("lru", "belady"):
        rows = compare(trace, [policy], [n * RECORD_BYTES for n in (12, 20, 40, 80, L * E)], warmup=0.0)
        rates = [row.counts.hit_rate for row in rows]
        assert rates == sorted(rates)
    assert rows[-1].bytes_read <= L * E * RECORD_BYTES


def test_warm_up_is_not_counted(tmp_path: Path) -> None:
    trace = record_run(tmp_path, 20, forwards=40)
    full, half = (replay(trace, "lru", L * E * RECORD_BYTES, warmup=w) for w in (0.0, 0.5))
    assert half.bytes_read < full.bytes_read
    assert half.tokens < full.tokens == trace.tokens


@pytest.mark.parametrize("damage", ["cut", "text", "other", "ids"])
def test_damaged_traces_are_one_line(tmp_path: Path, damage: str) -> None:
    trace = record_run(tmp_path, 20, forwards=3)
    path = tmp_path / "run.trace"
    write_trace(path, trace)
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-7])
    elif damage == "text":
        path.write_text("not a trace")
    elif damage == "other":
        path.write_bytes(data.replace(b"coli-trace 1", b"coli-trace 9"))
    else:
        trace.numbers[:] = E
        write_trace(path, trace)
    with pytest.raises(CheckpointError) as caught:
        Trace.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


HEADERS: list[tuple[str, str, object]] = [
    ("model", "num_layers", 10**12),
    ("model", "num_layers", 2),
    ("model", "num_experts", 10**12),
    ("model", "num_experts_per_tok", 0),
    ("model", "num_experts_per_tok", 10**9),
    ("model", "num_experts_per_tok", 3.0),
    ("model", "record_bytes", {"0": 0, "1": 1, "2": 1, "3": 1}),
    ("model", "record_bytes", {"0": 1, "9": 1}),
    ("model", "record_bytes", [1]),
    ("run", "pools", [[0, 0]]),
    ("run", "pools", [["x", 0]]),
    ("run", "pools", []),
    ("run", "pool_of_layer", [None] * L),
    ("run", "pool_of_layer", [7] * L),
    ("run", "pinned", [L * E]),
    ("run", "pinned", [[1]]),
    ("run", "counts", {"hits": "many"}),
]


@pytest.mark.parametrize(("part", "name", "value"), HEADERS)
def test_what_no_recorder_writes_is_refused_before_a_replay(
    tmp_path: Path, part: str, name: str, value: object
) -> None:
    path = tmp_path / "run.trace"
    write_trace(path, record_run(tmp_path, 20, forwards=3))
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
        arrays = {key: file.get_tensor(key) for key in ("events", "numbers")}
    metadata[part] = json.dumps(json.loads(metadata[part]) | {name: value})
    path.write_bytes(save(arrays, metadata))
    with pytest.raises(CheckpointError, match="damaged trace"):
        Trace.read(path)


@pytest.mark.parametrize("damage", ["kind", "type", "columns", "row"])
def test_events_no_run_has_are_refused(tmp_path: Path, damage: str) -> None:
    trace = record_run(tmp_path, 20, forwards=3)
    events, numbers = trace.events.copy(), trace.numbers.copy()
    if damage == "kind":
        events[0, 0] = 9
    elif damage == "type":
        events = events.astype(np.float32)
    elif damage == "columns":
        events = events[:, :2]
    else:  # a forward of fewer rows than its commit names
        numbers[-1] = 60_000
    path = tmp_path / "run.trace"
    write_trace(path, replace(trace, events=np.ascontiguousarray(events), numbers=numbers))
    with pytest.raises(CheckpointError, match="damaged trace"):
        Trace.read(path)
