"""Several responses side by side: their verify forwards are one batch union, each keeps the bytes it has alone.

A `Running` is one response stepped by hand: its prompt chunk by chunk, then its answer, both in forwards shared with
others. Sees ids and logits only. Called from the thread that calls the model.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.engine.engine import (
    MAX_ROWS,
    Committer,
    Drafter,
    Engine,
    Limits,
    SharedForward,
    Step,
    begin_prompt,
    next_chunk,
    plan_step,
)
from coli.engine.sampling import Sampler
from coli.engine.session import Model, Session
from coli.engine.stats import RunStats
from coli.engine.verify import Verdict
from coli.errors import NumericError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a committed id comes from: a draft of `source`, or the target (None) where `rejected` drafts had failed."""

    source: str | None = None
    rejected: int = 0


class Running:
    """One response on its session; `read_together` while `reading`, then `step_together` until `ended`.

    `origins`: of the ids committed so far, in their order.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        prompt_ids: Sequence[int],
        limits: Limits,
        sampler: Sampler,
        drafter: Drafter,
        stats: RunStats,
    ) -> None:
        self.session, self.limits, self.sampler, self.drafter, self.stats = session, limits, sampler, drafter, stats
        self.error: NumericError | None = None
        self._engine = engine
        self.commit = Committer(session, limits, sampler, stats)
        self.origins: list[Origin] = []
        self._began = time.perf_counter()
        stats.prompt_tokens = len(session.token_ids) + len(prompt_ids)
        drafter.begin([*session.token_ids, *prompt_ids])
        sampler.begin(session.token_ids, prompt_ids)
        begin_prompt(session, prompt_ids)
        self.reading = True

    @property
    def ended(self) -> bool:
        return self.commit.ended or self.error is not None

    def read(self, logits: NDArray[np.float32]) -> None:
        """The prompt has been computed: commit the first id of the answer by the logits (V,) behind it."""
        stats, session = self.stats, self.session
        self.reading = False
        if self.limits.max_tokens <= 0:
            stats.finish_reason = "length"
            self.commit.ended = True
            return
        self.commit(self._engine.sample(self.sampler, logits, len(session.token_ids)))
        self.origins += [Origin()] * stats.generated_tokens
        stats.ttft_s = time.perf_counter() - self._began

    def committed(self, step: Step, verdict: Verdict) -> None:
        """Note where the ids of one step come from."""
        accepted = [Origin(self.drafter.source_of(row - 1)) for row in verdict.kept_rows[1:]]
        last = Origin(None, len(step.token_ids) - len(verdict.kept_rows))
        count = self.stats.generated_tokens - len(self.origins)
        self.origins += [*accepted, last][:count]

    def take(self) -> list[int]:
        """The ids committed since the last call."""
        emitted, began = self.commit.take(), time.perf_counter()
        self.drafter.commit(emitted)
        self.stats.decode_s += time.perf_counter() - began  # as Engine.generate counts it
        return emitted


def read_together(model: Model, engine: Engine, reading: Sequence[Running]) -> None:
    """One forward over the next rows of several prompts; who has read all of its own has a first id, or `error` set.

    The first of them always reads, so that no prompt waits for ever behind shorter ones. Raises what a forward raises
    beside NumericError, with every session as it was.
    """
    alone = any(each.session.cache.reads_alone for each in reading)
    shares = _shares(engine.prefill_chunk, [each.session.pending for each in (reading[:1] if alone else reading)])
    some = [(each, next_chunk(each.session, share)) for each, share in zip(reading, shares, strict=False) if share]
    began, total = time.perf_counter(), sum(shares)
    at, wanted = 0, [np.empty(0, np.int64)]
    for each, chunk in some:
        wanted.append(chunk.wanted(len(chunk.token_ids) == each.session.pending, at))
        at += len(chunk.token_ids)
    try:
        with ExitStack() as undone:
            for each, _ in some:
                undone.enter_context(each.session.undone_on_error())
            logits = model.forward_many([chunk for _, chunk in some], np.concatenate(wanted), prefill=True)
    except NumericError as error:
        if len(some) == 1:
            some[0][0].error = error
            return
        for each, _ in some:  # one of them is to blame: the others go on
            read_together(model, engine, [each])
        return
    seconds, row = time.perf_counter() - began, 0
    for each, chunk in some:
        each.stats.prefill_s += seconds * len(chunk.token_ids) / total
        each.stats.prefill_tokens += len(chunk.token_ids)
        if each.session.pending:
            continue
        try:
            each.read(logits[row])
        except NumericError as error:
            each.error = error
        row += 1


def _shares(most: int, left: Sequence[int]) -> list[int]:
    """How many of `most` rows each prompt reads: half of them are the first one's, if it needs so many; the others
    have theirs in the order of what they still need."""
    first, *others = left
    shares = [min(first, max(most - sum(others), most // 2))] + [0] * len(others)
    room = most - shares[0]
    for at in sorted(range(1, len(left)), key=left.__getitem__):
        shares[at] = min(left[at], room)
        room -= shares[at]
    return shares


def step_together(model: Model, engine: Engine, running: Sequence[Running]) -> None:
    """One verify forward for all; each commits at least one id, or has `error` set.

    A shared forward's costs are told to the drafters as such: they are not those of a response that is alone.
    Raises what a forward raises beside NumericError, with every session as it was.
    """
    share = max(1, MAX_ROWS // len(running))
    began = time.perf_counter()
    for each in running:
        each.drafter.alongside(len(running))
    steps = [plan_step(r.session, r.limits, r.drafter, r.stats, share) for r in running]
    counts = [len(step.token_ids) for step in steps]
    try:
        with ExitStack() as undone:
            for each in running:
                undone.enter_context(each.session.undone_on_error())
            logits = model.forward_many(steps, np.arange(sum(counts), dtype=np.int64), prefill=False)
    except NumericError as error:
        if len(running) == 1:
            running[0].error = error
            return
        for each in running:  # one of them is to blame: the others go on
            step_together(model, engine, [each])
        return
    at, kept = 0, []
    committed = [0] * len(running)
    for index, (each, step, count) in enumerate(zip(running, steps, counts, strict=True)):
        try:
            with each.session.undone_on_error():
                verdict = engine.judge(
                    step, logits[at : at + count], each.session, each.sampler, each.drafter, each.stats, each.commit
                )
            each.committed(step, verdict)
            kept += [at + row for row in verdict.kept_rows]
            committed[index] = len(verdict.token_ids)
            if len(running) == 1:
                each.drafter.measured(count, len(verdict.token_ids), time.perf_counter() - step.began)
        except NumericError as error:
            each.session.rewind(min(len(each.session.token_ids), step.base + 1))
            each.error = error
        at += count
    model.settle(np.array(sorted(kept), np.int64))
    now = time.perf_counter()
    if len(running) > 1 and all(each.error is None for each in running):
        forward = SharedForward(len(running), sum(counts), sum(committed), now - steps[-1].began)
        for each, count, own in zip(running, counts, committed, strict=True):
            each.drafter.measured_together(count, own, forward)
    for each in running:
        each.stats.decode_s += now - began
