"""What conversion writes, compared with the source through readers that share no code with it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from convert.checkpoints import (
    FIXTURES,
    ORACLE,
    Tensors,
    copy_fixture,
    edit_config,
    read_tensors,
    split_file,
    stored_expert,
    stored_matrix,
    write_tensors,
)
from safetensors import safe_open

from coli.convert import ConvertReport
from coli.model.tensors import container_spec
from coli.store.container import Container
from coli.store.safetensors_file import read_header

Run = Callable[..., ConvertReport]
MIXTRAL = {"block_sparse_moe": "mlp", "w1.weight": "gate_proj.weight", "w3.weight": "up_proj.weight",
           "w2.weight": "down_proj.weight"}  # fmt: skip


def canonical(name: str) -> str:
    for old, new in MIXTRAL.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("fixture", FIXTURES)
def test_float32_keeps_every_weight_exactly(run: Run, tmp_path: Path, fixture: str) -> None:
    source = {canonical(name): tensor for name, tensor in read_tensors(ORACLE / fixture).items()}
    run(ORACLE / fixture)
    stored = read_tensors(tmp_path / "model")
    compared = 0
    for name, tensor in source.items():
        if ".experts." in name:
            pieces = name.split(".")
            found = stored_expert(tmp_path / "model", int(pieces[2]), int(pieces[5]), pieces[6].removesuffix("_proj"))
        elif tensor.ndim == 2:
            found = stored_matrix(tmp_path / "model", name)
        else:
            found = stored[name][: tensor.size]
            assert not stored[name][tensor.size :].any()
        np.testing.assert_array_equal(found, tensor)
        compared += 1
    assert compared == len(source)


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_container_opens_and_fits_its_config(run: Run, tmp_path: Path, fixture: str) -> None:
    report = run(ORACLE / fixture)
    container = Container.open(tmp_path / "model")
    spec = container_spec(container)
    assert container.moe_layers == spec.moe_layers
    assert container.has("lm_head.weight") is not spec.tie_word_embeddings
    embedding = container.matrix("model.embed_tokens.weight")
    assert (embedding.rows, embedding.cols) == (spec.vocab_size, spec.hidden_size)
    assert report.container_bytes == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())


@pytest.mark.parametrize("options", [{}, {"quant": "q8"}, {"quant": None}], ids=["f32", "q8", "default"])
def test_the_reference_library_reads_the_same_tensors(run: Run, tmp_path: Path, options: dict[str, str]) -> None:
    run(ORACLE / "qwen2_moe-sparse-step", **options)
    for path in (tmp_path / "model").glob("*.safetensors"):
        ours = read_tensors(tmp_path / "model")
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                np.testing.assert_array_equal(file.get_tensor(name), ours[name])


@pytest.mark.parametrize("quant", ["f32", "q8", "q4"])
def test_records_are_page_aligned_and_dense_tensors_cache_line_aligned(run: Run, tmp_path: Path, quant: str) -> None:
    run(ORACLE / "mixtral-base", quant=quant)
    container = Container.open(tmp_path / "model")
    for layer_idx in container.moe_layers:
        layout = container.expert_layout(layer_idx)
        assert (layout.offset % 4096, layout.record_bytes % 4096) == (0, 0)
        gate, up, down = (layout.parts[name] for name in ("gate", "up", "down"))
        assert gate.weights_offset % 64 == down.weights_offset % 64 == 0
        assert up.weights_offset == gate.weights_offset + gate.shape.weights_bytes
        if quant != "f32":
            assert gate.scales_offset is not None
            assert up.scales_offset == gate.scales_offset + gate.shape.scales_bytes
    header = read_header(tmp_path / "model" / "dense.safetensors")
    assert header.data_start % 4096 == 0
    for tensor in header.tensors.values():
        assert tensor.start % min(64, tensor.nbytes & -tensor.nbytes) == 0


def test_scales_of_odd_size_do_not_misalign_the_matrices_behind_them(run: Run, tmp_path: Path) -> None:
    run(ORACLE / "llama-bias-sharded", quant="q8")  # 72 x 80: 5 tiles, 3 groups
    header = read_header(tmp_path / "model" / "dense.safetensors")
    odd = [tensor for tensor in header.tensors.values() if tensor.nbytes % 64]
    assert any(tensor.name.endswith(".scales") for tensor in odd)
    for tensor in header.tensors.values():
        if tensor.name.endswith("_proj.weight"):
            assert tensor.start % 64 == 0


def test_tied_embeddings_are_stored_once_even_if_the_source_repeats_them(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("llama-bias-sharded", tmp_path / "source")
    edit_config(source, tie_word_embeddings=True)
    run(source)
    assert not Container.open(tmp_path / "model").has("lm_head.weight")


def test_router_gates_norms_and_biases_stay_float32(run: Run, tmp_path: Path) -> None:
    run(ORACLE / "qwen2_moe-sparse-step", quant="q4")
    tensors = json.loads((tmp_path / "model" / "coli.json").read_text())["tensors"]
    kinds = {name: entry["kind"] for name, entry in tensors.items()}
    assert kinds["model.layers.3.mlp.gate.weight"] == "f32"
    assert kinds["model.layers.3.mlp.shared_expert_gate.weight"] == "f32"
    assert kinds["model.layers.3.input_layernorm.weight"] == "vector"
    assert kinds["model.layers.3.self_attn.q_proj.bias"] == "vector"
    assert kinds["model.layers.3.mlp.shared_expert.up_proj.weight"] == "q4"
    assert kinds["lm_head.weight"] == kinds["model.embed_tokens.weight"] == "q4"


@pytest.mark.parametrize(
    ("options", "dense", "experts"),
    [
        ({"quant": None}, "q8", "q4"),
        ({"quant": "q4"}, "q4", "q4"),
        ({"quant": "f32", "experts": "q8"}, "f32", "q8"),
        ({"quant": None, "dense": "f32"}, "f32", "q4"),
    ],
)
def test_options_choose_the_kinds(run: Run, tmp_path: Path, options: dict[str, str], dense: str, experts: str) -> None:
    run(ORACLE / "olmoe-base", **options)
    manifest = json.loads((tmp_path / "model" / "coli.json").read_text())
    assert (manifest["quantization"]["dense"], manifest["quantization"]["experts"]) == (dense, experts)
    assert manifest["tensors"]["model.layers.0.self_attn.q_proj.weight"]["kind"] == dense
    assert {part["kind"] for part in manifest["experts"]["layers"]["0"]["parts"]} == {experts}


@pytest.mark.parametrize(("quant", "tolerance"), [("q8", 0.007), ("q4", 0.09)])
def test_quantized_weights_are_near_the_source(run: Run, tmp_path: Path, quant: str, tolerance: float) -> None:
    source = read_tensors(ORACLE / "olmoe-base")
    run(ORACLE / "olmoe-base", quant=quant)
    pairs = [
        (source["lm_head.weight"], stored_matrix(tmp_path / "model", "lm_head.weight")),
        (source["model.layers.1.mlp.experts.5.down_proj.weight"], stored_expert(tmp_path / "model", 1, 5, "down")),
        (source["model.layers.1.mlp.experts.7.up_proj.weight"], stored_expert(tmp_path / "model", 1, 7, "up")),
    ]
    for wanted, found in pairs:
        assert np.linalg.norm(found - wanted) < tolerance * np.linalg.norm(wanted)


def test_manifest_digests_and_fingerprint_are_those_of_the_files(run: Run, tmp_path: Path) -> None:
    run(ORACLE / "olmoe-base")
    folder = tmp_path / "model"
    manifest = json.loads((folder / "coli.json").read_text())
    files = {path.name for path in folder.iterdir()} - {"coli.json"}
    assert set(manifest["digests"]) == files
    for name, digest in manifest["digests"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert Container.open(folder).fingerprint == manifest["fingerprint"]


def test_the_fingerprint_follows_config_and_weights(run: Run, tmp_path: Path) -> None:
    run(ORACLE / "olmoe-base", tmp_path / "a")
    run(ORACLE / "olmoe-base", tmp_path / "b", quant="q8")
    source = copy_fixture("olmoe-base", tmp_path / "source")
    edit_config(source, num_experts_per_tok=3)
    run(source, tmp_path / "c")
    assert len({Container.open(tmp_path / name).fingerprint for name in "abc"}) == 3


def test_the_same_input_gives_the_same_bytes_whatever_the_threads(run: Run, tmp_path: Path) -> None:
    for name, threads in (("a", 1), ("b", 2)):
        run(ORACLE / "qwen2_moe-sparse-step", tmp_path / name, quant="q4", threads=threads)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_row_blocks_do_not_show(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(ORACLE / "llama-bias-sharded", tmp_path / "whole", quant="q8")
    monkeypatch.setattr("coli.convert.plan.BLOCK_WEIGHTS", 1)
    run(ORACLE / "llama-bias-sharded", tmp_path / "blocks", quant="q8")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "blocks" / path.name).read_bytes()


def test_experts_are_spread_over_shards_of_whole_layers(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(ORACLE / "mixtral-base", tmp_path / "one")
    monkeypatch.setattr("coli.convert.plan.SHARD_BYTES", 1)
    run(ORACLE / "mixtral-base", tmp_path / "two")
    container = Container.open(tmp_path / "two")
    names = [container.expert_layout(layer_idx).path.name for layer_idx in container.moe_layers]
    assert names == ["experts-00001.safetensors", "experts-00002.safetensors"]
    for layer_idx in container.moe_layers:
        for part in ("gate", "down"):
            one, two = (stored_expert(tmp_path / name, layer_idx, 3, part) for name in ("one", "two"))
            np.testing.assert_array_equal(one, two)


def test_tokenizer_template_and_generation_files_come_along(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("olmoe-base", tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("not needed")
    run(source)
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    for name in names:
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "model" / "README.md").exists()


def test_no_absolute_path_is_stored(run: Run, tmp_path: Path) -> None:
    run(copy_fixture("olmoe-base", tmp_path / "source"))
    assert str(tmp_path) not in (tmp_path / "model" / "coli.json").read_text()


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    from coli.convert import ConvertOptions, convert

    steps: list[tuple[int, int]] = []
    report = convert(
        ORACLE / "olmoe-base", tmp_path / "model", ConvertOptions("f32"), print, lambda *step: steps.append(step)
    )
    done = [step[0] for step in steps]
    assert done == sorted(done)
    assert steps[-1] == (report.source_bytes, report.source_bytes)
    _, data = split_file(ORACLE / "olmoe-base" / "model.safetensors")
    assert report.source_bytes == len(data)


def same_files(one: Path, two: Path) -> None:
    for name in ("dense.safetensors", "experts-00001.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def fuse(tensors: Tensors, layers: range, experts: int, prefix: str, names: tuple[str, str, str]) -> Tensors:
    """Experts as transformers 5 holds them: gate_up_proj (E, 2I, H), down_proj (E, H, I)."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer_idx in layers:
        matrices = [
            [tensors[f"model.layers.{layer_idx}.{prefix}.experts.{i}.{name}.weight"] for i in range(experts)]
            for name in names
        ]
        gate, up, down = (np.stack(matrix) for matrix in matrices)
        fused[f"model.layers.{layer_idx}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        fused[f"model.layers.{layer_idx}.mlp.experts.down_proj"] = down
    return fused


@pytest.mark.parametrize(
    ("fixture", "prefix", "names"),
    [
        ("olmoe-base", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral-base", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_fused_experts_are_the_same_model(
    run: Run, tmp_path: Path, fixture: str, prefix: str, names: tuple[str, str, str]
) -> None:
    source = copy_fixture(fixture, tmp_path / "source")
    fused = fuse(read_tensors(source), range(2), 8, prefix, names)
    if fixture == "mixtral-base":
        fused = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in fused.items()}
    write_tensors(source / "model.safetensors", fused)
    run(ORACLE / fixture, tmp_path / "a")
    run(source, tmp_path / "b")
    same_files(tmp_path / "a", tmp_path / "b")


def test_layers_may_mix_fused_and_separate_experts(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("olmoe-base", tmp_path / "source")
    tensors = read_tensors(source)
    fused = fuse(tensors, range(1), 8, "mlp", ("gate_proj", "up_proj", "down_proj"))
    fused |= {name: tensor for name, tensor in tensors.items() if ".1.mlp.experts." in name}
    write_tensors(source / "model.safetensors", fused)
    run(ORACLE / "olmoe-base", tmp_path / "a")
    run(source, tmp_path / "b")
    same_files(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_prefixes_of_multimodal_checkpoints_are_mapped(run: Run, tmp_path: Path, prefix: str) -> None:
    source = copy_fixture("olmoe-base", tmp_path / "source")
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."
    renamed = {
        name.replace("lm_head.", head) if name.startswith("lm_head") else name.replace("model.", prefix, 1): tensor
        for name, tensor in read_tensors(source).items()
    }
    write_tensors(source / "model.safetensors", renamed)
    run(ORACLE / "olmoe-base", tmp_path / "a")
    run(source, tmp_path / "b")
    same_files(tmp_path / "a", tmp_path / "b")


def test_float16_and_float32_sources_of_equal_values_give_equal_files(run: Run, tmp_path: Path) -> None:
    halves = {name: tensor.astype(np.float16) for name, tensor in read_tensors(ORACLE / "olmoe-base").items()}
    for name, dtype in (("half", np.float16), ("full", np.float32)):
        source = copy_fixture("olmoe-base", tmp_path / name)
        write_tensors(source / "model.safetensors", {key: value.astype(dtype) for key, value in halves.items()})
        run(source, tmp_path / f"{name}-model")
    same_files(tmp_path / "half-model", tmp_path / "full-model")


def test_rotary_buffers_of_old_checkpoints_are_left_out(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("olmoe-base", tmp_path / "source")
    tensors = read_tensors(source)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    write_tensors(source / "model.safetensors", tensors)
    run(source)
    assert not any("inv_freq" in name for name in Container.open(tmp_path / "model").tensor_names())


def test_a_default_taken_for_a_missing_rope_theta_is_said(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("olmoe-base", tmp_path / "source")
    edit_config(source, rope_theta=...)
    run(source)
    assert run.notices == ["config.json has no rope_theta: using rope_theta 10000, the default of olmoe"]  # type: ignore[attr-defined]
