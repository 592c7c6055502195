"""One response of the real engine on a fake target."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fake_model import FakeCache, FakeModel

from coli.drafts.merge import MergedSources
from coli.engine.engine import Drafter, Engine, Limits
from coli.engine.sampling import Sampler
from coli.engine.session import Session
from coli.engine.stats import RunStats
from coli.options import SamplerOptions


@dataclass
class Response:
    ids: list[int]
    stats: RunStats
    session: Session
    model: FakeModel


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
        model: FakeModel | None = None,
    ) -> Response:
        """model: a target to use instead of a new one."""
        model = model or FakeModel(self.vocab_size, self.salt, self.repeat)
        session, stats = Session(FakeCache(context)), RunStats()
        sampler = Sampler(self.sampler, self.seed, self.vocab_size)
        drafter = drafter or MergedSources([], vocab_size=self.vocab_size)
        limits = Limits(max_tokens, context, self.end_ids)
        engine = Engine(model, self.chunk)
        ids = list(engine.generate(session, prompt, limits, sampler, drafter, stats))
        return Response(ids, stats, session, model)
