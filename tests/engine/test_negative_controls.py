"""Engines broken on purpose in ways speculative decoding gets broken: the checks of exactness.py must see each one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exactness import (
    SAMPLERS,
    check_any_draft_gives_the_slow_loop_s_ids,
    check_limits_inside_accepted_runs,
    check_sequences_follow_the_enumerated_law,
)
from fake_model import FakeCache

from coli.drafts.base import Draft
from coli.drafts.merge import MergedSources
from coli.engine import engine as loop
from coli.engine.engine import Engine
from coli.engine.sampling import Sampler
from coli.engine.verify import Verdict, draft_children, verify
from coli.options import SamplerOptions

Patch = pytest.MonkeyPatch
Rows = np.ndarray


def broken_verify(patch: Patch, mutant: Callable[..., Verdict]) -> None:
    patch.setattr(loop, "verify", mutant)


def walk(
    logits: Rows,
    children: Sequence[dict[int, int]],
    pick: Callable[[int, dict[int, int]], int],
    commit: Callable[[int], bool],
    accept: Callable[[int, bool], bool] = lambda token_id, going_on: going_on,
) -> Verdict:
    """verify with its decisions laid open."""
    row, kept, sampled, judged = 0, [0], [], 0
    while True:
        token_id = pick(row, children[row])
        sampled.append(token_id)
        judged += len(children[row]) > 0
        going_on = commit(token_id)
        child = children[row].get(token_id)
        if child is None or not accept(token_id, going_on):
            return Verdict(tuple(sampled), tuple(kept), judged)
        row = child
        kept.append(row)


def first_draft_unverified(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        def pick(row: int, below: dict[int, int]) -> int:
            return next(iter(below)) if row == 0 and below else sample(logits[row])

        return walk(logits, children, pick, commit)

    broken_verify(patch, mutant)


def bonus_token_by_argmax(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        def pick(row: int, below: dict[int, int]) -> int:
            token_id = sample(logits[row])
            return token_id if not len(children) > 1 or token_id in below else int(np.argmax(logits[row]))

        return walk(logits, children, pick, commit)

    broken_verify(patch, mutant)


def drafts_matched_by_argmax(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        def pick(row: int, below: dict[int, int]) -> int:
            best = int(np.argmax(logits[row]))
            return best if best in below else sample(logits[row])

        return walk(logits, children, pick, commit)

    broken_verify(patch, mutant)


def rejected_draft_banned_from_the_same_row(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        def pick(row: int, below: dict[int, int]) -> int:
            for drafted in below:  # one uniform decides, the resample leaves the draft out: the seed's rule, half done
                if sample(logits[row]) != drafted:
                    rest = logits[row].copy()
                    rest[drafted] = -np.inf
                    return int(np.argmax(rest))
            return sample(logits[row])

        return walk(logits, children, pick, commit)

    broken_verify(patch, mutant)


def target_zeroed_in_place(patch: Patch) -> None:
    honest = verify

    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        for below in children:
            for drafted, row in below.items():
                logits[row - 1, drafted] = -np.inf
        return honest(logits, children, sample, commit)

    broken_verify(patch, mutant)


def accepted_rows_in_bfloat16(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        def pick(row: int, below: dict[int, int]) -> int:
            rounded = (logits[row].view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            return sample(rounded if below else logits[row])

        return walk(logits, children, pick, commit)

    broken_verify(patch, mutant)


def target_row_off_by_one(patch: Patch) -> None:
    broken_verify(patch, lambda logits, *rest: verify(np.roll(logits, 1, axis=0), *rest))


def target_row_of_the_parent(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        shifted = np.concatenate([logits[:1], logits[:-1]])
        return verify(shifted, children, sample, commit)

    broken_verify(patch, mutant)


def siblings_mistaken_for_a_chain(patch: Patch) -> None:
    patch.setattr(loop, "draft_children", lambda ids, parents: draft_children(ids, range(-1, len(ids) - 1)))


def noise_advanced_on_empty_steps(patch: Patch) -> None:
    """The position of the noise counts steps without a proposal too."""
    honest_propose, honest_sample, empty = MergedSources.propose, Sampler.sample, [0]

    def propose(self: MergedSources, limit: int) -> Draft | None:
        draft = honest_propose(self, limit)
        empty[0] += bool(self.sources) and draft is None
        return draft

    def begin(self: MergedSources, prompt_ids: Sequence[int]) -> None:
        empty[0] = 0
        honest_begin(self, prompt_ids)

    honest_begin = MergedSources.begin
    patch.setattr(MergedSources, "propose", propose)
    patch.setattr(MergedSources, "begin", begin)
    patch.setattr(Sampler, "sample", lambda self, logits, at: honest_sample(self, logits, at + empty[0]))


def noise_advanced_by_rejected_drafts(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        verdict = verify(logits, children, sample, commit)
        drift[0] += len(children) - len(verdict.kept_rows)
        return verdict

    drift, honest_sample, honest_begin = [0], Sampler.sample, Sampler.begin

    def begin(self: Sampler, *prompts: Sequence[int]) -> None:
        drift[0] = 0
        honest_begin(self, *prompts)

    patch.setattr(Sampler, "begin", begin)
    patch.setattr(Sampler, "sample", lambda self, logits, at: honest_sample(self, logits, at + drift[0]))
    broken_verify(patch, mutant)


def fixed_settings_in_verification(patch: Patch) -> None:
    def step(self: Engine, session: Any, limits: Any, sampler: Sampler, *rest: Any) -> None:
        plain = Sampler(SamplerOptions(temperature=sampler._settings.temperature), sampler._seed, len(sampler._seen))
        honest_step(self, session, limits, plain, *rest)

    honest_step = Engine._step
    patch.setattr(Engine, "_step", step)


def penalties_with_double_history(patch: Patch) -> None:
    """Accepted drafts are counted when they are verified and when they are emitted."""

    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        verdict = verify(logits, children, sample, commit)
        for token_id in verdict.token_ids[: verdict.num_accepted_tokens]:
            commit._sampler.commit(token_id)
        return verdict

    broken_verify(patch, mutant)


def penalties_with_rejected_drafts(patch: Patch) -> None:
    """All drafts enter the history before they are judged."""

    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        for below in children:
            for drafted in below:
                commit._sampler.commit(drafted)
        return verify(logits, children, sample, commit)

    broken_verify(patch, mutant)


def penalties_frozen_during_a_verify(patch: Patch) -> None:
    """All rows of one forward see the history from before it."""

    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        sampler = commit._sampler
        late: list[int] = []
        sampler.commit = late.append
        verdict = verify(logits, children, sample, commit)
        del sampler.commit
        for token_id in late:
            sampler.commit(token_id)
        return verdict

    broken_verify(patch, mutant)


def end_id_emitted_inside_an_accepted_run(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        limits = commit._limits

        def lenient(token_id: int) -> bool:
            drafted = any(token_id in below for below in children)
            commit._limits = replace(limits, end_ids=frozenset()) if drafted else limits
            going_on = commit(token_id)
            commit._limits = limits
            return going_on

        return verify(logits, children, sample, lenient)

    broken_verify(patch, mutant)


def going_on_behind_an_end_id(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        return walk(logits, children, lambda row, _: sample(logits[row]), commit, lambda *_: True)

    broken_verify(patch, mutant)


def end_id_left_out_and_its_successor_emitted(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        verdict = verify(logits, children, sample, commit)
        if commit.ended and verdict.num_accepted_tokens:
            commit.ended = False
        return verdict

    broken_verify(patch, mutant)


def limit_checked_after_the_step_only(patch: Patch) -> None:
    def mutant(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        limits = commit._limits
        commit._limits = replace(limits, max_tokens=limits.max_tokens + 1, context=limits.context + 1)
        verdict = verify(logits, children, sample, commit)
        commit._limits = limits
        return verdict

    broken_verify(patch, mutant)


def kv_not_rewound(patch: Patch) -> None:
    def keep_path(self: FakeCache, start: int, rows: Sequence[int]) -> None:
        self.length = len(self.ids)

    patch.setattr(FakeCache, "keep_path", keep_path)


def kv_cut_instead_of_moved(patch: Patch) -> None:
    """The first rows stay, not those of the accepted branch."""
    honest = FakeCache.keep_path
    patch.setattr(FakeCache, "keep_path", lambda self, start, rows: honest(self, start, range(len(rows))))


def kv_without_the_last_accepted_row(patch: Patch) -> None:
    honest = FakeCache.keep_path
    patch.setattr(
        FakeCache, "keep_path", lambda self, start, rows: honest(self, start, list(rows)[: max(1, len(rows) - 1)])
    )


GREEDY, WARM, NARROW, PENALIZED = SAMPLERS[0], SAMPLERS[1], SAMPLERS[3], SAMPLERS[4]
MUTANTS: list[tuple[Callable[[Patch], None], SamplerOptions]] = [
    (first_draft_unverified, GREEDY),
    (first_draft_unverified, WARM),
    (bonus_token_by_argmax, WARM),
    (drafts_matched_by_argmax, WARM),
    (rejected_draft_banned_from_the_same_row, WARM),
    (target_zeroed_in_place, GREEDY),
    (target_zeroed_in_place, WARM),
    (accepted_rows_in_bfloat16, SamplerOptions(temperature=1.0)),
    (target_row_off_by_one, GREEDY),
    (target_row_of_the_parent, GREEDY),
    (siblings_mistaken_for_a_chain, GREEDY),
    (noise_advanced_on_empty_steps, WARM),
    (noise_advanced_by_rejected_drafts, WARM),
    (fixed_settings_in_verification, NARROW),
    (penalties_with_double_history, PENALIZED),
    (penalties_with_rejected_drafts, PENALIZED),
    (penalties_frozen_during_a_verify, PENALIZED),
    (end_id_emitted_inside_an_accepted_run, GREEDY),
    (going_on_behind_an_end_id, GREEDY),
    (end_id_left_out_and_its_successor_emitted, GREEDY),
    (kv_not_rewound, GREEDY),
    (kv_cut_instead_of_moved, GREEDY),
    (kv_without_the_last_accepted_row, GREEDY),
]


@pytest.mark.parametrize(("break_it", "sampler"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_check_of_ids_sees(break_it: Callable[[Patch], None], sampler: SamplerOptions, monkeypatch: Patch) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        check_any_draft_gives_the_slow_loop_s_ids(sampler, tokens=600 if break_it is accepted_rows_in_bfloat16 else 40)


def test_the_check_of_limits_sees_a_limit_checked_after_the_step_only(monkeypatch: Patch) -> None:
    limit_checked_after_the_step_only(monkeypatch)
    with pytest.raises(AssertionError):
        check_limits_inside_accepted_runs()


@pytest.mark.parametrize(
    ("break_it", "sampler"),
    [
        (first_draft_unverified, SamplerOptions(temperature=1.0)),
        (bonus_token_by_argmax, SamplerOptions(temperature=1.0)),
        (drafts_matched_by_argmax, SamplerOptions(temperature=1.0)),
        (rejected_draft_banned_from_the_same_row, SamplerOptions(temperature=1.0)),
        (target_zeroed_in_place, SamplerOptions(temperature=1.0)),
        (target_row_off_by_one, SamplerOptions(temperature=1.0)),
        (fixed_settings_in_verification, SamplerOptions(temperature=1.7, top_k=2)),
        (penalties_frozen_during_a_verify, SamplerOptions(temperature=1.0, frequency_penalty=3.0)),
        (end_id_emitted_inside_an_accepted_run, SamplerOptions(temperature=1.0)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_check_of_the_law_sees(
    break_it: Callable[[Patch], None], sampler: SamplerOptions, monkeypatch: Patch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        check_sequences_follow_the_enumerated_law(sampler, runs=1500)


def test_the_decisions_laid_open_are_those_of_verify(monkeypatch: Patch) -> None:
    def same(logits: Rows, children: Any, sample: Any, commit: Any) -> Verdict:
        return walk(logits, children, lambda row, _: sample(logits[row]), commit)

    broken_verify(monkeypatch, same)
    for sampler in (GREEDY, PENALIZED):
        check_any_draft_gives_the_slow_loop_s_ids(sampler)
