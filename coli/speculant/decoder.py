"""SpeculativeDecoder: a model that stays loaded and answers with the graph's drafts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from coli.errors import ColiError
from coli.options import DraftOptions, GenerateOptions, SamplerOptions, engine_options, resolve
from coli.settings_table import TABLE
from coli.speculant.configs import DraftConfig, GenerationConfig, VerifierConfig
from coli.speculant.models import Notice, model_folder

if TYPE_CHECKING:
    from coli.llm import LLM

_ENGINE = tuple(setting.name for setting in TABLE if setting.group in ("engine", "drafts"))


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One answer. position_acceptance: (accepted, compared) for each place of a draft, the first token first;
    acceptance_rate: accepted of compared; generation_time in seconds; report: the fields of `coli run --json`.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    generated_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    position_acceptance: tuple[tuple[int, int], ...]
    forwards: int
    generation_time: float
    finish_reason: str
    seed: int
    report: dict[str, Any]


class SpeculativeDecoder:
    """Opens the model at once, loads it with the first answer. Use as a context manager, or call `close`."""

    def __init__(
        self,
        graph_path: str | os.PathLike[str] | None = None,
        verifier_config: VerifierConfig | None = None,
        draft_config: DraftConfig | None = None,
        *,
        accept: str | None = None,
        notice: Notice | None = None,
    ) -> None:
        """graph_path: made by GraphBuilder or `coli graph build`, None drafts nothing; accept: match (the bytes do not
        depend on the graph) or rejection (their law does not), None: COLI_ACCEPT, else match. COLI_GATE decides whether
        drafts have to pay (auto, as a rule) or are always made (seed). notice: hears what a
        command would say on standard error.

        Raises OptionError with the `coli pull` line for a model that is not here, CorpusError for a graph that is none
        or another model's.
        """
        from coli.drafts.ngram_index import NgramIndex
        from coli.llm import LLM

        verifier = verifier_config or VerifierConfig()
        settings = resolve({"accept": accept}, names=_ENGINE)
        folder = model_folder(verifier.model_name, "model_name")
        quiet: Callable[[str], None] = lambda line: None  # noqa: E731
        self._llm: LLM = LLM.open(folder, engine_options(settings), notice or quiet)
        graph = None if graph_path is None else Path(graph_path)
        if graph is not None:
            tokenizer = self._llm.tokenizer
            try:
                NgramIndex.open(graph, vocab_size=self._llm.spec.vocab_size, tokenizer=tokenizer.fingerprint)
            except ColiError:
                self._llm.close()
                raise
        gate = "seed" if settings["accept"] == "rejection" else settings["gate"]
        self._drafts = DraftOptions(
            graph=graph, draft=0, gate=gate, accept=settings["accept"], knobs=(draft_config or DraftConfig()).knobs
        )

    def __enter__(self) -> SpeculativeDecoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give files and memory back."""
        self._llm.close()

    def generate(
        self,
        prompt: str,
        generation_config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        on_text: Callable[[str], None] = lambda piece: None,
    ) -> GenerationResult:
        """Answer `prompt`, through the model's chat template when it has one, unless `raw`. on_text: hears the pieces.

        Raises ContextLengthError, MemoryBudgetError.
        """
        config = generation_config or GenerationConfig()
        sampler = SamplerOptions(temperature=config.temperature, seed=config.seed)
        ids = self._llm.prompt_ids(prompt, raw=raw)
        began = time.perf_counter()
        generation = self._llm.generate(ids, GenerateOptions(config.max_tokens, sampler=sampler), self._drafts)
        for piece in generation:
            on_text(piece)
        found = generation.result
        seconds = time.perf_counter() - began
        counts = found.report["drafts"].get("graph", {"judged": 0, "accepted": 0})
        positions = zip(counts.get("accepted_at", ()), counts.get("judged_at", ()), strict=True)
        return GenerationResult(
            text=found.text,
            token_ids=found.token_ids,
            prompt_tokens=len(found.prompt_ids),
            generated_tokens=len(found.token_ids),
            num_draft_tokens=counts["judged"],
            num_accepted_tokens=counts["accepted"],
            acceptance_rate=counts["accepted"] / counts["judged"] if counts["judged"] else 0.0,
            position_acceptance=tuple(positions),
            forwards=found.report["forwards"],
            generation_time=seconds,
            finish_reason=found.finish_reason,
            seed=found.seed,
            report=found.report,
        )
