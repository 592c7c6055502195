"""Layers with a window keep W + 64 rows and a little, and compute the bits of a cache that keeps everything."""

import random

import numpy as np
import pytest
from containers import container
from forward_runs import Runner

from coli.engine.session import Session
from coli.model.kv_cache import STEP, KVCache, kv_bytes, rows_kept

NAME = "gpt_oss-base"  # layer 0 slides, W = 8
IDS = [(17 * i * i + 5 * i + 3) % 250 for i in range(400)]


def whole(runner: Runner, kv: str = "f32") -> KVCache:
    spec = runner.spec
    return KVCache(spec.num_hidden_layers, spec.num_key_value_heads, spec.head_dim, 528, kv)


def logits(runner: Runner, cache: KVCache, ids: list[int], parents: list[int] | None = None) -> np.ndarray:
    """Logits of all rows; the rows stay in the cache."""
    start, rows = cache.length, np.arange(len(ids))
    depth = rows.copy()
    if parents is not None:
        for row, parent in enumerate(parents):
            depth[row] = depth[parent] + 1 if parent >= 0 else 0
    family = None if parents is None else np.array(parents)
    return runner.model.forward(cache, np.array(ids), start + depth, family, rows, prefill=False).copy()


@pytest.fixture(params=["f32", "f16"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_cache_of_a_sliding_layer_does_not_grow_with_the_context(kv: str) -> None:
    runner = Runner(container(NAME, "f32"), kv=kv)
    assert rows_kept(128, 10**5) == 208
    small, large = (runner.cache(context) for context in (512, 4096))
    (rows,) = large.sliding
    assert (rows.window, rows.layers, rows.capacity) == (8, (0,), rows_kept(8, 4096))
    assert rows.capacity <= 8 + STEP + 2 * 16
    assert large.nbytes - small.nbytes == (4096 - 512) * kv_bytes(runner.spec, kv, 16) // (2 * 16)
    assert [kv_bytes(runner.spec, kv, c) for c in (512, 4096)] == [small.nbytes, large.nbytes]
    assert not runner.cache(64).sliding  # a context that small is kept whole


@pytest.mark.parametrize("threads", [1, 2])
def test_any_cut_gives_the_bits_of_a_cache_that_keeps_everything(kv: str, threads: int) -> None:
    runner = Runner(container(NAME, "f32"), kv=kv, threads=threads)
    expected = logits(runner, whole(runner, kv), IDS)
    rng = random.Random(3)
    mixed: list[int] = []
    while sum(mixed) < len(IDS):
        mixed.append(min(rng.choice([1, 2, 7, 33, 64, 65, 130]), len(IDS) - sum(mixed)))
    for sizes in ([400], [64] * 6 + [16], [1] * 400, mixed):
        cache, at = runner.cache(512), 0
        assert cache.sliding
        for size in sizes:
            found = logits(runner, cache, IDS[at : at + size])
            assert np.array_equal(found, expected[at : at + size]), (sizes[:3], at)
            at += size


def test_trees_of_drafts_and_what_is_kept_of_them_give_the_bits_of_a_chain(kv: str) -> None:
    runner = Runner(container(NAME, "f32"), kv=kv)
    expected = logits(runner, whole(runner, kv), IDS)
    rng, cache, at = random.Random(5), runner.cache(512), 0
    while at + 64 < len(IDS):
        kept = rng.randint(1, 6)
        # the true path in every third row, wrong branches between: up to 64 rows
        ids, parents, path = [], [], []
        for i in range(kept):
            ids.append(IDS[at + i])
            parents.append(path[-1] if path else -1)
            path.append(len(ids) - 1)
            for wrong in range(rng.randint(0, 9)):
                ids.append((IDS[at + i] + 1 + wrong) % 250)
                parents.append(rng.choice([-1, *path]))
        found = logits(runner, cache, ids, parents)
        assert np.array_equal(found[path], expected[at : at + kept]), at
        cache.keep_path(at, path)
        at += kept


def test_a_rejected_draft_of_64_rows_leaves_what_it_found() -> None:
    runner = Runner(container(NAME, "f32"))
    expected = logits(runner, whole(runner), IDS)
    cache = runner.cache(512)
    for at in range(0, 320, 5):
        logits(runner, cache, [249 - i for i in IDS[at : at + 64]])
        cache.rewind(at)
        assert cache.length == at
        assert np.array_equal(logits(runner, cache, IDS[at : at + 5]), expected[at : at + 5])


def test_going_back_further_than_the_window_reaches_starts_anew() -> None:
    runner = Runner(container(NAME, "f32"))
    expected = logits(runner, whole(runner), IDS)
    cache = runner.cache(512)
    logits(runner, cache, IDS)
    cache.rewind(200)
    assert cache.length == 0
    assert np.array_equal(logits(runner, cache, IDS[:300]), expected[:300])
    other = runner.cache(512)
    other.copy_prefix(cache, 299)
    assert other.length == 299
    assert np.array_equal(logits(runner, other, IDS[299:]), expected[299:])
    other.copy_prefix(cache, 100)
    assert other.length == 0


def test_a_session_that_went_back_too_far_computes_its_prompt_again() -> None:
    runner = Runner(container(NAME, "f32"))
    session = Session(runner.cache(512))
    session.token_ids = list(IDS[:300])
    logits(runner, session.cache, IDS[:299])  # type: ignore[arg-type]
    rest = session.resume([*IDS[:100], 7, 8])
    assert (list(rest), session.token_ids, session.cache.length) == ([7, 8], IDS[:100], 0)


def test_saved_rows_go_on_with_the_same_bits(kv: str) -> None:
    runner = Runner(container(NAME, "f32"), kv=kv)
    cache, again = runner.cache(512), runner.cache(512)
    logits(runner, cache, IDS[:250])
    again.restore(cache.saved(250), 250)
    assert np.array_equal(logits(runner, again, IDS[250:]), logits(runner, cache, IDS[250:]))


def test_a_value_too_large_is_seen_in_whichever_step_it_is_written() -> None:
    runner = Runner(container(NAME, "f32"), kv="f16")
    cache = runner.cache(512)
    logits(runner, cache, IDS[:200])
    program = runner.model._last
    assert program is not None
    assert program.flags.sum() == 0
