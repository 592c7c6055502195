"""Law 1 on logits, with ==: cuts, batches, trees, threads, budgets and read order never change a bit."""

import random

import numpy as np
import pytest
from containers import FIXTURES, container, expected
from forward_runs import Runner

from coli.kernels import latent
from coli.model import layers

KINDS = ("f32", "q8", "q4")


def text_ids(name: str, count: int = 48) -> list[int]:
    want = expected(name)
    ids: list[int] = want["prompt_ids"] + want["greedy_ids"]
    return (ids * (count // len(ids) + 1))[:count]


def one_by_one(name: str, quant: str, kv: str = "f32") -> tuple[list[int], np.ndarray]:
    ids = text_ids(name)
    return ids, Runner(container(name, quant), kv=kv).chunks(ids, [1] * len(ids))


@pytest.mark.parametrize("quant", KINDS)
@pytest.mark.parametrize("name", FIXTURES)
def test_any_cut_into_chunks_gives_the_bits_of_row_by_row(name: str, quant: str) -> None:
    ids, alone = one_by_one(name, quant)
    runner = Runner(container(name, quant))
    rng = random.Random(1)
    cuts = [[48], [2] * 24, [3] * 16, [16] * 3, [17, 31], [5, 43]]
    for _ in range(3):
        sizes: list[int] = []
        while sum(sizes) < 48:
            sizes.append(min(rng.randint(1, 20), 48 - sum(sizes)))
        cuts.append(sizes)
    for sizes in cuts:
        assert np.array_equal(runner.chunks(ids, sizes), alone), sizes
        assert np.array_equal(runner.chunks(ids, sizes, prefill=True), alone), ("prefill", sizes)


@pytest.mark.parametrize("quant", KINDS)
@pytest.mark.parametrize("name", FIXTURES)
def test_two_threads_give_the_bits_of_one(name: str, quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, alone = one_by_one(name, quant)
    monkeypatch.setattr(layers, "SMALL_WORK", 0)  # these models are too small for two threads otherwise
    runner = Runner(container(name, quant), threads=2)
    for sizes in ([1] * 48, [48], [7, 41]):
        assert np.array_equal(runner.chunks(ids, sizes), alone)


@pytest.mark.parametrize("name", [name for name in FIXTURES if "llama" not in name and "qwen3-" not in name])
def test_any_budget_gives_the_bits_of_everything_in_memory(name: str) -> None:
    ids, alone = one_by_one(name, "q4")
    experts = Runner(container(name, "q4")).spec.num_experts
    for slots in (experts, experts + 1, 2 * experts):
        runner = Runner(container(name, "q4"), slots=slots)
        for sizes in ([1] * 48, [48], [7, 41]):  # the second pass finds a warm cache
            assert np.array_equal(runner.chunks(ids, sizes), alone), (slots, sizes)


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("name", FIXTURES)
def test_a_row_in_a_tree_gives_the_bits_of_its_chain(name: str, kv: str) -> None:
    runner = Runner(container(name, "q4"), kv=kv)
    vocab = runner.spec.vocab_size
    prompt = text_ids(name, 11)
    rng = random.Random(7)
    for _ in range(4):
        size = rng.randint(2, 20)
        ids = [rng.randrange(vocab) for _ in range(size)]
        parents = [-1, *(rng.randint(0, i - 1) for i in range(1, size))]
        chains: list[list[int]] = []
        for i in range(size):
            chains.append([*(chains[parents[i]] if parents[i] >= 0 else []), ids[i]])
        cache = runner.cache()
        runner.model.forward(cache, np.array(prompt), np.arange(11), None, np.array([], np.int64), prefill=True)
        depth = np.array([10 + len(chain) for chain in chains])
        rows = np.arange(size)
        tree = runner.model.forward(cache, np.array(ids), depth, np.array(parents), rows, prefill=False).copy()
        for i in range(size):
            whole = prompt + chains[i]
            assert np.array_equal(tree[i], runner.chunks(whole, [1] * len(whole))[-1]), (i, parents)
        # keep one path: what follows sees the bits of a chain
        leaf = rng.randrange(size)
        path, at = [], leaf
        while at >= 0:
            path.append(at)
            at = parents[at]
        cache.keep_path(11, sorted(path))
        follow = runner.model.forward(
            cache, np.array([3]), np.array([cache.length]), None, np.array([0]), prefill=False
        )
        whole = [*prompt, *chains[leaf], 3]
        assert np.array_equal(follow[0], runner.chunks(whole, [1] * len(whole))[-1])


@pytest.mark.parametrize("name", FIXTURES)
def test_rows_behind_a_rewind_give_the_bits_of_a_fresh_cache(name: str) -> None:
    runner, ids = Runner(container(name, "q4"), kv="f16"), text_ids(name, 24)
    cache, rng = runner.cache(), random.Random(3)
    for length in (0, 7, 16, 17, 11, 1):
        runner.model.forward(cache, np.array(ids), np.arange(24) + cache.length, None, np.array([0]), prefill=True)
        cache.rewind(min(length, cache.length))
        runner.model.settle(0)
        other = [rng.randrange(runner.spec.vocab_size) for _ in range(9)]
        rows, start = np.arange(9), cache.length
        found = runner.model.forward(cache, np.array(other), start + rows, None, rows, prefill=False).copy()
        whole = [*ids[:start], *other]
        assert np.array_equal(found, runner.chunks(whole, [len(whole)])[start:]), length
        cache.rewind(0)


def test_buffers_outgrown_one_row_at_a_time_do_not_add_up():
    """Recorded programs hold the arrays of their time: all of them together are not twice the last."""
    buffers = layers.Buffers()
    views = [buffers.rows("x", rows, 400) for rows in range(1, 101)]
    held = {id(view.base): view.base for view in views}
    assert sum(array.nbytes for array in held.values()) < 2.1 * buffers.nbytes < 2.8 * 100 * 400 * 4


def test_scratch_bytes_outgrown_row_by_row_do_not_add_up():
    """The same of what is asked for in bytes."""
    buffers = layers.Buffers()
    held = {id(array): array for array in [buffers.bytes("x", 4000 * rows) for rows in range(1, 101)]}
    assert sum(array.nbytes for array in held.values()) < 2.1 * buffers.nbytes < 4.3 * 100 * 4000


def test_the_scratch_of_latent_attention_is_one_array_for_forwards_of_ever_more_rows():
    sizes = {latent.working_bytes(rows, 128, 512, 64, 8192, 2) for rows in (1, 2, 63, 512, 4096)}
    assert len(sizes) == 1
    assert latent.working_bytes(8192, 128, 512, 64, 8192, 2) > sizes.pop()
