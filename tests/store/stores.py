"""Stores over fake records, with every part replaceable."""

import ctypes
import os
import threading
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from store.fake_records import RECORD_BYTES, FakeLayout, record

from coli.store.expert_store import ExpertStore
from coli.store.memory import MemoryGuard
from coli.store.orders import EvictionOrder, LruOrder
from coli.store.places import MappedPlaces, RecordPlaces, SlabPlaces
from coli.store.policy import PoolSize, ResidencyPolicy
from coli.store.reader import Read
from coli.store.record_files import IoMode, Preadv, SlotFiles
from coli.store.stats import TraceSink


def make_places(
    layouts: Mapping[int, FakeLayout], num_experts: int, mode: str, slots: int, preadv: Preadv, notices: list[str]
) -> RecordPlaces:
    if mode == "mmap":
        return MappedPlaces(layouts, num_experts)
    paths = sorted({layout.path for layout in layouts.values()})
    files = SlotFiles(paths, IoMode(mode), notices.append, preadv)
    return SlabPlaces(layouts, num_experts, files, {RECORD_BYTES: slots})


def make_store(
    layouts: Mapping[int, FakeLayout],
    num_experts: int,
    slots: int | list[PoolSize],
    mode: str = "pread",
    *,
    preadv: Preadv | None = None,
    notices: list[str] | None = None,
    wrap: Callable[[RecordPlaces], RecordPlaces] = lambda places: places,
    pinned: tuple[int, ...] = (),
    order: Callable[[int, int], EvictionOrder] = LruOrder,
    reader_threads: int = 2,
    prefetch_slots: int = 0,
    trace: TraceSink | None = None,
    guard: MemoryGuard | None = None,
) -> ExpertStore:
    """`slots`: of one pool for all layers, or one PoolSize per layer."""
    L = len(layouts)
    pools = [PoolSize(slots)] if isinstance(slots, int) else slots
    pool_of_layer = [0] * L if isinstance(slots, int) else list(range(L))
    policy = ResidencyPolicy(L, num_experts, pool_of_layer, pools, pinned=pinned, order=order)
    total = sum(pool.slots for pool in pools) + max(pool.transient_slots for pool in pools)
    total += len(pinned) + prefetch_slots
    places = make_places(layouts, num_experts, mode, total, preadv or os.preadv, notices if notices is not None else [])
    return ExpertStore(
        layouts, policy, wrap(places), reader_threads=reader_threads, prefetch_slots=prefetch_slots, trace=trace,
        guard=guard, notice=notices.append if notices is not None else lambda line: None,
    )  # fmt: skip


def bytes_at(address: int, count: int = RECORD_BYTES) -> NDArray[np.uint8]:
    return np.frombuffer(ctypes.string_at(address, count), np.uint8)


def consume(store: ExpertStore, layer_idx: int, expert_ids: NDArray[np.int64], prefill: bool = False) -> list[int]:
    """Fetch a union, check the bytes of every record as it comes, return the ids in order."""
    seen: list[int] = []
    for ids in store.fetch(layer_idx, expert_ids, prefill=prefill):
        assert len(ids)
        for e in ids.tolist():
            address = int(store.residency[layer_idx, e])
            assert address, f"expert {e} was yielded without an address"
            assert np.array_equal(bytes_at(address), record(layer_idx, e)), f"expert {e} holds other bytes"
            seen.append(e)
    return seen


class ShufflingReaders:
    """Places whose reads finish in an order of their own.

    A read is repeated a random number of times, so that others overtake it without a clock.
    """

    def __init__(self, places: RecordPlaces, seed: int) -> None:
        self._places = places
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._places, name)

    def perform(self, read: Read) -> None:
        with self._lock:
            spins = int(self._rng.integers(0, 4))
        for _ in range(spins):  # lets the other readers overtake, without a clock
            self._places.perform(Read(read.key, read.place))
        self._places.perform(read)
