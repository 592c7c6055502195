"""GGUF files of DeepSeek and GLM, laid out as llama.cpp's converter does, give the folder's weights and spec."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert.checkpoints import copy_fixture, edit_config, join_file, read_tensors
from convert.gguf_models import vocabulary_of, write

from coli.convert import ConvertOptions, convert
from coli.errors import UnsupportedModelError
from coli.model.families import spec_from_config

NAMES = (
    (r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), (r"^lm_head", "output"),
    (r"model\.layers\.", "blk."), (r"input_layernorm", "attn_norm"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"self_attn\.indexer\.wq_b", "indexer.attn_q_b"), (r"self_attn\.indexer\.wk", "indexer.attn_k"),
    (r"self_attn\.indexer\.k_norm", "indexer.k_norm"), (r"self_attn\.indexer\.weights_proj", "indexer.proj"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"), (r"self_attn\.(kv|q)_a_layernorm", r"attn_\1_a_norm"),
    (r"self_attn\.(\w+)_proj", r"attn_\1"), (r"attn_o\.", "attn_output."), (r"mlp\.gate\.", "ffn_gate_inp."),
    (r"(blk\.\d+\.)(eh_proj|enorm|hnorm|embed_tokens)", r"\1nextn.\2"),
    (r"(blk\.\d+\.)shared_head\.(\w+)", r"\1nextn.shared_head_\2"),
    (r"mlp\.shared_experts\.(\w+)_proj", r"ffn_\1_shexp"), (r"mlp\.(\w+)_proj", r"ffn_\1"),
)  # fmt: skip
ARCHITECTURES = {
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm_moe_dsa": "glm-dsa", "glm4_moe": "glm4moe",
}  # fmt: skip
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.weight")


def gguf_of(folder: Path, fixture: str, *, split: bool, **changes: Any) -> Path:
    """The folder as a GGUF file; split: kv_b_proj as attn_k_b and attn_v_b. `changes`: other metadata."""
    config = json.loads((folder / "config.json").read_text())
    arch, heads = ARCHITECTURES[config["model_type"]], config["num_attention_heads"]
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in sorted(
        read_tensors(folder).items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]
    ):
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", []).append(values)
            continue
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        if arch == "glm4moe":
            name = name.replace("post_attention_layernorm", "post_attention_norm")
        tensors[name.replace("post_attention_layernorm", "ffn_norm")] = values
    tensors |= {name: np.stack(values) for name, values in experts.items()}
    if split:
        for name in [name for name in tensors if "attn_kv_b" in name]:
            parts = tensors.pop(name).reshape(heads, -1, config["kv_lora_rank"])
            nope = config["qk_nope_head_dim"]
            tensors[name.replace("kv_b", "k_b")] = np.ascontiguousarray(parts[:, :nope].transpose(0, 2, 1))
            tensors[name.replace("kv_b", "v_b")] = np.ascontiguousarray(parts[:, nope:])
    scaling, rope = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    keys = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config.get("rope_theta") or rope["rope_theta"]),
        "rope.scaling.type": scaling.get("type"), "rope.scaling.factor": scaling and float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling.get("original_max_position_embeddings"),
        "rope.scaling.yarn_log_multiplier": scaling and 0.1 * scaling["mscale_all_dim"],
        "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": config["routed_scaling_factor"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
        "leading_dense_block_count": config["first_k_dense_replace"],
    }  # fmt: skip
    if arch == "glm4moe":
        dim = config["head_dim"]
        keys |= {"attention.key_length": dim, "attention.value_length": dim, "rope.dimension_count": dim // 2}
    else:
        rank, rotary, nope = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
        suffix = "_mla" if split else ""
        keys |= {"attention.key_length": rank + rotary, "attention.value_length": rank} if split else {}
        keys |= {
            f"attention.key_length{suffix}": nope + rotary,
            f"attention.value_length{suffix}": config["v_head_dim"],
        }
        keys |= {"attention.q_lora_rank": config["q_lora_rank"], "attention.kv_lora_rank": rank}
        keys |= {"rope.dimension_count": rotary}
    if arch == "glm-dsa":
        for key, ours in (("head_count", "index_n_heads"), ("key_length", "index_head_dim"), ("top_k", "index_topk")):
            keys[f"attention.indexer.{key}"] = config[ours]
    metadata = {"general.architecture": arch, "general.name": fixture}
    metadata |= {f"{arch}.{key}": value for key, value in (keys | changes).items() if value not in (None, {})}
    metadata |= vocabulary_of(fixture, config["vocab_size"])
    return write(folder.with_suffix(".gguf"), metadata, tensors)


def check_same(folder: Path, file: Path) -> None:
    """Both convert to the same weights, and their configurations to the same spec but for what is assumed."""
    specs, weights = [], []
    for source in (folder, file):
        target = source.with_name(f"{source.name}-coli")
        convert(source, target, ConvertOptions(quant="f32"), lambda line: None)
        found = spec_from_config(json.loads((target / "config.json").read_text()), target)
        specs.append((found.layers, found.latent, found.scoring_func, found.group_score, found.n_group,
                      found.topk_group, found.norm_topk_prob, found.routed_scaling_factor,
                      found.rope.rotary_dim, found.rope.interleaved,
                      found.qkv_bias, found.shared_expert_intermediate_size))  # fmt: skip
        assert found.attention_scale == pytest.approx(spec_from_config(
            json.loads((folder / "config.json").read_text()), folder).attention_scale)  # fmt: skip
        assert found.rope.attention_factor == pytest.approx(1.0)
        weights.append({path.name: path.read_bytes() for path in target.glob("*.safetensors")})
    assert specs[0] == specs[1]
    assert weights[0] == weights[1]


FIXTURES = ("deepseek_v2-lite-group", "deepseek_v3-yarn", "glm_moe_dsa-sparse", "glm4_moe-base")


@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_gguf_file_is_the_folder_it_was_made_from(tmp_path: Path, fixture: str) -> None:
    folder = copy_fixture(fixture, tmp_path / "model")
    check_same(folder, gguf_of(folder, fixture, split=False))


def test_matrices_per_head_are_those_of_kv_b_proj(tmp_path: Path) -> None:
    folder = copy_fixture("deepseek_v3-yarn", tmp_path / "model")
    edit_config(folder, kv_lora_rank=16)
    cut: dict[str, np.ndarray] = {}
    for name, values in read_tensors(folder).items():
        if "kv_a_proj" in name:
            values = values[8:]
        elif "kv_a_layernorm" in name:
            values = values[:16]
        elif "kv_b_proj" in name:
            values = values[:, :16]
        cut[name] = np.ascontiguousarray(values, np.float32)
    at, header = 0, {}
    for name, values in cut.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    join_file(folder / "model.safetensors", header, b"".join(values.tobytes() for values in cut.values()))
    check_same(folder, gguf_of(folder, "deepseek_v3-yarn", split=True))


@pytest.mark.parametrize(("key", "value"), [("expert_gating_func", 3), ("attention.sliding_window", 16)])
def test_what_these_families_do_not_follow_is_named(tmp_path: Path, key: str, value: int) -> None:
    folder = copy_fixture("deepseek_v3-yarn", tmp_path / "model")
    file = gguf_of(folder, "deepseek_v3-yarn", split=False, **{key: value})
    if key == "expert_gating_func":
        with pytest.raises(UnsupportedModelError, match=key):
            convert(file, tmp_path / "out", ConvertOptions(quant="f32"), lambda line: None)
    else:
        notices: list[str] = []
        convert(file, tmp_path / "out", ConvertOptions(quant="f32"), notices.append)
        assert any(key in line for line in notices)
