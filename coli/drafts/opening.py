"""From options to draft sources: which are on, how deep they go and who guards them, chosen once per response."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coli.drafts.acceptance import Acceptance
from coli.drafts.base import MAX_DRAFT_TOKENS, DraftSource, Guard, Notice, PausingGuard, SlidingGuard
from coli.drafts.gate import Gate
from coli.drafts.gated import TreeSources
from coli.drafts.merge import MergedSources
from coli.drafts.mtp import LABEL as MTP_LABEL
from coli.drafts.mtp import MtpSource, Predictor
from coli.drafts.ngram import NgramSource
from coli.errors import OptionError

if TYPE_CHECKING:
    from coli.drafts.corpus import SpanIndex
    from coli.drafts.grammar import GrammarLibrary
    from coli.drafts.graph import GraphOptions
    from coli.drafts.ngram_index import NgramIndex
    from coli.grammar.load import LoadedGrammar


Drafter = MergedSources | TreeSources
SEED_MINACC = 50
OWN_NOISE = 0x9E3779B97F4A7C15  # added to the seed for drafts that must not share the target's noise
SEED_MTP_MINACC = 70


class DraftSettings(Protocol):
    """coli.options.DraftOptions, as far as sources read it."""

    @property
    def enabled(self) -> bool: ...
    @property
    def corpus(self) -> Path | None: ...
    @property
    def corpus_k(self) -> int: ...
    @property
    def corpus_minacc(self) -> int: ...
    @property
    def draft(self) -> int | None: ...
    @property
    def mtp(self) -> bool | None: ...
    @property
    def graph(self) -> Path | None: ...
    @property
    def grammar(self) -> Path | None: ...
    @property
    def schema(self) -> Path | None: ...
    @property
    def grammar_draft(self) -> int: ...
    @property
    def gate(self) -> str: ...


class DraftTokenizer(Protocol):
    """What sources need of the model's tokenizer (coli.text.tokenizer.Tokenizer)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    @property
    def end_ids(self) -> Collection[int]: ...

    def encode(self, text: str) -> Sequence[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def id_of(self, text: str | None) -> int | None: ...
    @property
    def special_tokens(self) -> Mapping[str, str]: ...


class SourceLibrary:
    """The opened corpora and graphs of one model, kept between responses as long as their files do not change."""

    def __init__(
        self,
        vocab_size: int,
        fingerprint: Callable[[], str],
        notice: Notice,
        tokenizer: DraftTokenizer | None = None,
        has_mtp: bool = False,
    ) -> None:
        """fingerprint: of the model's tokenizer; only asked for when a file names one. tokenizer: for grammars.
        has_mtp: whether the model brings an MTP head.
        """
        self._has_mtp = has_mtp
        self._told_no_mtp = False
        self._vocab_size = vocab_size
        self._fingerprint = fingerprint
        self._notice = notice
        self._tokenizer = tokenizer
        self._corpora: dict[Path, tuple[tuple[int, int], SpanIndex]] = {}
        self._graphs: dict[Path, tuple[tuple[int, int] | None, NgramIndex]] = {}
        self._grammars: GrammarLibrary | None = None
        self._gate, self._acceptance = Gate(), Acceptance()

    def sources(
        self,
        settings: DraftSettings,
        *,
        seed: int = 0,
        graph: GraphOptions | None = None,
        grammar_text: LoadedGrammar | None = None,
        accept: str = "match",
    ) -> Drafter:
        """Fresh sources for one response. Raises CorpusError for a malformed or foreign corpus or graph.

        seed: of the response's noise, which a sampling graph shares; graph: its knobs (None: the defaults).
        grammar_text: a grammar that came with the request, instead of the settings' own. accept: with `rejection` a
        sampling graph draws for itself, and sources are asked one at a time: whether a token is drafted must not
        depend on which one was drawn.
        """
        rejecting = accept == "rejection"
        sources: list[DraftSource] = []
        if settings.enabled and grammar_text is not None:
            guarded = "seed" if settings.gate == "seed" else "always"
            sources.append(self._grammar_library().source(grammar_text, depth=settings.grammar_draft, gate=guarded))
        elif settings.enabled and (settings.grammar is not None or settings.schema is not None):
            sources.append(self._grammar_source(settings))
        if settings.enabled and settings.corpus is not None:
            index = self._corpus(settings.corpus, settings.corpus_k)
            if index is not None:
                from coli.drafts.corpus import CorpusSource

                guard = self._corpus_guard(settings)
                sources.append(CorpusSource(index, depth=settings.corpus_k, guard=guard))
        if settings.enabled and settings.draft != 0 and settings.mtp is not False:
            sources += self._mtp_source(settings)
        depth = MAX_DRAFT_TOKENS if settings.draft is None and settings.gate == "auto" else settings.draft
        if settings.enabled and depth:
            sources.append(NgramSource(depth=depth))
        if settings.enabled and settings.graph is not None:
            noise_seed = (seed + OWN_NOISE) % 2**64 if rejecting else seed
            sources.append(self._graph_source(settings.graph, noise_seed, graph))
        if rejecting:
            return MergedSources(sources, vocab_size=self._vocab_size)
        if settings.gate == "auto":
            gate, acceptance = self._gate, self._acceptance
            return TreeSources(sources, vocab_size=self._vocab_size, gate=gate, acceptance=acceptance)
        if settings.gate == "always" and len(sources) > 1:
            return TreeSources(sources, vocab_size=self._vocab_size)
        return MergedSources(sources, vocab_size=self._vocab_size)

    def open_files(self, settings: DraftSettings) -> None:
        """Open what `settings` name now instead of with the first response. Raises what `sources` raises."""
        if settings.enabled and settings.corpus is not None:
            self._corpus(settings.corpus, settings.corpus_k)
        if settings.enabled and settings.graph is not None:
            self._graph(settings.graph)
        if settings.enabled and (settings.grammar is not None or settings.schema is not None):
            self._grammar_source(settings)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the mapped files that are open: the page cache searching them can cause."""
        indexes = [index for _, index in (*self._corpora.values(), *self._graphs.values())]
        return sum(index.mapped_bytes for index in indexes)

    def _mtp_source(self, settings: DraftSettings) -> list[DraftSource]:
        """None without a head, and one line if it was asked for. Depth 1 unless told or left to the measured gate."""
        if not self._has_mtp:
            if settings.mtp and not self._told_no_mtp:
                self._notice(f"{MTP_LABEL}: this model has no MTP head; the other sources draft without it")
                self._told_no_mtp = True
            return []
        if settings.gate == "auto":
            worth = DraftWorth(self._gate, self._acceptance)
            return [MtpSource(depth=settings.draft or MAX_DRAFT_TOKENS, worth=worth)]
        guard = PausingGuard(MTP_LABEL, self._notice, percent=SEED_MTP_MINACC) if settings.gate == "seed" else None
        return [MtpSource(depth=settings.draft or 1, guard=guard)]

    def _corpus_guard(self, settings: DraftSettings) -> Guard | None:
        """The seed's; with the measured gate only a minimum that differs from the seed's counts, in a true window."""
        from coli.drafts.corpus import LABEL

        if settings.gate == "seed":
            return PausingGuard(LABEL, self._notice, percent=settings.corpus_minacc)
        if settings.gate == "auto" and settings.corpus_minacc != SEED_MINACC:
            return SlidingGuard(LABEL, self._notice, window=24, percent=settings.corpus_minacc)
        return None

    def _grammar_source(self, settings: DraftSettings) -> DraftSource:
        from coli.grammar.load import GRAMMAR_TAG, SCHEMA_TAG

        if settings.grammar is not None and settings.schema is not None:
            raise OptionError("--grammar and --schema: expected one of the two, found both")
        path = settings.grammar or settings.schema
        assert path is not None
        tag = GRAMMAR_TAG if settings.grammar is not None else SCHEMA_TAG
        gate = "seed" if settings.gate == "seed" else "always"  # the measured gate needs no guard
        return self._grammar_library().open(path, tag=tag, depth=settings.grammar_draft, gate=gate)

    def _grammar_library(self) -> GrammarLibrary:
        from coli.drafts.grammar import GrammarLibrary

        assert self._tokenizer is not None, "grammars need the model's tokenizer"
        if self._grammars is None:
            # Of several end ids the tokenizer's own ends a turn; the others end documents.
            named = self._tokenizer.id_of(self._tokenizer.special_tokens.get("eos_token"))
            end_id = named if named in self._tokenizer.end_ids else min(self._tokenizer.end_ids, default=None)
            self._grammars = GrammarLibrary(self._tokenizer, self._notice, end_id=end_id)
        return self._grammars

    def _graph_source(self, path: Path, seed: int, options: GraphOptions | None) -> DraftSource:
        from coli.drafts.graph import GraphOptions, GraphSource
        from coli.kernels.noise import gumbel

        index = self._graph(path)
        return GraphSource(index, options or GraphOptions(), noise=lambda at, ids: gumbel(seed, at, ids))

    def _graph(self, path: Path) -> NgramIndex:
        from coli.drafts.ngram_index import NgramIndex

        version = _version(path)
        known = self._graphs.get(path)
        if known is None or known[0] != version:
            index = NgramIndex.open(path, vocab_size=self._vocab_size, tokenizer=self._fingerprint())
            self._notice(f"graph drafts: {index.num_ids} ids from {path}, orders 1..{index.header.max_order}")
            known = self._graphs[path] = (version, index)
        return known[1]

    def _corpus(self, path: Path, depth: int) -> SpanIndex | None:
        from coli.drafts.corpus import LABEL, open_corpus

        version = _version(path)
        known = self._corpora.get(path)
        if known is not None and known[0] == version:
            return known[1]
        index = open_corpus(path, self._vocab_size, self._fingerprint, self._notice)
        if index is None:
            return None
        self._notice(f"{LABEL}: {index.num_ids} frozen ids from {path}, depth {depth}")
        if version is not None:
            self._corpora[path] = (version, index)
        return index


class DraftWorth:
    """What guesses of the MTP head are worth: expected tokens against the rows they add and their own time."""

    def __init__(self, gate: Gate, acceptance: Acceptance) -> None:
        self._gate, self._acceptance = gate, acceptance

    def depth(self, limit: int, behind: int, seconds: float) -> int:
        costs = self._gate.costs
        if not costs.plain_seconds or self._gate.is_closed:
            return 0
        each = seconds / costs.plain_seconds
        best, best_depth, chance, tokens = 1.0, 0, 1.0, 0.0
        for depth in range(1, min(limit, MAX_DRAFT_TOKENS - behind) + 1):
            chance *= self._acceptance.probability(MtpSource.name, 0, behind + depth - 1)
            tokens += chance
            further = costs.ratio(1 + behind + depth) - costs.ratio(1 + behind)
            gain = (1 + tokens) / (1 + further + each * (behind + depth))
            if gain > best:
                best, best_depth = gain, depth
        return best_depth


def bind_predictor(drafter: Drafter, predictor: Predictor) -> None:
    """Give the MTP source among the response's sources what guesses for its sequence."""
    for source in drafter.sources:
        if isinstance(source, MtpSource):
            source.predictor = predictor


def _version(path: Path) -> tuple[int, int] | None:
    """Changes with the file; None for a pipe, which can be read once only, and for a file that is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if path.is_file() else None


def open_sources(
    settings: DraftSettings, vocab_size: int, notice: Notice, fingerprint: Callable[[], str] = lambda: ""
) -> Drafter:
    """The sources `settings` ask for, opened for one response only."""
    return SourceLibrary(vocab_size, fingerprint, notice).sources(settings)
