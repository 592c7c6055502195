"""GGUF files made from the oracle checkpoints the way llama.cpp's converter lays them out, whole or spoilt on purpose.

Written with the `gguf` package's writer; nothing here uses the code under test.
"""

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from convert.checkpoints import ORACLE, Tensors, read_tensors
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "olmoe": "olmoe", "qwen2_moe": "qwen2moe", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
NAMES = (
    (r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), (r"lm_head", "output"),
    (r"model\.layers\.", "blk."), (r"input_layernorm", "attn_norm"), (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"), (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"), (r"(mlp|block_sparse_moe)\.gate\b", "ffn_gate_inp"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"), (r"mlp\.shared_expert\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mlp\.(\w+)_proj", r"ffn_\1"),
)  # fmt: skip
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}

Encode = Callable[[str, np.ndarray], Type]


def gguf_tensors(fixture: str, per_expert: bool = False) -> Tensors:
    """The tensors of an oracle checkpoint under GGUF's names, q/k permuted where llama.cpp's converter does."""
    folder = ORACLE / fixture
    config = json.loads((folder / "config.json").read_text())
    found: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in read_tensors(folder).items():
        if match := EXPERT.fullmatch(name):
            layer, expert, part = match[1], int(match[2]), PARTS[match[3]]
            if per_expert:
                found[f"blk.{layer}.ffn_{part}.{expert}.weight"] = values
            else:
                experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[expert] = values
            continue
        new = name
        for pattern, replacement in NAMES:
            new = re.sub(pattern, replacement, new)
        if config["model_type"] in ("llama", "mixtral") and re.search(r"attn_[qk]\.", new):
            values = permute(values, config["num_attention_heads" if "attn_q" in new else "num_key_value_heads"])
        found[new] = values[0] if "inp_shexp" in new else values
    return found | {name: np.stack([by_id[e] for e in sorted(by_id)]) for name, by_id in experts.items()}


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + D/2 of each head become neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def metadata_of(fixture: str) -> dict[str, Any]:
    """Keys as llama.cpp's converter writes them, general.architecture first."""
    config = json.loads((ORACLE / fixture / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    rope = config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(theta),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.scaling.type": rope.get("type"),
        "rope.scaling.factor": rope.get("factor"),
        "expert_count": config.get("num_experts", config.get("num_local_experts")),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    metadata = {"general.architecture": arch, "general.name": fixture}
    metadata |= {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return metadata | vocabulary_of(fixture, config["vocab_size"])


def vocabulary_of(fixture: str, vocab_size: int) -> dict[str, Any]:
    tokenizer = json.loads((ORACLE / fixture / "tokenizer.json").read_text())
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    normal, control, unused = 1, 3, 5
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [{**texts, **added}.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        "tokenizer.ggml.token_type": [
            control if i in added else normal if i in texts else unused for i in range(vocab_size)
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 327,
        "tokenizer.ggml.add_bos_token": False,
    }


def floats(name: str, values: np.ndarray) -> Type:
    return Type.F32


def write(path: Path, metadata: Mapping[str, Any], tensors: Tensors, kind: Encode = floats, **writer: Any) -> Path:
    """Write a GGUF file; `kind` chooses the type of every tensor. `writer`: options of GGUFWriter."""
    out = gguf.GGUFWriter(path, metadata["general.architecture"], **writer)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            out.add_bool(key, value)
        elif isinstance(value, int):
            out.add_uint32(key, value)
        elif isinstance(value, float):
            out.add_float32(key, value)
        elif isinstance(value, str):
            out.add_string(key, value)
        else:
            out.add_array(key, value)
    for name, values in tensors.items():
        if values.dtype == np.uint8:  # encoded already
            out.add_tensor(name, values, raw_dtype=Type.MXFP4)
            continue
        chosen = kind(name, values)
        out.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), chosen), raw_dtype=chosen)
    out.write_header_to_file(path)
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def write_fixture(path: Path, fixture: str, kind: Encode = floats, **changes: Any) -> Path:
    """An oracle checkpoint as a GGUF file; `changes` (dots as __) overwrite metadata, None removes a key."""
    metadata = metadata_of(fixture) | {key.replace("__", "."): value for key, value in changes.items()}
    return write(path, {k: v for k, v in metadata.items() if v is not None}, gguf_tensors(fixture), kind)


def tiny(path: Path) -> Path:
    """The smallest file worth spoiling: a few keys, two tensors."""
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    rng = np.random.default_rng(1)
    tensors = {"token_embd.weight": rng.standard_normal((3, 32)), "output_norm.weight": rng.standard_normal(32)}
    return write(path, metadata, tensors)


def tensor_field(data: bytes, name: str, skip: int) -> int:
    """Position in the file of a field of a tensor's entry, `skip` bytes after its name."""
    text = name.encode()
    return data.index(struct.pack("<Q", len(text)) + text) + 8 + len(text) + skip
