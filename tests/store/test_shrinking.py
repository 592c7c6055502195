"""When a limit comes close the store gives memory back, keeps its pins and goes on with the right bytes."""

from pathlib import Path

import numpy as np
import pytest
from store.fake_records import RECORD_BYTES, routes, write_records
from store.stores import consume, make_store

from coli.store import slab
from coli.store.expert_store import ExpertStore
from coli.store.limits import MemoryLevel
from coli.store.memory import MemoryGuard
from coli.store.policy import OVERLAP, PoolSize

L, E, A = 4, 16, 3


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "SLAB_BYTES", 8 * RECORD_BYTES)


def run(store: ExpertStore, seed: int, forwards: int = 8, rows: int = 2) -> None:
    for forward in routes(seed, forwards, L, E, A, rows):
        for layer_idx, expert_ids in enumerate(forward):
            assert sorted(consume(store, layer_idx, expert_ids)) == np.unique(expert_ids).tolist()
        store.settle(1)


def held(store: ExpertStore) -> int:
    return int(np.count_nonzero(store.residency))


@pytest.mark.parametrize("mode", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("sizes", [40, [PoolSize(8, OVERLAP)] * L])
@pytest.mark.parametrize("filled", [False, True])
def test_places_go_and_the_bytes_stay_right(
    tmp_path: Path, mode: str, sizes: int | list[PoolSize], filled: bool
) -> None:
    store = make_store(write_records(tmp_path, L, E), E, sizes, mode, prefetch_slots=4)
    if filled:
        run(store, 1)
    before = sum(pool.slots for pool in store.policy.pools)
    freed = store.shrink(10 * RECORD_BYTES)
    assert freed >= 10 * RECORD_BYTES
    after = sum(pool.slots for pool in store.policy.pools)
    assert before - after == freed // RECORD_BYTES
    assert held(store) <= after
    run(store, 2)
    assert held(store) <= after
    store.close()


def test_every_pool_keeps_a_place(tmp_path: Path) -> None:
    store = make_store(write_records(tmp_path, L, E), E, 20, "pread")
    freed = store.shrink(1000 * RECORD_BYTES)
    assert 0 < freed < 20 * RECORD_BYTES
    assert store.shrink(RECORD_BYTES) == 0
    run(store, 3)
    store.close()


def test_pinned_experts_stay(tmp_path: Path) -> None:
    pinned = tuple(range(12))
    store = make_store(write_records(tmp_path, L, E), E, 30, "pread", pinned=pinned)
    run(store, 4)
    store.shrink(1000 * RECORD_BYTES)
    assert all(store.residency.flat[key] for key in pinned)
    run(store, 5)
    store.close()


def test_the_guard_is_asked_after_a_forward(tmp_path: Path) -> None:
    now = [0.0]
    guard = MemoryGuard(lambda: [MemoryLevel("memory.max of cgroup /a", 10**9, 10**9)], lambda: now[0])
    notices: list[str] = []
    store = make_store(write_records(tmp_path, L, E), E, 40, "pread", guard=guard, notices=notices)
    run(store, 6)
    assert not notices
    now[0] = 10.0
    run(store, 7)
    assert len(notices) == 1
    assert notices[0].startswith("memory: memory.max of cgroup /a is nearly used up: gave back")
    store.close()


@pytest.mark.parametrize("room", [10, 24])
def test_of_mapped_records_as_many_stay_as_there_is_room_for(tmp_path: Path, room: int) -> None:
    """No limit counts them as used, so giving them back never ends a squeeze."""
    now = [0.0]
    level = MemoryLevel("memory.max of cgroup /a", 10**9, 10**9 - room * RECORD_BYTES)
    guard = MemoryGuard(lambda: [level], lambda: now[0])
    notices: list[str] = []
    store = make_store(write_records(tmp_path, L, E), E, L * E, "mmap", guard=guard, notices=notices)
    for layer_idx in range(L):
        consume(store, layer_idx, np.arange(E)[None])
    for _ in range(12):
        now[0] += 10.0
        store.settle(1)
    assert held(store) == room
    assert len(notices) == 1
    run(store, 7)
    store.close()


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs procfs")
def test_a_released_slab_is_unmapped() -> None:
    arena = slab.SlotArena(RECORD_BYTES, 24)
    address = arena.slabs[2].address
    assert mapped(address)
    arena.release_slab(2)
    assert not mapped(address)
