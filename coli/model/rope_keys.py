"""The rope keys of config.json -> RopeSpec, old style (rope_theta, rope_scaling) and new (rope_parameters)."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from coli.errors import UnsupportedModelError
from coli.model.config import (
    ConfigReader,
    RopeKind,
    RopeSpec,
)

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "longrope")


def rotary_dim_of(reader: ConfigReader, head_dim: int, default: float) -> int:
    """The leading dims of a head that rotate: all of them, but in families that have partial_rotary_factor."""
    if default == 1.0:
        return head_dim
    table = reader.table("rope_parameters") or {}
    where = ConfigReader(table, reader.path, "rope_parameters") if "partial_rotary_factor" in table else reader
    rotary_dim = int(head_dim * where.number("partial_rotary_factor", default=default))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        found = where.config.get("partial_rotary_factor")
        raise where.wrong("partial_rotary_factor", f"an even number of the {head_dim} dims of a head", found)
    return rotary_dim


def rope_of(
    reader: ConfigReader, head_dim: int, default_theta: float, assumed: list[str], partial: float = 1.0
) -> RopeSpec:
    """Old style rope_theta + rope_scaling (type or rope_type) or new style rope_parameters, also per attention type."""
    name = "rope_parameters" if reader.table("rope_parameters") else "rope_scaling"
    table = _one_rope(reader, name, reader.table(name) or {})
    rope = ConfigReader(table, reader.path, name)
    kind = rope.text("rope_type", "type", default="default")
    if kind not in ROPE_KINDS:
        raise rope.unsupported("rope_type", kind, ROPE_KINDS)
    theta = rope.optional_number("rope_theta") or reader.optional_number("rope_theta")
    if theta is None:
        theta = default_theta
        assumed.append(f"rope_theta {default_theta:g}")
    for where in (reader, rope):
        if partial == 1.0 and where.number("partial_rotary_factor", default=1.0) != 1.0:
            found = where.config["partial_rotary_factor"]
            raise reader.unsupported("partial_rotary_factor", found, ["1.0 for this model_type"])
    if kind == "linear":
        return RopeSpec(theta, head_dim, False, "linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            head_dim,
            False,
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(reader, rope, theta, head_dim)
    if kind == "longrope":
        return _longrope(reader, rope, theta, head_dim)
    return RopeSpec(theta, head_dim, interleaved=False)


def _one_rope(reader: ConfigReader, name: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope table itself; tables per attention type must agree, since these families have one rope."""
    per_type = {key: value for key, value in table.items() if key.endswith("_attention")}
    if not per_type:
        return table
    tables = [ConfigReader(per_type, reader.path, name).table(key) or {} for key in per_type]
    if any(other != tables[0] for other in tables[1:]):
        raise UnsupportedModelError(f"{reader.path}: {name} differs between attention types, which is not supported")
    return tables[0]


def _yarn(reader: ConfigReader, rope: ConfigReader, theta: float, head_dim: int) -> RopeSpec:
    """Yarn as in transformers 5: the explicit factor, or the ratio of the two context lengths where it is absent."""
    longest = reader.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", default=longest)
    factor = rope.number("factor", default=longest / original)
    mscale = rope.number("mscale", default=0.0, above=-1.0)
    mscale_all_dim = rope.number("mscale_all_dim", default=0.0, above=-1.0)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
        else:
            attention_factor = yarn_scale(factor, 1.0)
    return RopeSpec(
        theta,
        head_dim,
        False,
        "yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=attention_factor,
    )


def _longrope(reader: ConfigReader, rope: ConfigReader, theta: float, head_dim: int) -> RopeSpec:
    """Two lists of factors; phimoe names the factors of cos and sin, others take that of the paper."""
    longest = reader.integer("max_position_embeddings")
    original = rope.integer(
        "original_max_position_embeddings",
        default=reader.integer("original_max_position_embeddings", default=longest),
    )
    if original < 2:
        raise rope.wrong("original_max_position_embeddings", "at least 2", original)
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != head_dim // 2:
            raise rope.wrong(key, f"{head_dim // 2} numbers, one for each pair of dims", len(factors))
    factor = rope.number("factor", default=longest / original)
    usual = rope.optional_number("attention_factor")
    if usual is None:
        growth = 1 + Decimal(factor).ln() / Decimal(original).ln() if factor > 1 else Decimal(1)
        usual = float(growth.sqrt())
    return RopeSpec(
        theta,
        head_dim,
        False,
        "longrope",
        original_max_position_embeddings=original,
        attention_factor=rope.number("short_mscale", default=usual),
        short_factor=short,
        long_factor=long,
        long_attention_factor=rope.number("long_mscale", default=usual),
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, 3.4). Decimal, since libm's log depends on the CPU."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * float(Decimal(factor).ln()) + 1.0
