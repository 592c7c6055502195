"""One response of the real engine on a fake target, or on a real one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_model import FakeCache, FakeModel

from coli.drafts.merge import MergedSources
from coli.engine.engine import Drafter, Engine, Limits
from coli.engine.sampling import Sampler
from coli.engine.session import Model, Session
from coli.engine.stats import RunStats
from coli.options import SamplerOptions


@dataclass
class Response:
    ids: list[int]
    stats: RunStats
    session: Session
    model: Any  # the target that was used


@dataclass
class Setup:
    """A target and sampler settings; `run` answers a prompt with the given draft sources."""

    vocab_size: int = 7
    salt: int = 0
    repeat: int = 0
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    seed: int = 0
    end_ids: frozenset[int] = frozenset()
    chunk: int = 512

    def run(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        drafter: Drafter | None = None,
        context: int = 10_000,
        model: Model | None = None,
        session: Session | None = None,
    ) -> Response:
        """model: a target to use instead of a new FakeModel; session: one to go on with."""
        model = model or FakeModel(self.vocab_size, self.salt, self.repeat)
        session, stats = session or Session(FakeCache(context)), RunStats()
        ids = list(self.stream(model, session, prompt, max_tokens, drafter, context, stats))
        return Response(ids, stats, session, model)

    def stream(
        self,
        model: Model,
        session: Session,
        prompt: Sequence[int],
        max_tokens: int,
        drafter: Drafter | None = None,
        context: int = 10_000,
        stats: RunStats | None = None,
    ) -> Iterator[int]:
        """The ids as the engine yields them."""
        sampler = Sampler(self.sampler, self.seed, self.vocab_size)
        drafter = drafter or MergedSources([], vocab_size=self.vocab_size)
        limits = Limits(max_tokens, context, self.end_ids)
        return Engine(model, self.chunk).generate(session, prompt, limits, sampler, drafter, stats or RunStats())
