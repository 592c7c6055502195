"""`--accept rejection` gives the target's law: enumerated exactly, and counted on the real engine with the real graph.

Then engines broken on purpose in the ways this rule gets broken: one of the two checks must see each.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from drafts.test_index import build
from exactness import SAMPLERS
from fake_model import FakeCache, FakeModel
from slow_decode import chi_square_excess, law, sequence_law

from coli.drafts import opening
from coli.drafts.base import Draft, DraftSource
from coli.drafts.graph import GraphOptions, GraphSource
from coli.drafts.merge import MergedSources
from coli.drafts.ngram_index import Mixing
from coli.engine import rejection
from coli.engine.engine import Engine, Limits
from coli.engine.rejection import RejectionSampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.kernels.noise import gumbel
from coli.options import SamplerOptions

Patch = pytest.MonkeyPatch
V = 5
HOT = SamplerOptions(temperature=3.0)
SETTINGS = [s for s in SAMPLERS if s.temperature]


def laws(seed: int) -> tuple[rejection.Law, rejection.Law]:
    """Two draft laws over part of the vocabulary."""
    rng = np.random.default_rng(seed)
    found = []
    for size in (3, 5):
        chances = rng.dirichlet(np.full(size, 0.7))
        found.append((rng.permutation(V)[:size].astype(np.int64), chances))
    return found[0], found[1]


def emitted(p: np.ndarray, drafts: Sequence[rejection.Law | int]) -> np.ndarray:
    """Law (V,) of the id that comes out when these siblings, drawn from a law or chosen, are judged against p."""
    if not drafts:
        return p
    first, *others = drafts
    drawn = (
        [(first, 1.0, None)] if isinstance(first, int) else [(int(i), q, first) for i, q in zip(*first, strict=True)]
    )
    out = np.zeros(len(p))
    for token_id, q, drawn_from in drawn:
        if q == 0:
            continue
        accepted = rejection.acceptance(p, token_id, drawn_from)
        out[token_id] += q * accepted
        if accepted < 1:
            out += q * (1 - accepted) * emitted(rejection.residual(p, token_id, drawn_from), others)
    return out


def check_the_enumerated_law() -> None:
    """Every drafted token multiplied out, for every sampler, with chosen, drawn and several drafts."""
    for number, settings in enumerate(SETTINGS):
        for salt in range(4):
            logits = FakeModel(V, salt=10 * number + salt).logits([1])
            wanted = law(logits.tolist(), settings, [1], [])
            sampler = RejectionSampler(settings, 0, V)
            sampler.begin([], [1])
            p = sampler.law(logits, 1)
            assert p is not None
            truth = np.array([wanted.get(i, 0.0) for i in range(V)])
            first, second = laws(salt)
            for drafts in ([0], [first], [second], [1, 4], [first, 2], [3, second], [first, second]):
                assert np.abs(emitted(p, drafts) - truth).max() < 1e-6, (settings, drafts)  # logits are float32


class Siblings:
    """A source that guesses two ids side by side everywhere."""

    def __init__(self) -> None:
        self.inner = MergedSources([], vocab_size=V)

    def propose(self, limit: int) -> Draft | None:
        return Draft((0, 1), (-1, -1), "both") if limit >= 2 else None

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def judged(self, *args: object) -> None:
        pass


def graph_source(path: Path, seed: int, options: GraphOptions) -> DraftSource:
    """The graph source of a response with this seed, opened as the library opens it."""
    index = build(path, [[0, 1, 2, 0, 1, 0, 0, 2, 1, 1, 0, 2, 0, 1, 2, 2, 0, 0, 1, 0, 1, 2]])
    own = (seed + opening.OWN_NOISE) % 2**64
    return GraphSource(index, options, noise=lambda at, ids: gumbel(own, at, ids))


def check_counted_sequences(tmp_path: Path, settings: SamplerOptions, kind: str, runs: int) -> float:
    """The first 2, 3 and 4 ids over 3 (id 2 ends) of many responses with drafts, against their laws: the largest
    excess; above 1 refutes one."""
    target = FakeModel(3, salt=5)
    counts = {length: Counter[object]() for length in (2, 3, 4)}
    options = GraphOptions(k=3, strategy="greedy" if kind == "greedy" else "sampling", mixing=Mixing("attentive"))
    source = graph_source(tmp_path / "index", 0, options)
    for seed in range(runs):
        if isinstance(source, GraphSource):
            own = (seed + opening.OWN_NOISE) % 2**64
            source._noise = lambda at, ids, own=own: gumbel(own, at, ids)
        drafter = Siblings() if kind == "siblings" else MergedSources([source], vocab_size=3)
        session = Session(FakeCache(100))
        limits = Limits(5, 100, frozenset({2}))
        sampler = RejectionSampler(settings, seed, 3)
        run = Engine(target, 512).generate(session, [1], limits, sampler, drafter, RunStats())  # type: ignore[arg-type]
        ids = tuple(run)
        for length, seen in counts.items():
            seen[ids[:length]] += 1
    return max(
        chi_square_excess(dict(seen), dict(sequence_law(target, [1], settings, length, end_ids={2})))
        for length, seen in counts.items()
    )


def test_the_enumerated_law_is_the_target_s():
    check_the_enumerated_law()


@pytest.mark.parametrize("kind", ["greedy", "sampling", "siblings"])
@pytest.mark.parametrize("settings", [HOT, SETTINGS[2]], ids=["hot", "narrow"])
def test_counted_sequences_follow_the_enumerated_law(tmp_path: Path, settings: SamplerOptions, kind: str):
    assert check_counted_sequences(tmp_path, settings, kind, 2000) < 1


def test_temperature_zero_gives_the_greedy_ids(tmp_path: Path):
    target, runs = FakeModel(3, salt=5), []
    for kind in ("greedy", "sampling", None):
        sources = [] if kind is None else [graph_source(tmp_path / "index", 4, GraphOptions(k=3, strategy=kind))]
        session, sampler = Session(FakeCache(100)), RejectionSampler(SamplerOptions(), 4, 3)
        drafter = MergedSources(sources, vocab_size=3)
        limits = Limits(30, 100, frozenset())
        runs.append(list(Engine(target, 512).generate(session, [1], limits, sampler, drafter, RunStats())))
    assert runs[0] == runs[1] == runs[2]


def test_equal_laws_never_reject_and_a_sure_token_is_kept():
    p = np.array([0.5, 0.25, 0.25])
    ids = np.arange(3)
    assert [rejection.acceptance(p, i, (ids, p)) for i in range(3)] == [1, 1, 1]
    assert (rejection.residual(p, 0, (ids, p)) == p).all()
    sure = np.array([0.0, 1.0, 0.0])
    assert rejection.acceptance(sure, 1, None) == 1
    assert (rejection.residual(sure, 1, None) == sure).all()


# --- broken on purpose


def bfloat16(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


def ratio_in_bfloat16(patch: Patch) -> None:
    def acceptance(p: np.ndarray, token_id: int, drawn: rejection.Law | None) -> float:
        q = 1.0 if drawn is None else bfloat16(drawn[1])[drawn[0] == token_id][0]
        return min(1.0, float(bfloat16(p)[token_id] / q))

    patch.setattr(rejection, "acceptance", acceptance)


def target_before_filters(patch: Patch) -> None:
    def unfiltered(self: RejectionSampler, logits: np.ndarray, position: int) -> np.ndarray:
        x = self._penalized(logits).astype(np.float64) / self._settings.temperature
        return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

    patch.setattr(RejectionSampler, "law", unfiltered)


def draft_law_before_filters(patch: Patch) -> None:
    """q of a law that was narrower when it was drawn from: its likeliest id had been left out."""
    usual = rejection.acceptance

    def acceptance(p: np.ndarray, token_id: int, drawn: rejection.Law | None) -> float:
        if drawn is None:
            return usual(p, token_id, None)
        return usual(p, token_id, (drawn[0], drawn[1] * (1 - 0.1)))

    patch.setattr(rejection, "acceptance", acceptance)


def residual_not_normalized(patch: Patch) -> None:
    def residual(p: np.ndarray, token_id: int, drawn: rejection.Law | None) -> np.ndarray:
        rest = p.copy()
        if drawn is None:
            rest[token_id] = 0
        else:
            rest[drawn[0]] = np.maximum(rest[drawn[0]] - drawn[1], 0)
        return rest

    patch.setattr(rejection, "residual", residual)


def residual_of_the_target_alone(patch: Patch) -> None:
    patch.setattr(rejection, "residual", lambda p, token_id, drawn: p)


def drawn_draft_only_banned(patch: Patch) -> None:
    usual = rejection.residual
    patch.setattr(rejection, "residual", lambda p, token_id, drawn: usual(p, token_id, None))


def drawn_draft_judged_as_chosen(patch: Patch) -> None:
    usual = rejection.acceptance
    patch.setattr(rejection, "acceptance", lambda p, token_id, drawn: usual(p, token_id, None))


def chosen_draft_judged_as_drawn(patch: Patch) -> None:
    usual = rejection.acceptance
    law_of = (np.arange(V), np.full(V, 1 / V))
    patch.setattr(rejection, "acceptance", lambda p, token_id, drawn: usual(p, token_id, drawn or law_of))


def absolute_difference(patch: Patch) -> None:
    def residual(p: np.ndarray, token_id: int, drawn: rejection.Law | None) -> np.ndarray:
        rest = p.copy()
        if drawn is None:
            rest[token_id] = 0
        else:
            rest[drawn[0]] = np.abs(rest[drawn[0]] - drawn[1])
        return rest / rest.sum() if rest.sum() else p

    patch.setattr(rejection, "residual", residual)


@pytest.mark.parametrize(
    "break_it",
    [
        ratio_in_bfloat16,
        target_before_filters,
        draft_law_before_filters,
        residual_not_normalized,
        residual_of_the_target_alone,
        drawn_draft_only_banned,
        drawn_draft_judged_as_chosen,
        chosen_draft_judged_as_drawn,
        absolute_difference,
    ],
    ids=lambda f: f.__name__,
)
def test_the_enumeration_sees(break_it: Callable[[Patch], None], monkeypatch: Patch):
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        check_the_enumerated_law()


def one_uniform_for_all_siblings(patch: Patch) -> None:
    usual = RejectionSampler._uniforms
    patch.setattr(RejectionSampler, "_uniforms", lambda self, at, n: np.repeat(usual(self, at, n)[:1], n))


def one_uniform_for_all_positions(patch: Patch) -> None:
    usual = RejectionSampler._uniforms
    patch.setattr(RejectionSampler, "_uniforms", lambda self, at, n: usual(self, 0, n))


def uniform_of_the_residual_s_noise(patch: Patch) -> None:
    patch.setattr(rejection, "JUDGE_IDS", 0)


def laws_one_token_late(patch: Patch) -> None:
    usual = GraphSource.propose

    def propose(self: GraphSource, *args: object) -> Draft | None:
        draft = usual(self, *args)  # type: ignore[arg-type]
        if draft is None or len(draft) < 2:
            return draft
        wide = [(np.arange(3), np.full(3, 1 / 3)), *draft.laws[:-1]]
        return Draft(draft.token_ids, draft.parents, draft.source, 0, tuple(wide))

    patch.setattr(GraphSource, "propose", propose)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (one_uniform_for_all_siblings, "siblings"),
        (one_uniform_for_all_positions, "sampling"),
        (uniform_of_the_residual_s_noise, "greedy"),
        (laws_one_token_late, "sampling"),
        (residual_not_normalized, "siblings"),
        (drawn_draft_only_banned, "sampling"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_counting_sees(break_it: Callable[[Patch], None], kind: str, monkeypatch: Patch, tmp_path: Path):
    break_it(monkeypatch)
    assert check_counted_sequences(tmp_path, HOT, kind, 3000) > 1
