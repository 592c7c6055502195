"""Law 1 through the loop on tiny models: drafts, budgets, threads, chunks and warm caches change no id, no KV bit."""

from collections.abc import Sequence

import numpy as np
import pytest
from adversarial import every_adversary
from containers import FIXTURES, container, expected
from forward_runs import Runner
from responses import Response, Setup

from coli.drafts.base import DraftSource
from coli.drafts.merge import MergedSources
from coli.drafts.ngram import NgramSource
from coli.engine.session import Session
from coli.model import layers
from coli.model.kv_cache import KVCache, LatentCache
from coli.options import SamplerOptions

TOKENS = 40
SAMPLERS = [
    SamplerOptions(),
    SamplerOptions(temperature=0.7, top_k=20, repeat_penalty=1.1),
    SamplerOptions(temperature=1.3, top_p=0.9, min_p=0.01, frequency_penalty=0.2, presence_penalty=0.1),
]
MOE = [name for name in FIXTURES if not name.startswith(("llama", "qwen3-"))]


def setup_of(runner: Runner, sampler: SamplerOptions, chunk: int = 512) -> Setup:
    return Setup(runner.spec.vocab_size, sampler=sampler, seed=21, chunk=chunk)


def answer(
    runner: Runner,
    prompt: Sequence[int],
    sampler: SamplerOptions,
    drafter: MergedSources | None = None,
    chunk: int = 512,
) -> Response:
    return setup_of(runner, sampler, chunk).run(
        prompt, TOKENS, drafter, model=runner.model, session=Session(runner.cache())
    )


def rows(session: Session, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the first `count` positions."""
    cache = session.cache
    assert isinstance(cache, KVCache)
    if isinstance(cache, LatentCache):
        return cache.keys[:, :count], cache.values[:, :count]
    at = np.arange(count)
    return cache.keys[:, :, at // 16, :, at % 16], cache.values[:, :, :count]


def same(one: Response, other: Response) -> None:
    assert one.ids == other.ids
    count = len(one.session.token_ids) - 1
    for mine, theirs in zip(rows(one.session, count), rows(other.session, count), strict=True):
        assert np.array_equal(mine, theirs)


def lineups(truth: list[int], vocab_size: int) -> list[tuple[list[DraftSource], bool]]:
    lone: list[tuple[list[DraftSource], bool]] = [([source], False) for source in every_adversary(truth, vocab_size)]
    return [
        *lone,
        ([NgramSource(depth=8)], False),
        ([*every_adversary(truth, vocab_size), NgramSource(depth=16)], True),
    ]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "0.7", "1.3"])
@pytest.mark.parametrize("name", FIXTURES)
def test_any_draft_leaves_ids_and_cache_rows_alone(name: str, sampler: SamplerOptions) -> None:
    prompt, runner = expected(name)["prompt_ids"], Runner(container(name, "q4"), kv="f16")
    plain = answer(runner, prompt, sampler)
    vocab_size = runner.spec.vocab_size
    for group, chain in lineups(prompt + plain.ids, vocab_size):
        same(answer(runner, prompt, sampler, MergedSources(group, vocab_size=vocab_size, chain=chain)), plain)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=["greedy", "0.7", "1.3"])
@pytest.mark.parametrize("name", MOE)
def test_drafts_on_a_tight_budget_leave_ids_and_cache_rows_alone(name: str, sampler: SamplerOptions) -> None:
    prompt, whole = expected(name)["prompt_ids"], Runner(container(name, "q8"))
    plain = answer(whole, prompt, sampler)
    vocab_size, active = whole.spec.vocab_size, whole.spec.num_experts_per_tok
    for slots in (active, whole.spec.num_experts):
        for io in ("mmap", "pread"):
            runner = Runner(container(name, "q8"), slots=slots, io=io)
            for group, chain in lineups(prompt + plain.ids, vocab_size)[::4]:
                same(answer(runner, prompt, sampler, MergedSources(group, vocab_size=vocab_size, chain=chain)), plain)


@pytest.mark.parametrize("name", FIXTURES)
def test_threads_and_prefill_chunks_leave_ids_and_cache_rows_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, sampler = (expected(name)["prompt_ids"] * 3)[:37], SAMPLERS[1]
    plain = answer(Runner(container(name, "q4")), prompt, sampler)
    vocab_size = Runner(container(name, "q4")).spec.vocab_size
    monkeypatch.setattr(layers, "SMALL_WORK", 0)  # these models are too small for two threads otherwise
    for threads in (1, 2):
        runner = Runner(container(name, "q4"), threads=threads)
        for chunk in (1, 2, 16, 36):
            drafts = MergedSources([NgramSource(depth=8)], vocab_size=vocab_size)
            same(answer(runner, prompt, sampler, drafts, chunk), plain)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_warm_session_gives_the_ids_and_rows_of_a_cold_one(name: str) -> None:
    prompt, runner, sampler = expected(name)["prompt_ids"][:9], Runner(container(name, "q4")), SAMPLERS[2]
    setup, warm = setup_of(runner, sampler), Session(runner.cache())
    history: list[int] = []
    for turn in range(3):
        question = [3 + turn, *prompt]
        mine = setup.run(question, 12, model=runner.model, session=warm)
        cold = setup.run(history + question, 12, model=runner.model, session=Session(runner.cache()))
        same(mine, cold)
        assert mine.stats.prefill_tokens == len(question) + (turn > 0)
        history += question + mine.ids


def test_the_comparison_sees_cache_rows_that_were_cut_instead_of_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, runner = expected("olmoe-base")["prompt_ids"], Runner(container("olmoe-base", "q4"))
    plain, honest = answer(runner, prompt, SAMPLERS[1]), KVCache.keep_path
    monkeypatch.setattr(KVCache, "keep_path", lambda self, start, kept: honest(self, start, range(len(kept))))
    tree = every_adversary(prompt + plain.ids, runner.spec.vocab_size)[5]
    drafted = answer(runner, prompt, SAMPLERS[1], MergedSources([tree], vocab_size=runner.spec.vocab_size))
    with pytest.raises(AssertionError):
        same(drafted, plain)
