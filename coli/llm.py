"""The composition root: open a model folder, load it, generate, close.

The only module that knows all the others. Takes frozen options, never a flag or a variable; called by the command line,
the server and scripts, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from coli.drafts.opening import SourceLibrary
from coli.engine.engine import Limits
from coli.engine.sampling import Sampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.errors import ContextLengthError, OptionError
from coli.gating import Gating
from coli.generation import Generation, GenerationResult, draw_seed
from coli.kernels import runtime
from coli.loading import LoadedModel
from coli.model.tensors import container_spec
from coli.options import DraftOptions, EngineOptions, GenerateOptions
from coli.store.container import Container
from coli.text.chat import ChatTemplate
from coli.text.files import read_json_object
from coli.text.prompt import chat_ids, plain_ids
from coli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from coli.drafts.graph import GraphOptions
    from coli.engine.together import Running
    from coli.grammar.load import LoadedGrammar
    from coli.store.stats import TraceSink

__all__ = ["LLM", "Generation", "GenerationResult"]

Notice = Callable[[str], None]


class LLM:
    """An open model. Use as a context manager, or call `close`."""

    def __init__(
        self,
        container: Container,
        tokenizer: Tokenizer,
        options: EngineOptions,
        notice: Notice,
        trace: TraceSink | None = None,
    ) -> None:
        self.container = container
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate.load(container.path)
        self.spec = container_spec(container)
        self._options = options
        self._notice = notice
        self._trace = trace
        self._loaded: LoadedModel | None = None
        has_mtp = self.spec.mtp is not None and options.mtp
        self._sources = SourceLibrary(self.spec.vocab_size, lambda: tokenizer.fingerprint, notice, tokenizer, has_mtp)
        self._gating = Gating(container, options, notice)

    @classmethod
    def open(
        cls,
        path: Path,
        options: EngineOptions,
        notice: Notice,
        tokenizer: Callable[[], Tokenizer] | None = None,
        trace: TraceSink | None = None,
    ) -> LLM:
        """Open the container in folder `path`; weights are loaded with the first response.

        `tokenizer` gives the folder's tokenizer where somebody has begun to open it (text.loading). `trace` hears which
        experts are asked for.

        Raises NotConvertedError, CheckpointError, TokenizerError, UnsupportedModelError, OptionError.
        """
        runtime.configure(options.simd, options.kernel_cache, options.threads)
        container = Container.open(path)
        return cls(container, Tokenizer.load(path) if tokenizer is None else tokenizer(), options, notice, trace)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give files and memory back."""
        if self._loaded is not None:
            self._gating.close()
            self._loaded.close()
            self._loaded = None

    def prompt_ids(
        self, text: str, *, raw: bool = False, system: str | None = None, think: bool | None = None
    ) -> list[int]:
        """Ids of one user message: through the model's chat template when it has one, unless `raw`."""
        if raw or self.chat_template is None:
            return plain_ids(self.tokenizer, text)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        return chat_ids(self.tokenizer, self.chat_template, messages, enable_thinking=think)

    def generate(
        self,
        prompt_ids: Sequence[int],
        options: GenerateOptions,
        drafts: DraftOptions | None = None,
        session: Session | None = None,
    ) -> Generation:
        """Start one response; its tokens are computed as its pieces are asked for.

        session: of `new_session`, kept from response to response; what the prompt begins with is not computed again.

        Raises ContextLengthError, MemoryBudgetError, OptionError, GrammarError, CorpusError.
        """
        drafts = drafts or DraftOptions()
        self.check_ids(prompt_ids)
        context = self._context(len(prompt_ids), options.max_tokens)
        if session is not None:
            context = min(context, session.cache.capacity)
        seed = draw_seed() if options.sampler.seed is None else options.sampler.seed
        graph, accept = self._graph_options(drafts), drafts.accept
        sources = self._sources.sources(drafts, seed=seed, graph=graph, accept=accept)
        loaded = self.load(context)
        self._gating.join(sources, loaded)
        args = loaded, self.tokenizer, prompt_ids, context, options, seed, sources, drafts.gate, session, accept
        return Generation(*args)

    def start(
        self,
        session: Session,
        prompt_ids: Sequence[int],
        options: GenerateOptions,
        drafts: DraftOptions,
        grammar: LoadedGrammar | None,
        sampler: Sampler,
        seed: int,
    ) -> Running:
        """One response among several on a session of its own, to be stepped by `engine.together`.

        grammar: to draft from, instead of what `drafts` names. Raises what `generate` raises.
        """
        from coli.engine.together import Running

        self.check_ids(prompt_ids)
        context = min(self._context(len(prompt_ids), options.max_tokens), session.cache.capacity)
        if len(prompt_ids) >= context:
            raise ContextLengthError(f"the prompt has {len(prompt_ids)} tokens, the context is {context}")
        graph = self._graph_options(drafts)
        sources = self._sources.sources(drafts, seed=seed, graph=graph, grammar_text=grammar)
        loaded = self.load(context)
        self._gating.join(sources, loaded)
        limits = Limits(options.max_tokens, context, frozenset() if options.ignore_eos else self.tokenizer.end_ids)
        loaded.predict_for(sources, session.cache, options.sampler, seed)
        rest = session.resume(prompt_ids)
        return Running(loaded.engine, session, rest, limits, sampler, sources, RunStats())

    @staticmethod
    def _graph_options(drafts: DraftOptions) -> GraphOptions | None:
        if drafts.graph is None:
            return None
        from coli.drafts.graph import graph_options

        return graph_options(drafts.knobs)

    def suggested_sampling(self) -> dict[str, Any]:
        """Sampler settings of the model's generation_config.json by name, those that are usable; may be empty."""
        found = read_json_object(self.container.path / "generation_config.json") or {}
        if found.get("do_sample") is False:
            return {"temperature": 0.0}
        bounds = {"temperature": (0, 100), "top_k": (0, 2**31 - 1), "top_p": (0, 1), "min_p": (0, 1)}
        usable: dict[str, Any] = {"temperature": 1.0} if found.get("do_sample") is True else {}
        for name, (low, high) in bounds.items():
            value = found.get(name)
            if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
                continue
            if low <= value <= high:
                usable[name] = value
        return usable

    def new_session(self, context: int, sessions: int = 1, drafts: DraftOptions | None = None) -> Session:
        """An empty conversation of up to `context` positions; loads the model with room for `sessions` of them.

        drafts: whose corpora and graphs the memory plan shall count.
        """
        if drafts is not None:
            self._sources.open_files(drafts)
        return Session(self.load(context, sessions).new_cache(context))

    def load(self, context: int, sessions: int = 1) -> LoadedModel:
        """The model in memory, loaded on first use with room for `sessions` of `context` positions."""
        if self._loaded is None:
            args = self.container, self.spec, self._options, context, self._notice, self._trace
            self._loaded = LoadedModel(*args, sessions=sessions, drafts_bytes=self._sources.mapped_bytes)
        return self._loaded

    def check_ids(self, prompt_ids: Sequence[int]) -> None:
        """Raise OptionError for an id outside the vocabulary."""
        for at, token_id in enumerate(prompt_ids):
            if not 0 <= token_id < self.spec.vocab_size:
                raise OptionError(
                    f"prompt id {token_id} (number {at + 1}): expected 0..{self.spec.vocab_size - 1}, "
                    "the model's vocabulary"
                )

    def _context(self, prompt_tokens: int, max_tokens: int) -> int:
        """Positions of one response: as asked for, else what it can need, at most the model's."""
        limit = self.spec.max_position_embeddings
        asked = self._options.context
        context = min(asked or prompt_tokens + max_tokens, limit)
        if prompt_tokens < 1:
            raise ContextLengthError("the prompt has no tokens; give some text")
        if prompt_tokens >= context:
            if asked is not None and asked <= limit:
                where, remedy = "--ctx", "shorten the prompt or raise --ctx"
            else:
                where, remedy = "the model's context", "shorten the prompt"
            raise ContextLengthError(f"the prompt has {prompt_tokens} tokens, {where} is {context}: {remedy}")
        return context
