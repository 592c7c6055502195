"""Write a training state as a Hugging Face folder: python scripts/demo_export.py FOLDER/state.pt TARGET.

Weights are written as the values their quantized forms stand for (experts q4, other matrices q8, in float32), so that
the default conversion loses nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from demo_model import Shape, Weights, quantized, views
from demo_tokenizer import END, write_tokenizer_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

MAX_POSITIONS = 2048


def config(shape: Shape, end_id: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "decoder_sparse_step": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.moe_intermediate_size * shape.num_experts_per_tok,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "output_router_logits": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def checkpoint_tensors(weights: Weights) -> dict[str, Tensor]:
    """Our stacked experts -> one tensor per expert and matrix, with the checkpoint's names."""
    tensors = {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up"):
            gate, up = weight.chunk(2, 1)
            stacked = {"gate_proj": gate, "up_proj": up}
        elif name.endswith("experts.down"):
            stacked = {"down_proj": weight}
        else:
            tensors[f"{name}.weight"] = weight.clone()
            continue
        prefix = name.rpartition(".")[0]
        for part, experts in stacked.items():
            for index, matrix in enumerate(experts):
                tensors[f"{prefix}.{index}.{part}.weight"] = matrix.clone()
    return tensors


def load_checkpoint(folder: Path) -> tuple[Shape, Weights]:
    """The inverse of `export`, for evaluation."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: fields[name] for name in Shape.__dataclass_fields__})
    tensors = load_file(folder / "model.safetensors")
    weights = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{index}.{part}_proj.weight"] for index in range(shape.num_experts)])
            for part in ("gate", "up", "down")
        )
        weights |= {f"{prefix}.gate_up": torch.cat((gate, up), 1), f"{prefix}.down": down}
    return shape, weights


def export(state_path: Path, target: Path) -> None:
    state = torch.load(state_path, weights_only=True)
    shape = Shape(**state["shape"])
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(state_path.parent / "tokenizer.json", target)
    write_tokenizer_config(target)
    end_id = Tokenizer.from_file(str(target / "tokenizer.json")).token_to_id(END)
    for name, fields in (
        ("config.json", config(shape, end_id)),
        ("generation_config.json", {"bos_token_id": None, "eos_token_id": end_id, "pad_token_id": end_id}),
    ):
        (target / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tensors = checkpoint_tensors(quantized(views(state["flat"], shape)))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    print(f"{target}: step {state['step']}, {state['cpu_seconds']:.0f} CPU s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    export(options.state, options.target)
