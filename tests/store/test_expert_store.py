"""The store brings every expert of a union once, with the right bytes, inside its places, whatever the readers do."""

import sys
from pathlib import Path

import numpy as np
import pytest
from store.fake_records import RECORD_BYTES, routes, write_records
from store.stores import ShufflingReaders, bytes_at, consume, make_store

from coli.errors import MemoryBudgetError
from coli.store.opening import open_store
from coli.store.policy import PoolSize

L, E, A = 5, 16, 4
MODES = ["mmap", "pread", "direct"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [1, 2, 3, 9, 40, L * E])
@pytest.mark.parametrize("prefill", [False, True])
def test_union_arrives_once_with_its_bytes(tmp_path: Path, mode: str, slots: int, prefill: bool) -> None:
    store = make_store(write_records(tmp_path, L, E), E, slots, mode)
    for forward in routes(seed=1, forwards=6, num_layers=L, num_experts=E, num_experts_per_tok=A, rows=5):
        for layer_idx, expert_ids in enumerate(forward):
            seen = consume(store, layer_idx, expert_ids, prefill)
            assert sorted(seen) == np.unique(expert_ids).tolist()
            assert not prefill or seen == sorted(seen)
        assert np.count_nonzero(store.residency) <= slots
    store.close()


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [2, 7, 30, [PoolSize(2, 8)] * L])
def test_arrival_order_changes_neither_bytes_nor_residency(
    tmp_path: Path, prefill: bool, seed: int, slots: int | list[PoolSize]
) -> None:
    layouts = write_records(tmp_path, L, E)
    store = make_store(layouts, E, slots, "pread", wrap=lambda p: ShufflingReaders(p, seed), reader_threads=4)
    plain = make_store(layouts, E, slots, "pread", reader_threads=1)
    for forward in routes(seed=seed, forwards=8, num_layers=L, num_experts=E, num_experts_per_tok=A, rows=4):
        for layer_idx, expert_ids in enumerate(forward):
            assert sorted(consume(store, layer_idx, expert_ids, prefill)) == np.unique(expert_ids).tolist()
            consume(plain, layer_idx, expert_ids, prefill)
            assert np.array_equal(store.residency != 0, plain.residency != 0)
        store.settle(2)
        plain.settle(2)
    assert store.stats().bytes_read == plain.stats().bytes_read
    store.close()
    plain.close()


@pytest.mark.parametrize("mode", MODES)
def test_everything_resident_reads_each_record_once(tmp_path: Path, mode: str) -> None:
    store = make_store(write_records(tmp_path, L, E), E, L * E, mode)
    used = set()
    for forward in routes(seed=2, forwards=30, num_layers=L, num_experts=E, num_experts_per_tok=A):
        for layer_idx, expert_ids in enumerate(forward):
            used |= {(layer_idx, e) for e in expert_ids.ravel().tolist()}
            consume(store, layer_idx, expert_ids)
    stats = store.stats()
    assert stats.misses == stats.reads == len(used)
    assert stats.bytes_read == len(used) * RECORD_BYTES
    store.close()


def test_resident_experts_come_before_any_read_is_waited_for(tmp_path: Path) -> None:
    store = make_store(write_records(tmp_path, L, E), E, 8)
    consume(store, 0, np.array([[3, 7]]))
    waited = store.stats().wait_s
    items = store.fetch(0, np.array([[1, 3, 5, 7]]), prefill=False)
    assert next(items).tolist() == [3, 7]
    assert store.stats().wait_s == waited
    assert sorted(e for ids in items for e in ids.tolist()) == [1, 5]
    store.close()


def test_touched_counts_like_a_fetch(tmp_path: Path) -> None:
    layouts = write_records(tmp_path, L, E)
    jitted, plain = make_store(layouts, E, L * E), make_store(layouts, E, L * E)
    for forward in routes(seed=3, forwards=40, num_layers=L, num_experts=E, num_experts_per_tok=A, rows=2):
        for layer_idx, expert_ids in enumerate(forward):
            consume(plain, layer_idx, expert_ids)
            if np.all(jitted.residency[layer_idx, expert_ids]):
                jitted.touched(layer_idx, expert_ids)
            else:
                consume(jitted, layer_idx, expert_ids)
        jitted.settle([1])
        plain.settle([1])
    assert jitted.stats().hits == plain.stats().hits
    assert np.array_equal(jitted.policy.usage, plain.policy.usage)
    jitted.close()
    plain.close()


@pytest.mark.parametrize("stop_after", [0, 1])
def test_a_union_given_up_half_way_leaves_a_usable_store(tmp_path: Path, stop_after: int) -> None:
    store = make_store(write_records(tmp_path, L, E), E, 3, wrap=lambda p: ShufflingReaders(p, 1))
    for forward in routes(seed=4, forwards=10, num_layers=L, num_experts=E, num_experts_per_tok=A, rows=2):
        for layer_idx, expert_ids in enumerate(forward):
            items = store.fetch(layer_idx, expert_ids, prefill=False)
            for _ in range(stop_after):
                next(items)
            consume(store, layer_idx, expert_ids)
            assert np.count_nonzero(store.residency) <= 3
    store.close()


@pytest.mark.parametrize("mode", MODES)
def test_pinned_experts_are_there_from_the_start_and_stay(tmp_path: Path, mode: str) -> None:
    pinned = (0, 5, E + 2)
    store = make_store(write_records(tmp_path, L, E), E, 2, mode, pinned=pinned)
    for forward in routes(seed=5, forwards=5, num_layers=L, num_experts=E, num_experts_per_tok=A):
        for layer_idx, expert_ids in enumerate(forward):
            consume(store, layer_idx, expert_ids)
            assert all(store.residency.flat[key] for key in pinned)
    stats = store.stats()
    assert stats.pinned_hits > 0
    assert stats.reads == stats.misses + len(pinned)
    store.close()


def test_prefetch_saves_waiting_but_changes_no_decision(tmp_path: Path) -> None:
    layouts = write_records(tmp_path, L, E)
    ahead, plain = make_store(layouts, E, 10, prefetch_slots=4), make_store(layouts, E, 10)
    for forward in routes(seed=6, forwards=20, num_layers=L, num_experts=E, num_experts_per_tok=A):
        for layer_idx, expert_ids in enumerate(forward):
            consume(ahead, layer_idx, expert_ids)
            consume(plain, layer_idx, expert_ids)
            if layer_idx + 1 < L:
                ahead.prefetch(layer_idx + 1, forward[layer_idx + 1].ravel().tolist()[:3])
    guessed, sure = ahead.stats(), plain.stats()
    assert guessed.prefetch_hits > 0
    assert (guessed.hits, guessed.misses, guessed.evictions) == (sure.hits, sure.misses, sure.evictions)
    ahead.close()
    plain.close()


def test_an_id_stays_valid_until_the_next_item_is_asked_for(tmp_path: Path) -> None:
    """With one place, every record is overwritten by the next: its bytes must last as long as promised."""
    store = make_store(write_records(tmp_path, L, E), E, 1)
    items = store.fetch(0, np.array([[2, 4, 9]]), prefill=False)
    for ids in items:
        address = int(store.residency[0, ids[0]])
        before = bytes_at(address).copy()
        while store._readers.receive(block=False):  # whatever the readers have finished meanwhile
            raise AssertionError("a read was issued into a place in use")
        assert np.array_equal(bytes_at(address), before)
    store.close()


def test_close_restores_the_switch_interval(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    store = make_store(write_records(tmp_path, L, E), E, 4)
    store.close()
    assert sys.getswitchinterval() == before


def test_budget_below_one_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="one record takes 4096"):
        open_store(
            write_records(tmp_path, L, E),
            num_layers=L,
            num_experts=E,
            num_experts_per_tok=A,
            capacity_bytes=RECORD_BYTES - 1,
            notice=lambda line: None,
        )
