#!/usr/bin/env python3
"""Tiny models of the latent-attention families with unusual options, and what transformers computes for each.

    python scripts/make_latent_variants.py OUT TOKENIZER_FOLDER [PATTERN...]
    python scripts/make_latent_variants.py OUT TOKENIZER_FOLDER --long 5000     yarn over a long text, one model

Writes one Hugging Face folder per variant with an expected.json (prompt ids, 32 greedy ids, the smallest gap of the two
best logits) in the layout of tests/oracle, so that whatever checks those checks these. Needs torch and transformers;
TOKENIZER_FOLDER gives tokenizer files for 330 ids (any folder of tests/oracle whose config says so).
"""

import argparse
import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, NGEN, WANTED_GAP, WANTED_MARGIN = 330, 32, 0.03, 1e-4
PROMPT = [46, 77, 66, 68, 325, 282, 82, 263, 267, 295, 259, 265, 303]
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
    "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 327, "eos_token_id": 327,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
# many heads: where all of a few are negative the score is exactly 0, and torch leaves open which of equal ones it takes
INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CLASSES = {
    "v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, LATENT | {"topk_method": "greedy"}),
    "v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, LATENT),
    "glm4": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM,
             {"head_dim": 16, "num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "dsa": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM, LATENT | INDEXER),
}  # fmt: skip
# name -> (class, other config values, how it is stored)
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "v2-no-q-lora": ("v2", {"q_lora_rank": None}, ""),
    "v2-groups-three-shared": ("v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                                      "n_shared_experts": 3}, ""),
    "v3-no-q-lora": ("v3", {"q_lora_rank": None}, ""),
    "v3-halves": ("v3", {"rope_interleave": False}, ""),
    "v3-no-renormalization": ("v3", {"norm_topk_prob": False}, ""),
    "v3-one-group": ("v3", {"n_group": 1, "topk_group": 1}, ""),
    "v3-two-shared": ("v3", {"n_shared_experts": 2}, ""),
    "v3-attention-bias": ("v3", {"attention_bias": True}, ""),
    "v3-other-mscale": ("v3", {"rope_parameters": YARN | {"mscale": 0.7}}, ""),
    "v3-other-mscale-old": ("v3", {"rope_parameters": YARN | {"mscale": 0.7}}, "old"),
    "v3-sharded-bf16": ("v3", {"tie_word_embeddings": True}, "sharded"),
    "v3-fp8-ragged": ("v3", {"hidden_size": 160, "intermediate_size": 200, "moe_intermediate_size": 144,
                             "kv_lora_rank": 136}, "fp8"),
    "v3-odd-widths": ("v3", {"hidden_size": 72, "moe_intermediate_size": 20, "kv_lora_rank": 40, "v_head_dim": 12,
                             "qk_nope_head_dim": 20, "intermediate_size": 80, "num_attention_heads": 3,
                             "num_key_value_heads": 3}, ""),
    "v3-top-1": ("v3", {"num_experts_per_tok": 1, "first_k_dense_replace": 0}, ""),
    "glm4-no-norm-old": ("glm4", {"use_qk_norm": False}, "old"),
    "glm4-biases-groups": ("glm4", {"use_qk_norm": True, "attention_bias": True, "n_group": 4, "topk_group": 2}, ""),
    "dsa-topk-above-the-length": ("dsa", {"index_topk": 64}, ""),
    "dsa-topk-below-the-length": ("dsa", {"index_topk": 5}, ""),
    "dsa-shared": ("dsa", {"num_hidden_layers": 5,
                           "indexer_types": ["full", "shared", "shared", "full", "shared"]}, ""),
    "dsa-one-group-bf16": ("dsa", {"n_group": 1, "topk_group": 1, "n_shared_experts": 2}, "sharded"),
}  # fmt: skip


def build(name: str, seed: int, most: int = 4096) -> Any:
    """The variant's model in float32 with random weights."""
    kind, changes, stored = VARIANTS[name]
    config_class, model_class, own = CLASSES[kind]
    values = COMMON | own | {"rope_parameters": dict(ROPE)} | changes | {"max_position_embeddings": most}
    if kind == "glm4":
        values["rope_parameters"] = values["rope_parameters"] | {"partial_rotary_factor": 0.5}
    if kind == "dsa":
        layers = values["num_hidden_layers"]
        values["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
    config = config_class(**values)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    state = model.state_dict()
    with torch.no_grad():
        for key, tensor in state.items():
            if key.endswith("norm.weight") or "layernorm" in key:
                tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
            elif tensor.ndim == 1:
                tensor.copy_(0.1 * torch.randn_like(tensor))
            else:
                scale = 1.0 if "embed" in key else (4.0 if "lm_head" in key else 1.2) / tensor.shape[-1] ** 0.5
                tensor.copy_(scale * torch.randn_like(tensor))
            if stored:
                tensor.copy_(tensor.bfloat16().float())
            if stored == "fp8" and is_fp8(key, tensor):
                tensor.copy_(dequantized(*quantized(tensor)))
    return model


def is_fp8(key: str, tensor: torch.Tensor) -> bool:
    """As DeepSeek's checkpoints: the layers' matrices but the router."""
    return tensor.ndim >= 2 and "layers." in key and "norm" not in key and not key.endswith("gate.weight")


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., rows, cols) -> e4m3 numbers and scales of 128 x 128 blocks, ragged at the ends."""
    rows, cols = weight.shape[-2:]
    down, across = -(-rows // 128), -(-cols // 128)
    padded = torch.zeros(*weight.shape[:-2], 128 * down, 128 * across)
    padded[..., :rows, :cols] = weight
    blocks = padded.reshape(*weight.shape[:-2], down, 128, across, 128)
    scales = blocks.abs().amax(dim=(-3, -1)).clamp(min=1e-8) / 448
    numbers = (blocks / scales[..., :, None, :, None]).reshape(padded.shape)[..., :rows, :cols]
    return numbers.to(torch.float8_e4m3fn), scales


def dequantized(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, cols = numbers.shape[-2:]
    spread = scales.repeat_interleave(128, dim=-2).repeat_interleave(128, dim=-1)[..., :rows, :cols]
    return numbers.float() * spread


def smallest_margin(model: Any, ids: list[int]) -> float:
    """Of all choices of experts and positions the least by which one was made: below rounding it is nobody's fault."""
    margins, topk = [float("inf")], torch.Tensor.topk

    def watched(values: torch.Tensor, k: int, *args: Any, **options: Any) -> Any:
        if k < values.shape[-1]:
            best = topk(values.float(), k + 1, dim=-1).values
            gap = (best[..., -2] - best[..., -1])[best[..., -1] > -1e30]
            margins.append(float(gap.min()) if gap.numel() else float("inf"))
        return topk(values, k, *args, **options)

    torch.Tensor.topk = watched  # type: ignore[method-assign,assignment]
    try:
        with torch.no_grad():
            model(torch.tensor([ids]), use_cache=False)
    finally:
        torch.Tensor.topk = topk  # type: ignore[method-assign]
    return min(margins)


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], float]:
    """`count` greedy ids behind `ids` and the smallest gap between the two best logits."""
    ids, smallest = list(ids), float("inf")
    with torch.no_grad():
        for _ in range(count):
            best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
            smallest = min(smallest, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
            if smallest < WANTED_GAP:
                break
    return ids[-count:], smallest


def save(model: Any, folder: Path, stored: str, tokenizer: Path) -> None:
    dtype = torch.bfloat16 if stored == "sharded" else torch.float32
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB" if stored == "sharded" else "1GB")
    path, config_path = folder / "model.safetensors", folder / "config.json"
    config = json.loads(config_path.read_text())
    if stored == "fp8":
        tensors = {}
        for key, tensor in load_file(path).items():
            if is_fp8(key, tensor):
                tensors[key], tensors[f"{key}_scale_inv"] = quantized(tensor)
            else:
                tensors[key] = tensor
        save_file(tensors, path, {"format": "pt"})
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if stored == "old":
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
        config["torch_dtype"] = config.pop("dtype", "float32")
    config_path.write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, folder / file)


def make(name: str, out: Path, tokenizer: Path) -> None:
    for seed in range(200):
        model = build(name, seed)
        ids, gap = greedy(model, PROMPT, NGEN)
        if gap > WANTED_GAP and len(set(ids)) > 4 and smallest_margin(model, PROMPT + ids) > WANTED_MARGIN:
            break
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    save(model, folder, VARIANTS[name][2], tokenizer)
    expected = {"name": name, "exposes": str(VARIANTS[name]), "seed": seed, "transformers": transformers.__version__,
                "prompt_ids": PROMPT, "greedy_ids": ids, "min_gap": round(gap, 6)}  # fmt: skip
    (folder / "expected.json").write_text(json.dumps(expected))
    print(f"{name}: seed {seed}, smallest gap {gap:.3f}", flush=True)


def make_long(length: int, out: Path, tokenizer: Path) -> None:
    """One yarn model and the logits of some positions of a long text."""
    name = "v3-other-mscale"
    model = build(name, 1, most=2 * length)
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(2)).tolist()
    positions = [31, 32, 1000, length // 2, length - 2, length - 1]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    folder = out / f"long-{length}"
    shutil.rmtree(folder, ignore_errors=True)
    save(model, folder, "", tokenizer)
    expected = {"ids": ids, "positions": positions, "logits": logits[positions].tolist(),
                "argmax": logits.argmax(-1).tolist()}  # fmt: skip
    (folder / "long.json").write_text(json.dumps(expected))
    print(f"{folder}: {length} ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--long", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.long:
        make_long(arguments.long, arguments.out, arguments.tokenizer)
        return
    for name in VARIANTS:
        if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.patterns or ["*"]):
            make(name, arguments.out, arguments.tokenizer)


if __name__ == "__main__":
    main()
