"""GGUF files of Granite, Ernie and Phi-MoE, laid out as llama.cpp's converter does, are the folders they came from."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import expected
from convert.checkpoints import ORACLE, Tensors, copy_fixture, edit_config, read_tensors
from convert.gguf_models import floats, permute, vocabulary_of, write
from forward_runs import Runner
from gguf import GGMLQuantizationType as Type

from coli.convert import ConvertOptions, convert
from coli.errors import CheckpointError, ColiError, UnsupportedModelError
from coli.model.tensors import container_spec
from coli.store.container import Container

FIXTURES = {"granitemoe": "granitemoe-base", "ernie4_5-moe": "ernie4_5_moe-base", "phimoe": "phimoe-longrope"}
NAMES = (
    (r"model\.embed_tokens", "token_embd"), (r"model\.norm", "output_norm"), (r"^lm_head", "output"),
    (r"model\.layers\.", "blk."), (r"input_layernorm", "attn_norm"), (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"), (r"self_attn\.o_proj", "attn_output"),
    (r"mlp\.moe_statics\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"block_sparse_moe\.router\.layer", "ffn_gate_inp"), (r"(mlp|block_sparse_moe)\.gate\.", "ffn_gate_inp."),
    (r"block_sparse_moe\.output_linear", "ffn_down_exps"),
    (r"mlp\.shared_experts\.(\w+)_proj", r"ffn_\1_shexp"), (r"mlp\.(\w+)_proj", r"ffn_\1"),
)  # fmt: skip
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def tensors_of(folder: Path, arch: str) -> Tensors:
    """The folder's tensors in llama.cpp's names and order of rows: Granite's q and k permuted, its experts taken apart,
    those of the others stacked."""
    config = json.loads((folder / "config.json").read_text())
    found: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in read_tensors(folder).items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.ffn_{PARTS[match[3]]}_exps.weight", {})[int(match[2])] = values
            continue
        if "input_linear" in name:
            gate, up = np.split(values, 2, axis=1)
            block = f"blk.{name.split('.')[2]}.ffn_"
            found |= {f"{block}gate_exps.weight": gate, f"{block}up_exps.weight": up}
            continue
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        if arch == "granitemoe" and re.search(r"attn_[qk]\.", name):
            values = permute(values, config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"])
        found[name] = values
    found |= {name: np.stack([by_id[i] for i in sorted(by_id)]) for name, by_id in experts.items()}
    if arch == "phimoe":
        for which in ("long", "short"):
            found[f"rope_factors_{which}.weight"] = np.array(config["rope_parameters"][f"{which}_factor"], np.float32)
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


def metadata_of(folder: Path, arch: str) -> dict[str, Any]:
    """Keys as llama.cpp's converter writes them."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    heads = config["num_attention_heads"]
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    if arch == "ernie4_5-moe":
        keys |= {
            "expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config["moe_num_shared_experts"],
            "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
            "attention.key_length": config.get("head_dim"), "attention.value_length": config.get("head_dim"),
        }  # fmt: skip
    else:
        keys |= {
            "expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"],
            "rope.dimension_count": config["hidden_size"] // heads,
        }  # fmt: skip
    if arch == "granitemoe":
        keys |= {
            "attention.scale": config["attention_multiplier"], "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"], "logit_scale": config["logits_scaling"],
            "vocab_size": config["vocab_size"],
        }  # fmt: skip
    if arch == "phimoe":
        longest, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
        keys |= {
            "rope.scaling.original_context_length": original, "attention.sliding_window": 0,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(longest / original) / math.log(original)),
        }  # fmt: skip
    metadata = {"general.architecture": arch, "general.name": folder.name}
    metadata |= {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return metadata | vocabulary_of(FIXTURES[arch], config["vocab_size"])


def folder_of(arch: str, target: Path) -> Path:
    """The oracle's folder; phimoe's without what a GGUF file cannot hold: factors of cos and sin of its own, longer
    decimals than float32, a jitter that is not the published models'."""
    folder = copy_fixture(FIXTURES[arch], target)
    if arch == "phimoe":
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        del rope["short_mscale"], rope["long_mscale"]
        for which in ("short_factor", "long_factor"):
            rope[which] = [round(value, 4) for value in rope[which]]
        edit_config(folder, rope_parameters=rope, router_jitter_noise=0.01)
    return folder


def file_of(folder: Path, arch: str, kind: Any = floats, **changes: Any) -> Path:
    """`changes` (dots as __) overwrite metadata, None removes a key."""
    metadata = metadata_of(folder, arch) | {f"{arch}.{key.replace('__', '.')}": v for key, v in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write(folder.with_suffix(".gguf"), metadata, tensors_of(folder, arch), kind)


def converted(source: Path, quant: str | None = "f32") -> Container:
    target = source.with_name(f"{source.name}-coli")
    convert(source, target, ConvertOptions(quant=quant), lambda line: None)
    return Container.open(target)


def weights(container: Container) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in container.path.glob("*.safetensors")}


@pytest.mark.parametrize("arch", FIXTURES)
def test_weights_and_spec_are_those_of_the_folder(arch: str, tmp_path: Path) -> None:
    folder = folder_of(arch, tmp_path / "model")
    ours, theirs = converted(file_of(folder, arch)), converted(folder)
    assert weights(ours) == weights(theirs)
    found, wanted = container_spec(ours), container_spec(theirs)
    if arch == "phimoe":  # the file's factor is a float32
        assert found.rope.attention_factor == pytest.approx(wanted.rope.attention_factor, rel=1e-7)
        assert found.rope.long_attention_factor == found.rope.attention_factor
    for name in found.__dataclass_fields__:
        if name != "rope":
            assert getattr(found, name) == getattr(wanted, name), name
    assert (found.rope.short_factor, found.rope.long_factor) == (wanted.rope.short_factor, wanted.rope.long_factor)
    assert (found.rope.theta, found.rope.interleaved, found.rope.original_max_position_embeddings) == (
        wanted.rope.theta, wanted.rope.interleaved, wanted.rope.original_max_position_embeddings,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ["granitemoe", "ernie4_5-moe"])
def test_the_file_gives_the_reference_s_ids_and_logits(arch: str, tmp_path: Path) -> None:
    folder = folder_of(arch, tmp_path / "model")
    want = expected(FIXTURES[arch])
    ids = want["prompt_ids"] + want["greedy_ids"]
    logits = Runner(converted(file_of(folder, arch)).path).chunks(ids, [len(ids)])
    first = len(want["prompt_ids"]) - 1
    assert logits[first:-1].argmax(axis=1).tolist() == want["greedy_ids"]


def test_longrope_of_a_file_turns_as_the_folder_s(tmp_path: Path) -> None:
    folder = folder_of("phimoe", tmp_path / "model")
    ids = expected(FIXTURES["phimoe"])["long"]["ids"]
    found, wanted = (
        Runner(converted(path).path).chunks(ids, [len(ids)]) for path in (file_of(folder, "phimoe"), folder)
    )
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("arch", FIXTURES)
def test_half_precision_files_give_the_folder_s_ids(arch: str, tmp_path: Path) -> None:
    """Rounded weights: logits differ by as much, what is chosen does not."""
    folder = folder_of(arch, tmp_path / "model")
    ids = expected(FIXTURES[arch])["prompt_ids"]

    def half(name: str, values: np.ndarray) -> Type:
        return Type.F16 if values.ndim > 1 and "_inp" not in name else Type.F32

    found, wanted = (
        Runner(converted(path).path).chunks(ids, [len(ids)])[-1] for path in (file_of(folder, arch, half), folder)
    )
    assert found.argmax() == wanted.argmax()
    assert 0 < np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_multipliers_that_are_absent_are_llama_cpp_s(tmp_path: Path) -> None:
    folder = folder_of("granitemoe", tmp_path / "model")
    absent = dict.fromkeys(("attention__scale", "embedding_scale", "residual_scale"))
    spec = container_spec(converted(file_of(folder, "granitemoe", **absent)))
    assert spec.attention_scale == pytest.approx(16**-0.5)
    assert (spec.embedding_multiplier, spec.residual_multiplier, spec.logits_scaling) == (1.0, 1.0, 1.6)


def test_sparse_layers_end_where_the_tensors_do(tmp_path: Path) -> None:
    """moe_layer_end_index has no key: a last layer that is dense shows in its tensors."""
    folder = copy_fixture(FIXTURES["ernie4_5-moe"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    tensors = tensors_of(folder, "ernie4_5-moe")
    rng = np.random.default_rng(2)
    for name in [name for name in tensors if name.startswith(f"blk.{last}.") and re.search("exp|_inp", name)]:
        del tensors[name]
    wide, hidden = config["intermediate_size"], config["hidden_size"]
    for part, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
        tensors[f"blk.{last}.ffn_{part}.weight"] = rng.standard_normal(shape).astype(np.float32)
    file = write(tmp_path / "m.gguf", metadata_of(folder, "ernie4_5-moe"), tensors)
    layers = container_spec(converted(file)).layers
    assert [layer.is_moe for layer in layers] == [
        i >= config["moe_layer_start_index"] and i < last for i in range(last + 1)
    ]


@pytest.mark.parametrize("shape", [(1, -1), (-1,)])
def test_the_correction_bias_may_have_an_axis_too_many(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = folder_of("ernie4_5-moe", tmp_path / "model")
    tensors = tensors_of(folder, "ernie4_5-moe")
    for name in [name for name in tensors if "exp_probs_b" in name]:
        tensors[name] = tensors[name].reshape(shape)
    file = write(tmp_path / "m.gguf", metadata_of(folder, "ernie4_5-moe"), tensors)
    assert weights(converted(file)) == weights(converted(folder))


@pytest.mark.parametrize(
    ("arch", "changes", "error", "words"),
    [
        ("granitemoe", {"expert_shared_feed_forward_length": 32}, UnsupportedModelError, "granitemoeshared"),
        ("granitemoe", {"rope__scaling__finetuned": False}, UnsupportedModelError, "rope.scaling.finetuned"),
        ("granitemoe", {"expert_gating_func": 2}, UnsupportedModelError, "expert_gating_func"),
        ("granitemoe", {"expert_count": None}, CheckpointError, "granitemoe.expert_count is missing"),
        ("ernie4_5-moe", {"embedding_scale": 2.0}, UnsupportedModelError, "ernie4_5-moe.embedding_scale"),
        ("ernie4_5-moe", {"expert_shared_count": 5}, CheckpointError, "shexp"),
        ("phimoe", {"expert_used_count": 3}, UnsupportedModelError, "num_experts_per_tok"),
        ("phimoe", {"logit_scale": 2.0}, UnsupportedModelError, "phimoe.logit_scale"),
    ],
)  # fmt: skip
def test_what_a_file_asks_for_and_coli_cannot_is_named(
    arch: str, changes: dict[str, Any], error: type[ColiError], words: str, tmp_path: Path
) -> None:
    refuse(file_of(folder_of(arch, tmp_path / "model"), arch, **changes), error, words)


@pytest.mark.parametrize("missing", ["long", "short"])
def test_factors_come_in_pairs(missing: str, tmp_path: Path) -> None:
    folder = folder_of("phimoe", tmp_path / "model")
    tensors = tensors_of(folder, "phimoe")
    del tensors[f"rope_factors_{missing}.weight"]
    file = write(tmp_path / "m.gguf", metadata_of(folder, "phimoe"), tensors)
    refuse(file, CheckpointError, f"rope_factors_{missing}.weight is missing")


def test_factors_of_another_architecture_are_refused(tmp_path: Path) -> None:
    folder = folder_of("granitemoe", tmp_path / "model")
    tensors = tensors_of(folder, "granitemoe") | {"rope_factors_long.weight": np.ones(8, np.float32)}
    file = write(tmp_path / "m.gguf", metadata_of(folder, "granitemoe"), tensors)
    refuse(file, CheckpointError, "rope_factors_long.weight")


@pytest.mark.parametrize("arch", ["llama4", "granitehybrid", "phi3", "ernie4_5", "gemma3", "deepseek4"])
def test_neighbours_are_refused_by_name(arch: str, tmp_path: Path) -> None:
    folder = ORACLE / FIXTURES["granitemoe"]
    metadata = metadata_of(folder, "granitemoe") | {"general.architecture": arch}
    refuse(write(tmp_path / "m.gguf", metadata, {"token_embd.weight": np.ones((330, 64))}), UnsupportedModelError, arch)


def refuse(file: Path, error: type[ColiError], words: str) -> None:
    with pytest.raises(error) as caught:
        convert(file, file.with_name("no"), ConvertOptions(quant="f32"), lambda line: None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not file.with_name("no").exists()
