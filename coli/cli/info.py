"""`coli info`: what a container holds, from its headers alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from coli.cli.flags import MODEL, OUTPUT, settings_options
from coli.cli.json_output import STDOUT, write_json
from coli.cli.model_path import model_path
from coli.cli.report_lines import size
from coli.cli.streams import Streams, one_line
from coli.errors import OptionError, TokenizerError
from coli.model.kv_cache import kv_bytes_per_token
from coli.model.tensors import container_spec
from coli.options import resolve
from coli.store.container import Container
from coli.store.layout import MatrixShape
from coli.text.chat import ChatTemplate
from coli.text.tokenizer import Tokenizer


@click.command("info")
@click.argument("container", metavar="MODEL", required=False, type=str)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@settings_options("model", *OUTPUT)
def command(container: str | None, as_json: bool, **flags: Any) -> None:
    """Show what MODEL (a container folder, or a name under the model home) holds and needs.

    With --verbose every dense tensor is listed too.
    """
    settings = resolve(flags, names=(*MODEL, *OUTPUT))
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    if container is not None and settings.values["model"].origin == "flag":
        raise OptionError("--model: there is a MODEL argument too; give one of the two")
    path = model_path(settings, streams.notice, container)
    opened = Container.open(path)
    facts = describe(opened)
    if settings["verbose"]:
        facts["tensors"] = _tensors(opened)
    if as_json:
        write_json(STDOUT, facts)
    else:
        for line in info_lines(facts):
            streams.text(one_line(line) + "\n")


def describe(container: Container) -> dict[str, Any]:
    """What `coli info --json` prints; sizes in bytes.

    bytes_per_token_cycle is what one token needs of the experts: all MoE layers x experts per token x record.
    """
    spec = container_spec(container)
    layouts = [container.expert_layout(layer_idx) for layer_idx in spec.moe_layers]
    head = None if spec.mtp is None else container.expert_layout(spec.mtp.layer_idx)
    kinds = Counter(shape.kind.label for shape in container.manifest.tensors.values() if isinstance(shape, MatrixShape))
    return {
        "path": str(container.path),
        "model_type": spec.model_type,
        "source": dict(container.manifest.source),
        "quantization": dict(container.manifest.quantization),
        "fingerprint": container.fingerprint,
        "num_hidden_layers": spec.num_hidden_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_moe_layers": len(layouts),
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "dense_bytes": sum(container.array(name).nbytes for name in container.tensor_names()),
        "dense_matrices": dict(sorted(kinds.items())),
        "expert_bytes": sum(layout.num_experts * layout.record_bytes for layout in layouts),
        "mtp_expert_bytes": 0 if head is None else head.num_experts * head.record_bytes,
        "record_bytes": max((layout.record_bytes for layout in layouts), default=0),
        "bytes_per_token_cycle": sum(spec.num_experts_per_tok * layout.record_bytes for layout in layouts),
        "kv_bytes_per_token": {name: kv_bytes_per_token(spec, name) for name in ("f16", "f32")},
        "tokenizer": _tokenizer(container.path),
    }


def _tokenizer(folder: Path) -> dict[str, Any]:
    """Facts of the tokenizer and template; `error` when they cannot be used, which `coli run` would refuse."""
    try:
        tokenizer = Tokenizer.load(folder)
        template = ChatTemplate.load(folder)
    except TokenizerError as error:
        return {"error": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "prefix_ids": list(tokenizer.prefix_ids),
        "end_ids": sorted(tokenizer.end_ids),
        "chat_template": None if template is None else template.place,
        "fingerprint": tokenizer.fingerprint,
    }


def _tensors(container: Container) -> dict[str, Any]:
    return {
        name: {"kind": shape.kind.label, "shape": [shape.rows, shape.cols]}
        if isinstance(shape, MatrixShape)
        else {"kind": "f32", "shape": [shape]}
        for name, shape in container.manifest.tensors.items()
    }


def info_lines(facts: dict[str, Any]) -> list[str]:
    """The facts for people."""
    kv, tokenizer = facts["kv_bytes_per_token"], facts["tokenizer"]
    lines = [
        f"model        {facts['path']}",
        f"family       {facts['model_type']}, {facts['num_hidden_layers']} layers, "
        f"hidden size {facts['hidden_size']}, {facts['num_attention_heads']} heads "
        f"({facts['num_key_value_heads']} of keys and values) of {facts['head_dim']}",
        f"context      {facts['max_position_embeddings']} tokens, {facts['vocab_size']} ids",
        "dense        "
        + f"{size(facts['dense_bytes'])} ("
        + ", ".join(f"{count} {kind} matrices" for kind, count in facts["dense_matrices"].items())
        + ")",
    ]
    if facts["num_moe_layers"]:
        lines += [
            f"experts      {size(facts['expert_bytes'])}: {facts['num_moe_layers']} layers x {facts['num_experts']} "
            f"records of {size(facts['record_bytes'])}, {facts['num_experts_per_tok']} per token",
            f"token cycle  {size(facts['bytes_per_token_cycle'])} of expert records for one token",
        ]
    if facts["mtp_expert_bytes"]:
        lines.append(f"MTP head     one layer more, experts {size(facts['mtp_expert_bytes'])}")
    lines += [
        f"kv           {size(kv['f16'])} per token in f16, {size(kv['f32'])} in f32",
        "quantized    " + ", ".join(f"{name} {value}" for name, value in facts["quantization"].items()),
        f"fingerprint  {facts['fingerprint']}",
    ]
    if "error" in tokenizer:
        lines.append(f"tokenizer    cannot be used: {tokenizer['error']}")
    else:
        template = "none" if tokenizer["chat_template"] is None else Path(tokenizer["chat_template"]).name
        ends = " ".join(map(str, tokenizer["end_ids"])) or "none"
        lines.append(f"tokenizer    {tokenizer['vocab_size']} ids, end ids {ends}, chat template {template}")
    for name, tensor in facts.get("tensors", {}).items():
        lines.append(f"tensor       {name} {tensor['kind']} {'x'.join(map(str, tensor['shape']))}")
    return lines
