"""What chat and serve share: the length of a conversation, and how answers are sampled by default."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coli.options import GenerateOptions, Resolved, generate_options

if TYPE_CHECKING:
    from coli.llm import LLM

CONTEXT = 4096  # positions of a conversation unless --ctx says more
TEMPERATURE, TOP_P = 0.7, 0.95  # where neither the user nor the model says something
# for --help: what the settings' table says of one answer is not so here
DEFAULTS = {
    "ctx": f"{CONTEXT}, at most the model's",
    "temp": f"the model's own, else {TEMPERATURE}",
    "top_k": "the model's own, else 0; 0 with --temp",
    "top_p": f"the model's own, else {TOP_P}; 1 with --temp",
    "min_p": "the model's own, else 0; 0 with --temp",
    "seed": "drawn for each answer, reported",
}


def context_length(llm: LLM, settings: Resolved) -> int:
    """Positions of one conversation: --ctx, else a usual length, at most the model's."""
    return min(settings["ctx"] or CONTEXT, llm.spec.max_position_embeddings)


def sampling_defaults(llm: LLM, settings: Resolved) -> GenerateOptions:
    """As the settings say, else as the model's generation_config, else TEMPERATURE with TOP_P."""
    options = generate_options(settings)
    if settings.given("temp"):
        return options
    suggested = llm.suggested_sampling()
    if "temperature" not in suggested:
        suggested = {"temperature": TEMPERATURE, "top_p": TOP_P, **suggested}
    free = {name: value for name, value in suggested.items() if name == "temperature" or not settings.given(name)}
    return replace(options, sampler=replace(options.sampler, **free))
