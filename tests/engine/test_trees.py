"""Law 1 for trees: any shape, any merge, any decision of a gate leaves ids and cache rows alone."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from adversarial import ScriptedSource, every_adversary
from containers import FIXTURES, container, expected
from exactness import PROMPT, SAMPLERS, VOCAB, check_response
from forward_runs import Runner
from responses import Response, Setup
from test_exact_on_models import MOE, same

from coli.drafts.base import MAX_DRAFT_TOKENS, ROOT, Draft, DraftSource
from coli.drafts.corpus import CorpusSource
from coli.drafts.frozen_index import FrozenIndex
from coli.drafts.gate import Gate
from coli.drafts.gated import TreeSources
from coli.drafts.ngram import NgramSource
from coli.engine.session import Session
from coli.options import SamplerOptions

TOKENS = 30


def star(rng: random.Random) -> list[int]:
    return [ROOT] * MAX_DRAFT_TOKENS


def chain(rng: random.Random) -> list[int]:
    return list(range(-1, MAX_DRAFT_TOKENS - 1))


def comb(rng: random.Random) -> list[int]:
    """A spine with a tooth at each place."""
    return [index - 1 if index % 2 else index - 2 for index in range(MAX_DRAFT_TOKENS)]


def binary(rng: random.Random) -> list[int]:
    return [(index - 1) // 2 if index else ROOT for index in range(MAX_DRAFT_TOKENS)]


def broom(rng: random.Random) -> list[int]:
    """A handle of 20, then 43 siblings."""
    return [*range(-1, 19), *[19] * 43]


def shuffled(rng: random.Random) -> list[int]:
    return [rng.randrange(-1, index) if index else ROOT for index in range(rng.randrange(1, MAX_DRAFT_TOKENS + 1))]


SHAPES = (star, chain, comb, binary, broom, shuffled)


def hidden_path(
    shape: Callable[[random.Random], list[int]], truth: Sequence[int], vocab_size: int, seed: int
) -> ScriptedSource:
    """Trees of one shape in which one random path is right for a random number of ids, between wrong siblings."""
    rng = random.Random(seed)

    def script(context: list[int], limit: int) -> Draft | None:
        parents = [max(parent, ROOT) for parent in shape(rng)][: max(limit, 1)]
        path = [rng.randrange(len(parents))]
        while parents[path[0]] != ROOT:
            path.insert(0, parents[path[0]])
        ids = [rng.randrange(vocab_size) for _ in parents]
        for depth, node in enumerate(path[: rng.randrange(len(path) + 1)]):
            if len(context) + depth < len(truth):
                ids[node] = truth[len(context) + depth]
        return Draft(tuple(ids), tuple(parents), shape.__name__, rng.randrange(9))

    return ScriptedSource(shape.__name__, script)


class Capricious(Gate):
    """Drafts any number of nodes, for no reason."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def depth_limit(self, limit: int) -> int:
        return self._rng.randint(1, limit)

    def choose(self, chances: Sequence[float]) -> int:
        super().choose(chances)
        return self._rng.randint(0, len(chances))


def lineups(truth: list[int], vocab_size: int, seed: int) -> list[TreeSources]:
    """Trees alone, merged with one another, with real sources and with every adversary; gated and not."""
    frozen = FrozenIndex(np.array([*truth[:20], -1, *truth[10:]], np.int32))
    groups: list[list[DraftSource]] = [
        [hidden_path(shape, truth, vocab_size, seed + number)] for number, shape in enumerate(SHAPES)
    ]
    groups.append([hidden_path(shape, truth, vocab_size, seed) for shape in (comb, binary, shuffled)])
    groups.append([CorpusSource(frozen, depth=8), NgramSource(depth=16), hidden_path(broom, truth, vocab_size, seed)])
    groups.append([*every_adversary(truth, vocab_size), CorpusSource(frozen, depth=8), NgramSource(depth=16)])
    gates = [None, Capricious(seed), Gate()]
    return [
        TreeSources(group, vocab_size=vocab_size, gate=gates[(seed + number) % 3])
        for number, group in enumerate(groups)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_trees_on_a_fake_target(seed: int):
    setup = Setup(vocab_size=VOCAB, sampler=SAMPLERS[seed], seed=seed + 7, salt=seed, repeat=seed % 2)
    plain = setup.run(PROMPT, TOKENS)
    widest = 0
    for drafter in lineups(PROMPT + plain.ids, VOCAB, seed):
        response = setup.run(PROMPT, TOKENS, drafter)
        check_response(setup, response, TOKENS)
        assert response.stats.forwards <= plain.stats.forwards
        widest = max(widest, *response.model.forwards[1:])
    assert widest > 20


def answer(runner: Runner, prompt: list[int], sampler: SamplerOptions, drafter: TreeSources | None = None) -> Response:
    setup = Setup(runner.spec.vocab_size, sampler=sampler, seed=21)
    return setup.run(prompt, TOKENS, drafter, model=runner.model, session=Session(runner.cache(160)))


@pytest.mark.parametrize("name", FIXTURES)
def test_trees_on_models(name: str):
    prompt, runner = expected(name)["prompt_ids"], Runner(container(name, "q4"), kv="f16")
    sampler = SamplerOptions(temperature=0.7, repeat_penalty=1.1)
    plain = answer(runner, prompt, sampler)
    for drafter in lineups(prompt + plain.ids, runner.spec.vocab_size, len(name)):
        same(answer(runner, prompt, sampler, drafter), plain)


@pytest.mark.parametrize("name", MOE)
def test_trees_while_experts_stream(name: str):
    prompt, whole = expected(name)["prompt_ids"], Runner(container(name, "q8"))
    plain = answer(whole, prompt, SamplerOptions())
    active = whole.spec.num_experts_per_tok
    for io in ("mmap", "pread"):
        runner = Runner(container(name, "q8"), slots=active, io=io)
        assert runner.store is not None
        store = runner.store
        for drafter in lineups(prompt + plain.ids, runner.spec.vocab_size, len(io))[::2]:
            drafter.expert_bytes = lambda store=store: store.bytes_read
            same(answer(runner, prompt, SamplerOptions(), drafter), plain)
            if drafter.gate is not None and not isinstance(drafter.gate, Capricious):
                assert drafter.gate.costs.streams
