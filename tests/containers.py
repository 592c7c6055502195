"""Containers converted once per test process from the reference checkpoints in tests/oracle."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from convert.checkpoints import copy_fixture, edit_config, read_tensors, write_tensors

from coli.convert import ConvertOptions, convert

ORACLE = Path(__file__).parent / "oracle"
MTP_FIXTURE = "deepseek_v3-mtp"  # beside its head a deepseek_v3 like the other one
FIXTURES = tuple(sorted({path.parent.name for path in ORACLE.glob("*/expected.json")} - {MTP_FIXTURE}))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="coli-tests-", ignore_cleanup_errors=True)


@functools.cache
def container(name: str, quant: str | None) -> Path:
    """The container of oracle checkpoint `name` with every matrix stored as `quant`; None: convert's defaults."""
    target = Path(_folder().name) / f"{name}-{quant}"
    convert(ORACLE / name, target, ConvertOptions(quant=quant), lambda line: None)
    return target


@functools.cache
def variant(name: str, quant: str | None, *, head: bool = False, shared: str = "", topk: int = 0) -> Path:
    """The container of oracle checkpoint `name` with parts no oracle has.

    head: an MTP head of random weights (its own indexer included where the family has one) behind the last layer;
    shared: the roles of the layers' indexers, as index_topk_pattern; topk: index_topk.
    """
    folder = Path(_folder().name) / f"{name}-{quant}-{head}-{shared}-{topk}"
    source = copy_fixture(name, folder / "source")
    tensors = {key: values.astype(np.float32) for key, values in read_tensors(source).items()}
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    if head:
        tensors |= random_head(tensors, layers)
        edit_config(source, num_nextn_predict_layers=1)
    if shared:
        edit_config(source, index_topk_pattern=shared)
        without = [f"layers.{i}.self_attn.indexer." for i, role in enumerate(shared) if role == "S"]
        tensors = {key: values for key, values in tensors.items() if not any(part in key for part in without)}
    if topk:
        edit_config(source, index_topk=topk)
    write_tensors(source / "model.safetensors", tensors)
    convert(source, folder / "model", ConvertOptions(quant=quant), lambda line: None)
    return folder / "model"


def random_head(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """Tensors of layer number `layers`: the one before it, disturbed, and what stands before and behind a head's."""
    rng, last, head = np.random.default_rng(11), f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if name.startswith(last):
            noise = 0.5 * values.std() * rng.standard_normal(values.shape)
            found[head + name.removeprefix(last)] = (values + noise).astype(np.float32)
    hidden = len(tensors["model.norm.weight"])
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{head}{name}.weight"] = (1 + 0.2 * rng.standard_normal(hidden)).astype(np.float32)
    joined = rng.standard_normal((hidden, 2 * hidden)) / (2 * hidden) ** 0.5
    return found | {f"{head}eh_proj.weight": joined.astype(np.float32)}


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """What the reference class computed for `name`."""
    result: dict[str, Any] = json.loads((ORACLE / name / "expected.json").read_text())
    return result
