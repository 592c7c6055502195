"""One response of an open model: ids in, text out piece by piece, and the result when it is over.

Owns the stop strings, the text and the bookkeeping of a response; the engine owns the loop. Made by `LLM.generate`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coli.drafts.opening import Drafter
from coli.engine.engine import Limits
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
    ) -> None:
        self._loaded, self._tokenizer = loaded, tokenizer
        self._prompt_ids, self._context = tuple(prompt_ids), context
        self._options, self._seed = options, seed
        self._drafter, self._gate = drafter, gate
        self._stats = RunStats()
        self._stops = StopMatcher([stop.encode() for stop in options.stop])
        self._ids: list[int] = []
        self._starts: list[int] = []  # offset in the byte stream at which each id begins
        self._text: list[str] = []
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
            text="".join(self._text),
            token_ids=list(self._ids),
            seed=self._seed,
            stats=self._stats,
            store=self._loaded.store_counters().since(store),
            phases={name: now - phases[name] for name, now in self._loaded.model.phase_seconds().items()},
            cache=self._cache,
            drafts={
                name: {"proposed": c.proposed, "judged": c.judged, "accepted": c.accepted}
                for name, c in self._drafter.counters.items()
            },
            gate=self._gate,
            drafting=self._drafter.report,
            memory_budget_bytes=self._loaded.plan.budget_bytes,
            faults_before=faults,
            machine=self._loaded.machine(),
        )
        return GenerationResult(
            text=report["text"],
            token_ids=tuple(self._ids),
            prompt_ids=self._prompt_ids,
            finish_reason=self._stats.finish_reason,
            seed=self._seed,
            report=report,
            lines=tuple(self._drafter.report_lines()),
        )

    def _run(self) -> Iterator[str]:
        options, stops, decoder = self._options, self._stops, ByteDecoder()
        spec, engine = self._loaded.spec, self._loaded.engine
        end_ids = frozenset() if options.ignore_eos else self._tokenizer.end_ids
        limits = Limits(options.max_tokens, self._context, end_ids)
        sampler = Sampler(options.sampler, self._seed, spec.vocab_size)
        session = Session(self._loaded.new_cache(self._context))
        seen = 0
        for token_id in engine.generate(session, self._prompt_ids, limits, sampler, self._drafter, self._stats):
            data = self._tokenizer.token_bytes(token_id)
            self._ids.append(token_id)
            self._starts.append(seen)
            seen += len(data)
            piece = decoder.push(stops.push(data))
            if stops.matched:
                self._end_at_stop()
            if piece:
                self._text.append(piece)
                yield piece
            if stops.matched:
                break
        if piece := decoder.push(stops.flush()) + decoder.flush():
            self._text.append(piece)
            yield piece

    def _end_at_stop(self) -> None:
        """Drop the ids that lie wholly in or behind the stop string; ids, text and counts then agree."""
        self._ids = [i for i, start in zip(self._ids, self._starts, strict=True) if start < self._stops.kept_bytes]
        self._stats.generated_tokens = len(self._ids)
        self._stats.finish_reason = "stop"
