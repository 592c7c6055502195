"""What broke other engines, asked of the families with latent attention and of GLM-4.5: cases A*, whose tests
docs/latent_attention.md lists."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from containers import MTP_FIXTURE, container, expected
from convert.checkpoints import copy_fixture, read_tensors, write_tensors
from convert.test_container_contents import fuse
from forward_runs import Runner

from coli.convert import ConvertOptions, convert
from coli.errors import CheckpointError, ColiError, UnsupportedModelError
from coli.model.families import spec_from_config
from coli.model.kv_cache import kv_bytes_per_token

FIXTURE = {
    "deepseek_v2": "deepseek_v2-lite-group",
    "deepseek_v3": "deepseek_v3-yarn",
    "glm4_moe": "glm4_moe-base",
    "glm_moe_dsa": "glm_moe_dsa-sparse",
}
ORACLE = Path(__file__).parent.parent / "oracle"
UNKNOWN = [
    ("topk_method", "surprise"), ("scoring_func", "surprise"), ("moe_layer_freq", 2), ("hidden_act", "gelu"),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}), ("rope_parameters", {"rope_type": "mrope"}),
    ("quantization_config", {"quant_method": "gptq"}),
]  # fmt: skip
IMPOSSIBLE = [("num_experts_per_tok", 0), ("num_experts_per_tok", 99), ("n_routed_experts", 10**9), ("n_group", 5),
              ("topk_group", 99), ("first_k_dense_replace", -1), ("n_shared_experts", "one")]  # fmt: skip


def refusal(kind: type[ColiError], family: str, key: str, value: Any) -> str:
    config = json.loads((ORACLE / FIXTURE[family] / "config.json").read_text())
    if key.startswith("rope_"):
        config = {name: old for name, old in config.items() if not name.startswith("rope_")}
    with pytest.raises(kind) as raised:
        spec_from_config({**config, key: value}, Path("config.json"))
    return str(raised.value)


@pytest.mark.parametrize("family", FIXTURE)
def test_what_is_unknown_or_impossible_is_refused_by_name(family: str) -> None:
    """A09, A18, A30, A32"""
    for key, value in UNKNOWN:
        text = refusal(UnsupportedModelError, family, key, value)
        assert key in text
        assert str(next(iter(value.values())) if isinstance(value, dict) else value) in text
    for key, value in IMPOSSIBLE:
        assert key in refusal(CheckpointError, family, key, value)


def spoilt(name: str, folder: Path, change: Any) -> str:
    source = copy_fixture(name, folder / "source")
    tensors = {key: values.astype(np.float32) for key, values in read_tensors(source).items()}
    change(tensors)
    write_tensors(source / "model.safetensors", tensors)
    with pytest.raises(ColiError) as raised:
        convert(source, folder / "model", ConvertOptions(quant="f32"), lambda line: None)
    assert not (folder / "model").exists()
    return str(raised.value)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm_moe_dsa"])
def test_a_router_bias_that_is_no_number_is_refused_by_its_name(family: str, tmp_path: Path) -> None:
    """A13b"""
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    text = spoilt(FIXTURE[family], tmp_path, lambda tensors: tensors[name].__setitem__(3, np.nan))
    assert f"tensor {name}" in text


@pytest.mark.parametrize("family", FIXTURE)
def test_a_configured_shared_expert_that_is_absent_is_named(family: str, tmp_path: Path) -> None:
    """A28"""
    name = "model.layers.1.mlp.shared_experts.up_proj.weight"
    text = spoilt(FIXTURE[family], tmp_path, lambda tensors: tensors.pop(name))
    assert "1 tensor missing" in text
    assert "model.layers.1.mlp.shared_expert" in text


def test_a_fused_trunk_may_have_a_head_that_is_not(tmp_path: Path) -> None:
    """A26"""
    source, tensors = copy_fixture(MTP_FIXTURE, tmp_path / "source"), read_tensors(ORACLE / MTP_FIXTURE)
    fused = fuse(tensors, range(1, 3), 8, "mlp", ("gate_proj", "up_proj", "down_proj"))
    fused |= {name: values for name, values in tensors.items() if ".3.mlp.experts." in name}
    write_tensors(source / "model.safetensors", {name: values.astype(np.float32) for name, values in fused.items()})
    convert(source, tmp_path / "model", ConvertOptions(quant="f32"), lambda line: None)
    for file in container(MTP_FIXTURE, "f32").glob("*.safetensors"):
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v2-lite-group", "deepseek_v3-yarn"])
def test_positions_far_behind_yarn_s_original_length_attend_alike(name: str) -> None:
    """A15: attention knows distances only, so that the whole text moved by 5,000 positions has the same logits."""
    runner, want = Runner(container(name, "f32")), expected(name)
    ids = np.array(want["prompt_ids"] + want["greedy_ids"])
    rows = np.arange(len(ids))
    near, far = (
        runner.model.forward(runner.cache(), ids, rows + start, None, rows, prefill=True).copy() for start in (0, 5000)
    )
    assert np.abs(far - near).max() < 2e-3
    assert not np.array_equal(far, near)


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm_moe_dsa"])
def test_the_cache_takes_what_is_planned_for_a_token(family: str, head: int) -> None:
    """1152 bytes a layer in float16 where the latent has 512 and the rotated part 64 numbers."""
    config = json.loads((ORACLE / FIXTURE[family] / "config.json").read_text())
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_nextn_predict_layers": head}
    spec = spec_from_config({**config, **sizes}, Path("config.json"))
    layers = spec.num_hidden_layers + (spec.mtp is not None)
    each = 1152 + (256 if family == "glm_moe_dsa" else 0)
    assert kv_bytes_per_token(spec, "f16") == layers * each
    assert kv_bytes_per_token(spec, "f32") == 2 * layers * each


@pytest.mark.parametrize("name", [MTP_FIXTURE, "deepseek_v2-lite-group", "glm_moe_dsa-sparse"])
def test_a_cache_in_memory_has_the_planned_size(name: str) -> None:
    runner = Runner(container(name, "q4"), kv="f16")
    cache, spec = runner.cache(64), runner.spec
    nbytes = cache.nbytes
    if spec.mtp is not None:
        nbytes += nbytes // spec.num_hidden_layers  # the head's rows are one layer more, in a cache of their own
    assert nbytes == 64 * kv_bytes_per_token(spec, "f16")
