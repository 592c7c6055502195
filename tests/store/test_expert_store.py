"""The store brings every expert of a union once, with the right bytes, inside its budget."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from store.fake_records import RECORD_BYTES, record, routes, write_records

from coli.errors import MemoryBudgetError
from coli.store.expert_store import ExpertStore

L, E, A = 5, 16, 4


def bytes_at(address: int, count: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(address, count), np.uint8)


def open_store(folder: Path, records: int) -> ExpertStore:
    return ExpertStore(write_records(folder, L, E), L, E, records * RECORD_BYTES)


@pytest.mark.parametrize("slots", [1, 3, 20, 40, L * E])
@pytest.mark.parametrize("prefill", [False, True])
def test_union_arrives_once_with_its_bytes(tmp_path: Path, slots: int, prefill: bool) -> None:
    store = open_store(tmp_path, slots)
    for forward in routes(seed=1, forwards=6, num_layers=L, num_experts=E, num_experts_per_tok=A, rows=5):
        for layer_idx, expert_ids in enumerate(forward):
            seen = []
            for ids in store.fetch(layer_idx, expert_ids, prefill=prefill):
                for e in ids.tolist():
                    address = int(store.residency[layer_idx, e])
                    assert np.array_equal(bytes_at(address, RECORD_BYTES), record(layer_idx, e))
                    seen.append(e)
            assert sorted(seen) == np.unique(expert_ids).tolist()
            assert not prefill or seen == sorted(seen)
        assert np.count_nonzero(store.residency) <= slots
    store.close()


def test_everything_resident_reads_each_record_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, L * E)
    used = set()
    for forward in routes(seed=2, forwards=30, num_layers=L, num_experts=E, num_experts_per_tok=A):
        for layer_idx, expert_ids in enumerate(forward):
            used |= {(layer_idx, e) for e in expert_ids.ravel().tolist()}
            for _ in store.fetch(layer_idx, expert_ids, prefill=False):
                pass
    stats = store.stats()
    assert stats.misses == stats.reads == len(used)
    assert stats.bytes_read == len(used) * RECORD_BYTES
    store.close()


def test_budget_below_one_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="one record takes 4096"):
        ExpertStore(write_records(tmp_path, L, E), L, E, RECORD_BYTES - 1)
