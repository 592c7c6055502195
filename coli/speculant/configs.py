"""The four configurations of the graph tool, filled and checked by the settings table.

A field left out takes the variable of its setting (SPECULANT_DRAFT__K and so on), else the tool's own default; a value
that is not allowed raises OptionError naming the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from coli.options import GraphKnobs, resolve
from coli.settings_table import BY_NAME

# field of each configuration -> setting; the setting has the variable, the bounds and mostly the default
_GRAPH = {
    "max_order": "max_order",
    "tokenizer_name": "tokenizer_name",
    "chunk_size": "chunk_size",
    "hf_token": "hf_token",
    "download_mode": "download_mode",
}
_DRAFT = {
    "k": "graph_k",
    "strategy": "strategy",
    "max_order": "graph_order",
    "order_bias": "order_bias",
    "mix_temperature": "mix_temperature",
    "reliability_weight": "reliability_weight",
    "entropy_penalty": "entropy_penalty",
}
_VERIFIER = {
    "model_name": "model",
    "device": "device",
    "hf_token": "hf_token",
    "download_mode": "download_mode",
}
_GENERATION = {"max_tokens": "ngen", "temperature": "temp", "seed": "seed"}


def _from(setting: str, default: Any = None) -> Any:
    """A field whose default is the setting's variable, else `default`, else the setting's default."""

    def value() -> Any:
        resolved = resolve({}, names=[setting])
        return resolved[setting] if default is None or resolved.given(setting) else default

    return field(default_factory=value)


def _check(config: Any, settings: dict[str, str]) -> None:
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in settings and value is not None:
            parsed = BY_NAME[settings[each.name]].parse(value, f"{type(config).__name__}.{each.name}")
            object.__setattr__(config, each.name, parsed)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """How a graph is built. tokenizer_name: a container, a pulled name or a hub id that was pulled (None: the model's,
    else the built-in one); chunk_size: characters encoded at a time; hf_token, download_mode: for `pull`.
    """

    max_order: int = _from("max_order")
    tokenizer_name: str | None = _from("tokenizer_name")
    chunk_size: int = _from("chunk_size", 10000)
    hf_token: str | None = field(default_factory=lambda: resolve({}, names=["hf_token"])["hf_token"], repr=False)
    download_mode: str = _from("download_mode")

    def __post_init__(self) -> None:
        _check(self, _GRAPH)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How the graph drafts: semantics of `--graph-k`, `--strategy` and the mixing knobs. attentive_mix False takes the
    longest known context alone; max_order: longest context used (None: the graph's).
    """

    k: int = _from("graph_k")
    strategy: str = _from("strategy")
    attentive_mix: bool = field(default_factory=lambda: bool(resolve({}, names=["mix"])["mix"] == "attentive"))
    order_bias: float = _from("order_bias")
    mix_temperature: float = _from("mix_temperature")
    reliability_weight: float = _from("reliability_weight")
    entropy_penalty: float = _from("entropy_penalty")
    max_order: int | None = _from("graph_order")
    mix: str | None = None  # attentive, single or witten-bell; None: as attentive_mix and SPECULANT_DRAFT__MIX say

    def __post_init__(self) -> None:
        _check(self, {**_DRAFT, "mix": "mix"})

    @property
    def knobs(self) -> GraphKnobs:
        """As the engine takes them."""
        other = resolve({}, names=["mix"])["mix"]
        mix = self.mix or ("attentive" if self.attentive_mix else "single" if other == "attentive" else other)
        return GraphKnobs(
            k=self.k,
            order=self.max_order,
            strategy=self.strategy,
            mix=mix,
            order_bias=self.order_bias,
            mix_temperature=self.mix_temperature,
            reliability_weight=self.reliability_weight,
            entropy_penalty=self.entropy_penalty,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """The model that decides. model_name: a container, a pulled name or a hub id that was pulled (None: the built-in
    demo model); device: cpu or None; hf_token, download_mode: for `pull`.
    """

    model_name: str | None = _from("model")
    device: str | None = _from("device")
    hf_token: str | None = field(default_factory=lambda: resolve({}, names=["hf_token"])["hf_token"], repr=False)
    download_mode: str = _from("download_mode")

    def __post_init__(self) -> None:
        _check(self, _VERIFIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """One answer. temperature 0 takes the best token; seed None: drawn, and named in the result."""

    max_tokens: int = _from("ngen", 100)
    temperature: float = _from("temp", 1.0)
    seed: int | None = _from("seed")

    def __post_init__(self) -> None:
        _check(self, _GENERATION)
