"""The engine thread: a bounded queue of jobs, several conversations kept warm, all running jobs stepped together.

The only thread that calls the model. Everybody else submits jobs and hears of them through `Job.deliver`, which is
called from here and must not block. A job whose `cancelled` is set ends within one step.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coli.engine.together import Origin, Running, read_together, step_together
from coli.generation import AnswerText, draw_seed
from coli.grammar.load import LoadedGrammar
from coli.llm import LLM
from coli.options import DraftOptions, GenerateOptions
from coli.server.logprobs import KeepingSampler, TokenLogprob
from coli.server.slots import Slot, Slots
from coli.session_file import SessionFile
from coli.store.stats import StoreGlance

LOOK_SECONDS = 0.1  # how often the queue is searched for jobs that nobody waits for any more
SAVE_SECONDS = 30.0  # without a request, then the session file is brought up to date


@dataclass(frozen=True, slots=True)
class Part:
    """Text that became certain with one id, and where that id comes from."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that has become certain; `logprobs` of the ids committed since the last piece, `parts` of the text by id."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer."""

    finish_reason: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    seed: int
    forwards: int
    drafts: dict[str, dict[str, int]]
    ttft_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ended with an error; `error` is one of ours or an internal one."""

    error: Exception


Event = Piece | Done | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One request for an answer. `logprobs`: alternatives per id, None for no log probabilities."""

    prompt_ids: Sequence[int]
    options: GenerateOptions
    deliver: Callable[[Event], None]
    grammar: LoadedGrammar | None = None
    logprobs: int | None = None
    cancelled: bool = False
    submitted: float = field(default_factory=time.perf_counter)


class QueueFullError(Exception):
    """The queue holds as many jobs as it may; `retry_after` seconds is a guess when there will be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after


class ShuttingDownError(Exception):
    """The worker takes no more jobs."""


@dataclass(slots=True)
class Counts:
    """Totals since the start, for /metrics."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0  # shared forwards
    step_rows: int = 0  # responses in them, summed
    step_tokens: int = 0  # ids they gave, whatever became of the request
    first_tokens: int = 0  # ids that came with the end of a prompt


class Active:
    """A job that runs on a slot."""

    def __init__(self, job: Job, slot: Slot, running: Running, sampler: KeepingSampler, answer: AnswerText) -> None:
        self.job, self.slot, self.running, self.sampler, self.answer = job, slot, running, sampler, answer
        self.seed = 0
        self.taken = 0  # ids whose text has been pushed
        self.told = 0  # ids whose log probabilities have been delivered
        self.cached_tokens = running.stats.prompt_tokens - slot.session.pending


class Worker:
    """Owns the model's thread. `start` loads the model first, in the caller's thread, and raises what that raises."""

    def __init__(
        self,
        llm: LLM,
        drafts: DraftOptions,
        *,
        context: int,
        slots: int,
        queue: int,
        session: Path | None = None,
        notice: Callable[[str], None] = lambda line: None,
    ) -> None:
        """session: file the conversations in memory are kept in."""
        self.counts = Counts()
        self.context = context
        self.num_slots = slots
        self._llm, self._drafts, self._queue_limit = llm, drafts, queue
        self._waiting: deque[Job] = deque()
        file = None if session is None else SessionFile(session, "coli serve", llm.container.fingerprint)
        self.slots = Slots(file, notice)
        self._changed = threading.Condition()
        self._stopping = False
        self._next_look = 0.0
        self._ended_drafts: dict[str, dict[str, int]] = {}
        self._recent_s = 1.0  # seconds an answer took lately
        self._thread = threading.Thread(target=self._main, name="coli-engine", daemon=True)

    def start(self) -> None:
        arguments = self.context, self.num_slots, self._drafts
        self.slots.open(self.num_slots, lambda: self._llm.new_session(*arguments))
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises QueueFullError, ShuttingDownError."""
        with self._changed:
            if self._stopping:
                raise ShuttingDownError
            # a free slot takes the next waiting job at once: only what nobody can take yet counts
            if len(self._waiting) >= self._queue_limit + self.free_slots:
                self.counts.refused += 1
                rounds = math.ceil((len(self._waiting) + 1) / self.num_slots)
                raise QueueFullError(max(1, min(60, math.ceil(rounds * self._recent_s))))
            self._waiting.append(job)
            self._changed.notify()

    def stop(self) -> None:
        """Answer nobody any more and end the thread, running jobs with it; then the session file is written.

        Raises WriteError.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        self.slots.save()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        return self.slots.free

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def glance(self) -> StoreGlance | None:
        """What the expert store has counted since the start; None for a model without routed experts."""
        return self._llm.load(self.context).glance()

    def draft_counters(self) -> dict[str, dict[str, int]]:
        """Draft tokens by source since the start, those of running answers included."""
        return _added(self._ended_drafts, *(_drafts(each) for each in self.slots.active))

    def _main(self) -> None:
        while self._wait():
            if not self._waiting and self.slots.free == self.num_slots:
                self.slots.save_idle()
            self._admit()
            self._step()
        for active in self.slots.active:
            self._release(active)
            active.job.deliver(Failed(ShuttingDownError()))
        for job in self._waiting:
            job.deliver(Failed(ShuttingDownError()))

    def _wait(self) -> bool:
        """Sleep until there is something to do; False to end."""
        with self._changed:
            while not self._stopping and not self._waiting and self.slots.free == self.num_slots:
                wake = SAVE_SECONDS if self.slots.worth_saving else None
                if not self._changed.wait(wake) and not self._waiting:
                    break
            return not self._stopping

    def _forget_cancelled(self) -> None:
        """Jobs whose clients left while they waited give their places in the queue to others."""
        now = time.perf_counter()
        if not self._waiting or now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        with self._changed:
            staying = deque(job for job in self._waiting if not job.cancelled)
            self.counts.cancelled += len(self._waiting) - len(staying)
            self._waiting = staying

    def _admit(self) -> None:
        self._forget_cancelled()
        while self.slots.free:
            with self._changed:
                if not self._waiting:
                    return
                job = self._waiting[0]
            if job.cancelled:
                self.counts.cancelled += 1
                self._waiting.popleft()
                continue
            try:
                slot, active = self._begin(job)
            except Exception as error:
                self._waiting.popleft()
                self._fail(job, error)
                continue
            with self._changed:  # it leaves the queue as it takes the slot: in between there would be room for one more
                self._waiting.popleft()
                self.slots.take(slot, active)

    def _begin(self, job: Job) -> tuple[Slot, Active]:
        self._llm.check_ids(job.prompt_ids)
        slot = self.slots.find(job.prompt_ids)
        options = job.options
        seed = draw_seed() if options.sampler.seed is None else options.sampler.seed
        sampler = KeepingSampler(options.sampler, seed, self._llm.spec.vocab_size)
        sampler.keep(job.logprobs)
        running = self._llm.start(slot.session, job.prompt_ids, options, self._drafts, job.grammar, sampler, seed)
        active = Active(job, slot, running, sampler, AnswerText(self._llm.tokenizer, options.stop))
        active.seed = seed
        return slot, active

    def _step(self) -> None:
        """One forward over the next rows of prompts, then one for everybody who has read theirs: answers go on while
        a long prompt is read."""
        active = self.slots.active
        for each in active:
            if each.job.cancelled:
                self.counts.cancelled += 1  # first: whoever sees the slot free finds the count right
                self._release(each)
        active = [each for each in active if not each.job.cancelled]
        reading = sorted((each for each in active if each.running.reading), key=lambda each: each.slot.used)
        if reading:
            self._read(reading)
        together = [each for each in active if not each.running.reading and each.slot.active is each]
        if not together:
            return
        loaded = self._llm.load(self.context)
        before = sum(each.running.stats.generated_tokens for each in together)
        try:
            step_together(loaded.model, loaded.engine, [each.running for each in together])
        except Exception as error:
            for each in together:
                self._release(each)
                self._fail(each.job, error)
            return
        self.counts.steps += 1
        self.counts.step_rows += len(together)
        self.counts.step_tokens += sum(each.running.stats.generated_tokens for each in together) - before
        for each in together:
            self._deliver(each)

    def _read(self, reading: Sequence[Active]) -> None:
        loaded = self._llm.load(self.context)
        try:
            read_together(loaded.model, loaded.engine, [each.running for each in reading])
        except Exception as error:
            for each in reading:
                self._release(each)
                self._fail(each.job, error)
            return
        for each in reading:
            if not each.running.reading or each.running.error is not None:
                self.counts.first_tokens += each.running.stats.generated_tokens
                self._deliver(each)

    def _deliver(self, active: Active) -> None:
        running, answer = active.running, active.answer
        if running.error is not None:
            self._release(active)
            self._fail(active.job, running.error)
            return
        parts = []
        for token_id in running.take():
            parts.append(Part(answer.push(token_id), running.origins[active.taken]))
            active.taken += 1
            if answer.stopped:
                break
        ended = running.ended or answer.stopped
        if ended:
            parts.append(Part(answer.flush(), Origin()))
        piece = "".join(part.text for part in parts)
        logprobs = self._logprobs(active, ended)
        if piece or logprobs:
            active.job.deliver(Piece(piece, logprobs, tuple(parts)))
        if ended:
            self._release(active)
            self._finish(active)

    def _logprobs(self, active: Active, ended: bool) -> tuple[TokenLogprob, ...]:
        """Of the ids that belong to the answer: end ids, and ids in or behind a stop string, are left out.

        While a stop string may still take ids back they are kept until the end.
        """
        if active.job.logprobs is None or (active.job.options.stop and not ended):
            return ()
        begin, active.told = active.told, len(active.answer.token_ids)
        return tuple(active.sampler.kept[begin : active.told])

    def _finish(self, active: Active) -> None:
        stats, answer = active.running.stats, active.answer
        seconds = time.perf_counter() - active.job.submitted
        self._recent_s += 0.2 * (seconds - self._recent_s)
        counts = self.counts
        counts.finished += 1
        counts.prompt_tokens += stats.prompt_tokens
        counts.cached_tokens += active.cached_tokens
        counts.generated_tokens += len(answer.token_ids)
        active.job.deliver(
            Done(
                finish_reason="stop" if answer.stopped else stats.finish_reason,
                token_ids=tuple(answer.token_ids),
                prompt_tokens=stats.prompt_tokens,
                cached_tokens=active.cached_tokens,
                seed=active.seed,
                forwards=stats.forwards,
                drafts=_drafts(active),
                ttft_s=stats.ttft_s,
                seconds=seconds,
            )
        )

    def _release(self, active: Active) -> None:
        """Free the slot; its session ends behind the last row its cache holds, or the newest id."""
        session = active.slot.session
        if active.running.reading:
            session.rewind(session.cache.length)
        self._ended_drafts = _added(self._ended_drafts, _drafts(active))
        if (store := self._llm.load(self.context).store) is not None:
            store.catch_up()
        self.slots.release(active.slot)

    def _fail(self, job: Job, error: Exception) -> None:
        self.counts.failed += 1
        job.deliver(Failed(error))


def _drafts(active: Active) -> dict[str, dict[str, int]]:
    return {
        name: {"proposed": c.proposed, "judged": c.judged, "accepted": c.accepted}
        for name, c in active.running.drafter.counters.items()  # type: ignore[attr-defined]
    }


def _added(*counters: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Sums by source."""
    total: dict[str, dict[str, int]] = {}
    for each in counters:
        for name, counts in each.items():
            mine = total.setdefault(name, dict.fromkeys(counts, 0))
            for key, value in counts.items():
                mine[key] += value
    return total
