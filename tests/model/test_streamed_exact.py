"""Law 1 while experts stream, with ==: prefetch, pins, read modes, reader counts and arrival orders change no bit."""

import functools
import itertools

import numpy as np
import pytest
from containers import FIXTURES, container, expected
from forward_runs import Runner
from store.stores import ShufflingReaders

from coli.store import opening

CUTS = ([1] * 24, [3] * 8, [24])


def routed(name: str) -> bool:
    return Runner(container(name, "q4")).store is not None


@functools.cache
def sparse_models() -> tuple[str, ...]:
    return tuple(name for name in FIXTURES if routed(name))


@functools.cache
def resident(name: str) -> tuple[list[int], np.ndarray]:
    """Ids, and their logits computed row by row with everything in memory."""
    want = expected(name)
    ids = ((want["prompt_ids"] + want["greedy_ids"]) * 24)[:24]
    return ids, Runner(container(name, "q4")).chunks(ids, [1] * 24)


def streaming(name: str, **kwargs: object) -> Runner:
    """Room for 16 records at least, so that there are places for guesses, and for half of all at most."""
    spec = Runner(container(name, "q4")).spec
    slots = max(16, spec.num_hidden_layers * spec.num_experts // 2)
    return Runner(container(name, "q4"), slots=slots, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("prefetch", [False, True])
def test_modes_and_prefetch_give_the_bits_of_everything_in_memory(io: str, prefetch: bool) -> None:
    used = 0
    for name in sparse_models():
        ids, alone = resident(name)
        runner = streaming(name, io=io, prefetch=prefetch)
        assert runner.store is not None
        for sizes in CUTS:
            assert np.array_equal(runner.chunks(ids, sizes), alone), (name, sizes)
        used += runner.store.stats().prefetch_hits
        runner.store.close()
    assert (used > 0) is prefetch


@pytest.mark.parametrize(("readers", "seed"), list(itertools.product([1, 2, 5], [1, 2])))
def test_arrival_orders_and_reader_counts_give_the_bits_of_everything_in_memory(
    readers: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are shuffled and some take several times as long as others."""
    for places in ("SlabPlaces", "MappedPlaces"):
        made = getattr(opening, places)
        monkeypatch.setattr(opening, places, lambda *args, made=made: ShufflingReaders(made(*args), seed))
    for name in sparse_models():
        ids, alone = resident(name)
        for io, prefetch in (("pread", False), ("direct", True), ("mmap", True)):
            runner = streaming(name, io=io, prefetch=prefetch, reader_threads=readers)
            assert runner.store is not None
            for sizes in CUTS[:2]:
                assert np.array_equal(runner.chunks(ids, sizes), alone), (name, io, sizes)
            runner.store.close()


def test_a_history_s_pins_give_the_bits_of_everything_in_memory() -> None:
    for name in sparse_models():
        ids, alone = resident(name)
        layers = sorted(Runner(container(name, "q4")).container.moe_layers)
        experts = Runner(container(name, "q4")).spec.num_experts
        for pinned in ((layers[0] * experts,), tuple(layer * experts + e for layer in layers for e in (0, 2))):
            runner = streaming(name, pinned=pinned, prefetch=True)
            assert np.array_equal(runner.chunks(ids, CUTS[1]), alone), (name, pinned)
