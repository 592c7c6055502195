"""What chat and serve share: the length of a conversation, and how answers are sampled by default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coli.options import GenerateOptions, Resolved, generate_options

if TYPE_CHECKING:
    from coli.llm import LLM

CONTEXT = 4096  # positions of a conversation unless --ctx says more


def context_length(llm: LLM, settings: Resolved) -> int:
    """Positions of one conversation: --ctx, else a usual length, at most the model's."""
    return min(settings["ctx"] or CONTEXT, llm.spec.max_position_embeddings)


def sampling_defaults(llm: LLM, settings: Resolved) -> GenerateOptions:
    """As the settings say, else as the model's generation_config, else temperature 0.7 with top-p 0.95."""
    options = generate_options(settings)
    if settings.given("temp"):
        return options
    suggested = llm.suggested_sampling() or {"temperature": 0.7, "top_p": 0.95}
    free = {name: value for name, value in suggested.items() if name == "temperature" or not settings.given(name)}
    return replace(options, sampler=replace(options.sampler, **free))
