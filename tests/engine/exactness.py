"""What must hold of the decode loop whatever the draft sources do, as checks that raise AssertionError.

test_exactness.py runs them on the engine as it is, test_negative_controls.py on engines broken on purpose.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from adversarial import ScriptedSource, every_adversary, random_chains, wrong_at_every_depth
from fake_model import FakeModel
from responses import Response, Setup
from slow_decode import chi_square_excess, sequence_law, slow_decode

from coli.drafts.base import Draft, DraftSource
from coli.drafts.corpus import CorpusSource
from coli.drafts.frozen_index import FrozenIndex
from coli.drafts.merge import MergedSources
from coli.drafts.ngram import NgramSource
from coli.options import SamplerOptions

VOCAB = 11
PROMPT = [1, 2, 0, 3, 1, 2]
SAMPLERS = [
    SamplerOptions(),
    SamplerOptions(temperature=0.7),
    SamplerOptions(temperature=1.3, top_k=3, repeat_penalty=1.2),
    SamplerOptions(temperature=1.3, top_p=0.8, min_p=0.1),
    SamplerOptions(temperature=0.7, presence_penalty=0.4, frequency_penalty=0.3),
    SamplerOptions(repeat_penalty=1.4, frequency_penalty=0.6),
]


def lineups(truth: list[int], vocab_size: int) -> Iterator[tuple[list[DraftSource], bool]]:
    """(sources, chain) of every kind: each adversary alone, the real sources alone and together, all at once."""
    for source in every_adversary(truth, vocab_size):
        yield [source], False
    frozen = [*truth[:20], -1, *truth[10:]]
    for chain in (False, True):
        yield [NgramSource(depth=8)], chain
        yield [CorpusSource(FrozenIndex(np.array(frozen, np.int32)), depth=16)], chain
        yield [CorpusSource(FrozenIndex(np.array(frozen, np.int32)), depth=4), NgramSource(depth=16)], chain
        yield [*every_adversary(truth, vocab_size), NgramSource(depth=8)], chain


@functools.cache
def slow_answer(
    target: tuple[int, int, int],
    sampler: SamplerOptions,
    seed: int,
    max_tokens: int,
    end_ids: frozenset[int],
    context: int,
) -> tuple[list[int], str]:
    return slow_decode(FakeModel(*target), PROMPT, sampler, seed, max_tokens, end_ids=end_ids, context=context)


def check_response(setup: Setup, response: Response, max_tokens: int, context: int = 10_000) -> None:
    """The response is the slow loop's, and session, cache and counters agree with it."""
    target = setup.vocab_size, setup.salt, setup.repeat
    ids, reason = slow_answer(target, setup.sampler, setup.seed, max_tokens, setup.end_ids, context)
    assert response.ids == ids
    assert response.stats.finish_reason == reason
    assert response.stats.generated_tokens == len(ids)
    assert response.session.token_ids == PROMPT + ids
    cache = response.session.cache
    assert isinstance(cache.ids, list)
    assert cache.ids == (PROMPT + ids)[: cache.length]
    assert cache.length >= len(PROMPT + ids) - 1


def check_any_draft_gives_the_slow_loop_s_ids(sampler: SamplerOptions, *, tokens: int = 40, salt: int = 0) -> None:
    """Without drafts, and with each line-up of sources, up to the limit and up to a late end id."""
    setup = Setup(vocab_size=VOCAB, sampler=sampler, seed=salt + 7, salt=salt, repeat=salt % 2)
    plain = setup.run(PROMPT, tokens)
    check_response(setup, plain, tokens)
    late = max(plain.ids, key=plain.ids.index)  # the id whose first occurrence comes last
    for end_ids in (frozenset[int](), frozenset({late})):
        ending = replace(setup, end_ids=end_ids)
        for group, chain in lineups(PROMPT + plain.ids, VOCAB):
            response = ending.run(PROMPT, tokens, MergedSources(group, vocab_size=VOCAB, chain=chain))
            check_response(ending, response, tokens)
            assert response.stats.forwards <= plain.stats.forwards


def check_limits_inside_accepted_runs() -> None:
    """Every token limit and every context, with right and wrong drafts on the way there."""
    for sampler in (SamplerOptions(), SamplerOptions(temperature=1.0)):
        setup = Setup(vocab_size=5, sampler=sampler, seed=3)
        truth = PROMPT + setup.run(PROMPT, 24).ids
        for most in (1, 2, 3, 5, 9, 23):
            for group, chain in lineups(truth, 5):
                sources = MergedSources(group, vocab_size=5, chain=chain)
                check_response(setup, setup.run(PROMPT, most, sources), most)
                context = len(PROMPT) + most
                response = setup.run(PROMPT, 24, sources, context=context)
                check_response(setup, response, 24, context)


def every_continuation() -> ScriptedSource:
    """All answers of two ids over three: always right."""
    tree = Draft((0, 1, 2, *(0, 1, 2) * 3), (-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2), "all")
    return ScriptedSource("all", lambda context, limit: tree)


def check_sequences_follow_the_enumerated_law(sampler: SamplerOptions, *, runs: int = 3000) -> None:
    """The first 5 ids over 3 (id 2 ends) as often as the law says, with drafts that are right at times or always."""
    target = FakeModel(3, salt=5)
    wanted = sequence_law(target, PROMPT[:1], sampler, 5, end_ids={2})
    counts: Counter[object] = Counter()
    for seed in range(runs):
        setup = Setup(vocab_size=3, salt=5, sampler=sampler, seed=seed, end_ids=frozenset({2}))
        truth = PROMPT[:1] + ([0, 1, 1, 0] if seed % 2 else [1, 0, 0, 1])
        source = (every_continuation(), wrong_at_every_depth(truth, 3), every_continuation(), random_chains(seed, 3))
        drafter = MergedSources([source[seed % 4]], vocab_size=3)
        counts[tuple(setup.run(PROMPT[:1], 14, drafter, model=target).ids[:5])] += 1
    assert chi_square_excess(dict(counts), dict(wanted)) < 1
