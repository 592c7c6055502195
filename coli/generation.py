"""One response of an open model: ids in, text out piece by piece, and the result when it is over.

Owns the stop strings, the text and the bookkeeping of a response; the engine owns the loop. Made by `LLM.generate`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coli.drafts.opening import Drafter
from coli.engine.engine import Limits
from coli.engine.rejection import RejectionSampler
from coli.engine.sampling import Sampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.engine.stops import StopMatcher
from coli.loading import LoadedModel
from coli.options import GenerateOptions
from coli.process_use import ProcessUse
from coli.report import run_report
from coli.text.detokenizer import ByteDecoder
from coli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished response. `report` has the field names of the JSON report, `lines` the draft sources' own lines."""

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    report: dict[str, Any]
    lines: tuple[str, ...]


def draw_seed() -> int:
    """A seed for a response that was not given one."""
    return secrets.randbits(63)


class AnswerText:
    """The text of one answer as its ids come: stop strings, never half a character; ids and text agree at the end."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._stops = StopMatcher([text.encode() for text in stop])
        self._decoder = ByteDecoder()
        self._starts: list[int] = []  # offset in the byte stream at which each id begins
        self._seen = 0
        self.token_ids: list[int] = []
        self.pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared: nothing more comes out, and ids in or behind it are dropped."""
        return self._stops.matched

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def push(self, token_id: int) -> str:
        """Text that is certain now that `token_id` follows; may be empty."""
        data = self._token_bytes(token_id)
        self.token_ids.append(token_id)
        self._starts.append(self._seen)
        self._seen += len(data)
        piece = self._take(self._decoder.push(self._stops.push(data)))
        if self.stopped:
            pairs = zip(self.token_ids, self._starts, strict=True)
            self.token_ids = [i for i, start in pairs if start < self._stops.kept_bytes]
        return piece

    def flush(self) -> str:
        """End of the answer: what was held back."""
        return self._take(self._decoder.push(self._stops.flush()) + self._decoder.flush())

    def _take(self, piece: str) -> str:
        if piece:
            self.pieces.append(piece)
        return piece


class Generation:
    """A running response: iterate for pieces of text, then ask for `result`."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        context: int,
        options: GenerateOptions,
        seed: int,
        drafter: Drafter,
        gate: str,
        session: Session | None = None,
        accept: str = "match",
    ) -> None:
        """session: to go on with as far as it begins like the prompt; None: a fresh one. accept: how drafts are judged,
        match or rejection.
        """
        self._session = session
        self._loaded, self._tokenizer = loaded, tokenizer
        self._prompt_ids, self._context = tuple(prompt_ids), context
        self._options, self._seed = options, seed
        self._drafter, self._gate, self._accept = drafter, gate, accept
        self._stats = RunStats()
        self._answer = AnswerText(tokenizer, options.stop)
        self._cache = loaded.cache_state()
        self._before = loaded.store_counters(), ProcessUse.now().major_faults, loaded.model.phase_seconds()
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def result(self) -> GenerationResult:
        """What came out; runs to the end first if the iteration has not."""
        for _ in self._pieces:
            pass
        store, faults, phases = self._before
        report = run_report(
            text=self._answer.text,
            token_ids=list(self._answer.token_ids),
            seed=self._seed,
            stats=self._stats,
            store=self._loaded.store_counters().since(store),
            phases={name: now - phases[name] for name, now in self._loaded.model.phase_seconds().items()},
            cache=self._cache,
            drafts={name: counters.report for name, counters in self._drafter.counters.items()},
            gate=self._gate,
            drafting=self._drafter.report,
            memory_budget_bytes=self._loaded.plan.budget_bytes,
            faults_before=faults,
            machine=self._loaded.machine(),
        )
        return GenerationResult(
            text=report["text"],
            token_ids=tuple(self._answer.token_ids),
            prompt_ids=self._prompt_ids,
            finish_reason=self._stats.finish_reason,
            seed=self._seed,
            report=report,
            lines=tuple(self._drafter.report_lines()),
        )

    def _run(self) -> Iterator[str]:
        options, answer, stats = self._options, self._answer, self._stats
        spec, engine = self._loaded.spec, self._loaded.engine
        end_ids = frozenset() if options.ignore_eos else self._tokenizer.end_ids
        limits = Limits(options.max_tokens, self._context, end_ids)
        kind = RejectionSampler if self._accept == "rejection" else Sampler
        sampler = kind(options.sampler, self._seed, spec.vocab_size)
        session = self._session or Session(self._loaded.new_cache(self._context))
        # a rejection test is exact for a draft that does not share the target's noise: the head's best token
        drawn = replace(options.sampler, temperature=0.0) if self._accept == "rejection" else options.sampler
        self._loaded.predict_for(self._drafter, session.cache, drawn, self._seed)
        prompt_ids = session.resume(self._prompt_ids)
        for token_id in engine.generate(session, prompt_ids, limits, sampler, self._drafter, stats):
            piece = answer.push(token_id)
            if answer.stopped:
                stats.generated_tokens = len(answer.token_ids)
                stats.finish_reason = "stop"
            if piece:
                yield piece
            if answer.stopped:
                break
        if piece := answer.flush():
            yield piece
