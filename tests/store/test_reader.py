"""Reader threads: demand first, one read per record, computing goes on while others are still being read."""

import threading
from pathlib import Path

import numpy as np
from store.fake_records import write_records
from store.stores import consume, make_store

from coli.store.places import RecordPlaces
from coli.store.reader import Read, ReaderThreads

L, E = 3, 16
PATIENCE_S = 300.0


class Gates:
    """Places whose reads wait until the test opens the record's gate."""

    def __init__(self, places: RecordPlaces, closed: set[int]) -> None:
        self._places = places
        self._gates = {key: threading.Event() for key in closed}
        self.started: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._places, name)

    def perform(self, read: Read) -> None:
        self.started.append(read.key)
        if read.key in self._gates:
            assert self._gates[read.key].wait(PATIENCE_S)
        self._places.perform(read)

    def open(self, key: int) -> None:
        self._gates[key].set()


def test_experts_are_yielded_while_others_are_still_being_read(tmp_path: Path) -> None:
    gates: list[Gates] = []

    def wrap(places: RecordPlaces) -> RecordPlaces:
        gates.append(Gates(places, {3, 7}))
        return gates[0]  # type: ignore[return-value]

    store = make_store(write_records(tmp_path, L, E), E, 20, wrap=wrap, reader_threads=3)
    consume(store, 0, np.array([[1, 2]]))
    items = store.fetch(0, np.array([[1, 2, 3, 7, 9]]), prefill=False)
    assert next(items).tolist() == [1, 2]
    assert next(items).tolist() == [9]
    gates[0].open(7)
    assert next(items).tolist() == [7]
    gates[0].open(3)
    assert next(items).tolist() == [3]
    assert next(items, None) is None
    store.close()


def test_prefill_keeps_the_order_while_later_records_arrive_first(tmp_path: Path) -> None:
    gates: list[Gates] = []

    def wrap(places: RecordPlaces) -> RecordPlaces:
        gates.append(Gates(places, {4}))
        return gates[0]  # type: ignore[return-value]

    store = make_store(write_records(tmp_path, L, E), E, 20, wrap=wrap)
    items = store.fetch(0, np.array([[2, 4, 8]]), prefill=True)
    assert next(items).tolist() == [2]
    gates[0].open(4)
    assert [e for ids in items for e in ids.tolist()] == [4, 8]
    store.close()


def test_a_record_wanted_twice_is_read_once(tmp_path: Path) -> None:
    """Single flight: demanded while its prefetch runs, and again while an abandoned union's read runs."""
    gates: list[Gates] = []

    def wrap(places: RecordPlaces) -> RecordPlaces:
        gates.append(Gates(places, {5}))
        return gates[0]  # type: ignore[return-value]

    store = make_store(write_records(tmp_path, L, E), E, 20, wrap=wrap, prefetch_slots=2)
    store.prefetch(0, [5])
    store.prefetch(0, [5])
    store.fetch(0, np.array([[5, 6]]), prefill=False)
    items = store.fetch(0, np.array([[5, 6]]), prefill=False)
    gates[0].open(5)
    assert sorted(e for ids in items for e in ids.tolist()) == [5, 6]
    assert gates[0].started.count(5) == 1
    assert store.stats().reads == 2
    store.close()


def test_a_guess_that_no_reader_began_is_called_off(tmp_path: Path) -> None:
    gates: list[Gates] = []

    def wrap(places: RecordPlaces) -> RecordPlaces:
        gates.append(Gates(places, {3}))
        return gates[0]  # type: ignore[return-value]

    store = make_store(write_records(tmp_path, L, E), E, 20, wrap=wrap, reader_threads=1, prefetch_slots=2)
    items = store.fetch(0, np.array([[3]]), prefill=False)
    store.prefetch(1, [1, 2])
    store.prefetch(1, [2, 4])
    gates[0].open(3)
    assert [ids.tolist() for ids in items] == [[3]]
    assert sorted(consume(store, 1, np.array([[2, 5]]))) == [2, 5]
    assert E + 1 not in gates[0].started
    assert store.stats().prefetched - store.stats().prefetch_hits <= 1
    store.close()


def test_the_time_with_reads_under_way_is_counted(tmp_path: Path) -> None:
    gates: list[Gates] = []

    def wrap(places: RecordPlaces) -> RecordPlaces:
        gates.append(Gates(places, {3}))
        return gates[0]  # type: ignore[return-value]

    store = make_store(write_records(tmp_path, L, E), E, 20, wrap=wrap)
    assert store.stats().reading_s == 0
    items = store.fetch(0, np.array([[3]]), prefill=False)
    early = store.stats().reading_s
    assert store.stats().reading_s > early
    gates[0].open(3)
    assert [ids.tolist() for ids in items] == [[3]]
    late = store.stats().reading_s
    assert store.stats().reading_s == late
    store.close()


def test_demanded_reads_overtake_prefetched_ones() -> None:
    order: list[int] = []
    hold = threading.Event()

    def perform(read: Read) -> None:
        if read.key == 0:
            assert hold.wait(PATIENCE_S)
        order.append(read.key)

    readers = ReaderThreads(perform, 1, lambda read: None)
    readers.submit(Read(0, None))
    ahead = [Read(key, None, prefetch=True) for key in (10, 11, 12)]
    for read in ahead:
        readers.submit(read)
    readers.submit(Read(1, None))
    readers.promote(ahead[2])
    readers.submit(Read(2, None))
    hold.set()
    for _ in range(6):
        answer = readers.receive(block=True)
        assert answer is not None
        assert answer.error is None
    assert order == [0, 1, 12, 2, 10, 11]
    readers.close()


def test_any_error_of_a_reader_is_handed_over() -> None:
    def perform(read: Read) -> None:
        raise ZeroDivisionError

    readers = ReaderThreads(perform, 2, lambda read: None)
    readers.submit(Read(0, None))
    answer = readers.receive(block=True)
    assert answer is not None
    assert isinstance(answer.error, ZeroDivisionError)
    readers.close()


def test_close_forgets_what_waits_and_ends_the_threads() -> None:
    hold = threading.Event()
    others = set(threading.enumerate())  # readers of stores that earlier tests left open
    readers = ReaderThreads(lambda read: hold.wait(PATIENCE_S) and None, 1, lambda read: None)
    for key in range(5):
        readers.submit(Read(key, None))
    hold.set()
    readers.close()
    assert set(threading.enumerate()) <= others
