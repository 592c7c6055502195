"""The loop: prefill, then propose, verify, commit until something ends it.

Owns the order of events of one response and its limits. Sees token ids, logits and bytes, never a path, a flag or a
string. Called from one thread; the caller pulls tokens out of `generate` one at a time.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coli.engine.rejection import Drafted, Proposal, RejectionSampler, verify_by_rejection
from coli.engine.sampling import Sampler
from coli.engine.session import Model, Session
from coli.engine.stats import RunStats
from coli.engine.verify import Verdict, draft_children, verify
from coli.errors import NumericError

MAX_ROWS = 64  # rows of one verify forward: the newest id and up to 63 drafts


class Drafter(Protocol):
    """All draft sources behind one door (coli.drafts.merge)."""

    def begin(self, prompt_ids: Sequence[int]) -> None: ...

    def alongside(self, responses: int) -> None:
        """The next forward is shared by so many responses, this one included; 1 until it is called."""

    def propose(self, limit: int) -> Proposal | None: ...

    def source_of(self, index: int) -> str:
        """Who proposed token `index` of the last proposal; asked between `propose` and `commit`."""
        ...

    def judged(self, proposal: Proposal, kept: Sequence[int], judged: int) -> None:
        """What became of the last proposal: indices of the accepted drafts, and how many were compared."""
        ...

    def measured(self, rows: int, committed: int, seconds: float) -> None:
        """The forward behind the last `propose`: its rows, the ids it gave and what it took, all but the drafting."""
        ...

    def measured_together(self, rows: int, committed: int, forward: "SharedForward") -> None:
        """The same for a forward shared by several responses: this one's rows and ids, and all of the forward."""
        ...

    def commit(self, token_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class SharedForward:
    """A forward of several responses: rows and committed ids of all together, seconds without the drafting."""

    responses: int
    rows: int
    committed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends a response. `end_ids` end it unseen; `max_tokens` counts emitted ids, `context` prompt and answer."""

    max_tokens: int
    context: int
    end_ids: frozenset[int]


class Engine:
    """Runs responses on sessions, one at a time."""

    def __init__(self, model: Model, prefill_chunk: int) -> None:
        self._model = model
        self.prefill_chunk = prefill_chunk  # rows of a prompt that one forward takes

    def prefill(self, session: Session, prompt_ids: Sequence[int], stats: RunStats) -> NDArray[np.float32]:
        """Commit `prompt_ids` and bring their rows into the cache; returns the logits (V,) behind the last one.

        Rows already in the cache are not computed again, but the last id always is: its logits are needed.
        """
        *_, last_logits = self.prefill_chunks(session, prompt_ids, stats)
        return last_logits

    def prefill_chunks(
        self, session: Session, prompt_ids: Sequence[int], stats: RunStats
    ) -> Iterator[NDArray[np.float32]]:
        """`prefill` chunk by chunk, so that others can have their turn; the last one yields the logits (V,).

        A caller that leaves early rewinds the session to the rows its cache holds.
        """
        begin_prompt(session, prompt_ids)
        while session.pending:
            began = time.perf_counter()
            chunk = next_chunk(session, self.prefill_chunk)
            last = len(chunk.token_ids) == session.pending
            with session.undone_on_error():
                logits = self._model.forward(
                    chunk.cache, chunk.token_ids, chunk.positions, None, chunk.wanted(last), prefill=True
                )
            stats.prefill_s += time.perf_counter() - began
            stats.prefill_tokens += len(chunk.token_ids)
            yield logits[0] if last else np.empty(0, np.float32)

    def generate(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        limits: Limits,
        sampler: Sampler,
        drafter: Drafter,
        stats: RunStats,
    ) -> Iterator[int]:
        """Yield the ids of one response as they are committed; end ids are not yielded.

        The caller may close the iterator at any id (a stop string), and an error or interrupt may end it: the session
        then ends behind the last id yielded, while `stats` have counted all that was committed.
        `stats.finish_reason` is `stop` or `length` when the iterator ends by itself.
        """
        began = time.perf_counter()
        stats.prompt_tokens = len(session.token_ids) + len(prompt_ids)
        drafter.begin([*session.token_ids, *prompt_ids])
        sampler.begin(session.token_ids, prompt_ids)
        logits = self.prefill(session, prompt_ids, stats)
        if limits.max_tokens <= 0:
            stats.finish_reason = "length"
            return
        commit = Committer(session, limits, sampler, stats)
        commit(self.sample(sampler, logits, len(session.token_ids)))
        stats.ttft_s = time.perf_counter() - began
        while True:
            emitted, began = commit.take(), time.perf_counter()
            drafter.commit(emitted)
            stats.decode_s += time.perf_counter() - began  # drafting pays for what it learns, too
            yielded = len(session.token_ids) - len(emitted)
            try:
                for token_id in emitted:
                    yielded += 1
                    yield token_id
            finally:
                session.rewind(yielded)
            if commit.ended:
                return
            began = time.perf_counter()
            with session.undone_on_error():
                self._step(session, limits, sampler, drafter, stats, commit)
            stats.decode_s += time.perf_counter() - began

    def _step(
        self,
        session: Session,
        limits: Limits,
        sampler: Sampler,
        drafter: Drafter,
        stats: RunStats,
        commit: "Committer",
    ) -> None:
        """One verify forward over the newest id and the drafts; commits at least one id."""
        step = plan_step(session, limits, drafter, stats, MAX_ROWS)
        rows = np.arange(len(step.token_ids), dtype=np.int64)
        logits = self._model.forward(step.cache, step.token_ids, step.positions, step.parents, rows, prefill=False)
        verdict = self.judge(step, logits, session, sampler, drafter, stats, commit)
        self._model.settle(np.array(verdict.kept_rows, np.int64))
        drafter.measured(len(rows), len(verdict.token_ids), time.perf_counter() - step.began)

    def judge(
        self,
        step: "Step",
        logits: NDArray[np.float32],
        session: Session,
        sampler: Sampler,
        drafter: Drafter,
        stats: RunStats,
        commit: "Committer",
    ) -> Verdict:
        """Commit what the target says to the step's rows; their cache keeps the rows of the committed path."""
        stats.forwards += 1
        proposal = step.proposal
        if proposal and isinstance(sampler, RejectionSampler):
            verdict = verify_by_rejection(
                logits,
                proposal,
                lambda row_logits, drafts: self.sample(sampler, row_logits, len(session.token_ids), drafts),
                commit,
            )
        else:
            verdict = verify(
                logits,
                draft_children(proposal.token_ids, proposal.parents) if proposal else [{}],
                lambda row_logits: self.sample(sampler, row_logits, len(session.token_ids)),
                commit,
            )
        session.cache.keep_path(step.base, verdict.kept_rows)
        if proposal:
            drafter.judged(proposal, [row - 1 for row in verdict.kept_rows[1:]], verdict.judged)
        return verdict

    def sample(
        self, sampler: Sampler, logits: NDArray[np.float32], position: int, drafts: Sequence[Drafted] = ()
    ) -> int:
        """The target's token at `position`; NaN names the first layer that gave some. drafts: to be judged there."""
        try:
            if drafts and isinstance(sampler, RejectionSampler):
                return sampler.judge(logits, position, drafts)
            return sampler.sample(logits, position)
        except NumericError as error:
            layer_idx = self._model.first_bad_layer()
            where = "the final norm or output matrix" if layer_idx is None else f"layer {layer_idx}"
            where = "the embedding" if layer_idx == -1 else where
            raise NumericError(f"{error}; the first that is not finite is {where}") from None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence's next prefill forward: a chain (S,)."""

    cache: Any
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    parents: None = None

    def wanted(self, last: bool, at: int = 0) -> NDArray[np.int64]:
        """The row whose logits are needed, if the prompt ends with it; `at`: rows before the chunk's."""
        return np.array([at + len(self.token_ids) - 1] if last else [], np.int64)


def begin_prompt(session: Session, prompt_ids: Sequence[int]) -> None:
    """Commit `prompt_ids`, whose rows come next; the last id's always do."""
    session.token_ids.extend(prompt_ids)
    session.cache.expect(len(session.token_ids))
    session.cache.rewind(min(session.cache.length, len(session.token_ids) - 1))


def next_chunk(session: Session, most: int) -> Chunk:
    """Up to `most` of the ids whose rows the cache does not hold yet."""
    start = session.cache.length  # 0 where windows do not reach back as far as the session went on from
    ids = np.array(session.token_ids[start : start + most], np.int64)
    return Chunk(session.cache, ids, np.arange(start, start + len(ids), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one sequence's next verify forward: the newest id and the drafts (S,)."""

    cache: Any
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    parents: NDArray[np.int64]
    base: int  # rows in the cache before it
    proposal: Proposal | None
    began: float


def plan_step(session: Session, limits: Limits, drafter: Drafter, stats: RunStats, most_rows: int) -> Step:
    """Ask for drafts, at most as many as can still be emitted and fit `most_rows`."""
    base = session.cache.length
    left = min(limits.max_tokens - stats.generated_tokens, limits.context - len(session.token_ids))
    room = min(most_rows, left) - 1
    proposal = drafter.propose(room) if room > 0 else None
    began = time.perf_counter()
    ids = np.array([session.newest, *(proposal.token_ids if proposal else ())], np.int64)
    parents = np.array([-1, *(parent + 1 for parent in (proposal.parents if proposal else ()))], np.int64)
    depth = np.zeros(len(ids), np.int64)
    for row in range(1, len(ids)):
        depth[row] = depth[parents[row]] + 1
    return Step(session.cache, ids, base + depth, parents, base, proposal, began)


class Committer:
    """Takes sampled ids one by one, applies the limits, keeps what is to be yielded."""

    def __init__(self, session: Session, limits: Limits, sampler: Sampler, stats: RunStats) -> None:
        self._session, self._limits, self._sampler, self._stats = session, limits, sampler, stats
        self._emitted: list[int] = []
        self.ended = False

    def __call__(self, token_id: int) -> bool:
        stats = self._stats
        if token_id in self._limits.end_ids:
            stats.finish_reason = "stop"
            self.ended = True
            return False
        self._session.commit(token_id)
        self._sampler.commit(token_id)
        self._emitted.append(token_id)
        stats.generated_tokens += 1
        full = len(self._session.token_ids) >= self._limits.context
        if full or stats.generated_tokens >= self._limits.max_tokens:
            stats.finish_reason = "length"
            self.ended = True
        return not self.ended

    def take(self) -> list[int]:
        emitted, self._emitted = self._emitted, []
        return emitted
