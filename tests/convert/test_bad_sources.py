"""Every broken source is one line of the right class, names file or tensor, and leaves nothing behind."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert.checkpoints import copy_fixture, edit_config, edit_header, read_tensors, split_file, write_tensors

from coli.convert import ConvertReport
from coli.errors import CheckpointError, ColiError, OptionError, UnsupportedModelError
from coli.store.container import Container

Run = Callable[..., ConvertReport]
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return copy_fixture("llama-bias-sharded", tmp_path / "source")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return copy_fixture("olmoe-base", tmp_path / "source")


def refusal(run: Run, source: Path, kind: type[ColiError] = CheckpointError) -> str:
    """The message of the refusal; the destination's folder must be as before and the source untouched."""
    outside = sorted(path.name for path in source.parent.iterdir())
    before = {path.name: path.lstat().st_mtime_ns for path in source.iterdir()} if source.is_dir() else {}
    with pytest.raises(ColiError) as raised:
        run(source)
    assert type(raised.value) is kind
    text = str(raised.value)
    assert "\n" not in text
    assert len(text) < 500
    assert sorted(path.name for path in source.parent.iterdir()) == outside
    if source.is_dir():
        assert {path.name: path.lstat().st_mtime_ns for path in source.iterdir()} == before
    return text


# shards


def test_a_missing_shard_is_named(run: Run, sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    text = refusal(run, sharded)
    assert f"1 of 3 weight files missing: {SHARDS[1]}" in text


def test_every_missing_shard_is_listed(run: Run, sharded: Path) -> None:
    for name in SHARDS:
        (sharded / name).unlink()
    assert f"3 of 3 weight files missing: {', '.join(SHARDS)}" in refusal(run, sharded)


def test_a_truncated_shard_is_named_with_the_missing_bytes(run: Run, sharded: Path) -> None:
    path = sharded / SHARDS[2]
    os.truncate(path, path.stat().st_size - 1000)
    text = refusal(run, sharded)
    assert SHARDS[2] in text
    assert "1000 missing" in text


def test_shards_without_an_index_load_when_the_numbering_is_complete(run: Run, sharded: Path, tmp_path: Path) -> None:
    run(sharded, tmp_path / "with")
    (sharded / INDEX).unlink()
    run(sharded, tmp_path / "without")
    for name in ("dense.safetensors", "config.json"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


def test_one_shard_numbered_one_of_one_loads(run: Run, single: Path, tmp_path: Path) -> None:
    (single / "model.safetensors").rename(single / "model-00001-of-00001.safetensors")
    run(single)
    assert Container.open(tmp_path / "model").moe_layers == (0, 1)


def test_shards_without_an_index_are_checked_by_their_numbers(run: Run, sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / SHARDS[1]).unlink()
    assert f"1 of 3 weight files missing: {SHARDS[1]}" in refusal(run, sharded)


def test_shards_of_two_runs_without_an_index_are_refused(run: Run, sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / SHARDS[0]).rename(sharded / "model-00001-of-00002.safetensors")
    assert "which of these belong together" in refusal(run, sharded)


def test_absurd_shard_counts_are_refused(run: Run, single: Path) -> None:
    (single / "model.safetensors").rename(single / "model-00000001-of-99999999.safetensors")
    assert "99999999 shards are more than any model has" in refusal(run, single)


def test_consolidated_files_beside_the_shards_are_ignored(run: Run, sharded: Path, tmp_path: Path) -> None:
    (sharded / "consolidated.00.safetensors").write_bytes(b"junk")
    (sharded / INDEX).unlink()
    run(sharded)
    assert (tmp_path / "model").is_dir()


def test_consolidated_files_alone_are_refused(run: Run, single: Path) -> None:
    (single / "model.safetensors").rename(single / "consolidated.00.safetensors")
    assert "only consolidated" in refusal(run, single)


@pytest.mark.parametrize(
    ("weight_map", "fragment"),
    [
        (None, "weight_map: expected an object"),
        ({}, "weight_map: expected an object"),
        ([1], "weight_map: expected an object"),
        ({"lm_head.weight": "../model.safetensors"}, "'../model.safetensors' is no safetensors file name"),
        ({"lm_head.weight": 3}, "3 is no safetensors file name"),
        ({"lm_head.weight": SHARDS[1]}, f"tensor lm_head.weight is not in {SHARDS[1]}"),
        ({"lm_head.weight": SHARDS[0], "extra": SHARDS[0]}, f"tensor extra is not in {SHARDS[0]}"),
    ],
)
def test_a_wrong_index_is_refused(run: Run, sharded: Path, weight_map: Any, fragment: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    text = refusal(run, sharded)
    assert INDEX in text
    assert fragment in text


def test_a_tensor_in_two_shards_is_refused(run: Run, sharded: Path) -> None:
    (sharded / INDEX).unlink()
    tensors = read_tensors(sharded)
    write_tensors(sharded / SHARDS[2], {name: tensors[name] for name in ("lm_head.weight", "model.norm.weight")})
    assert f"{SHARDS[2]}: tensor lm_head.weight is also in {SHARDS[0]}" in refusal(run, sharded)


# downloads


def test_a_hub_cache_snapshot_is_read_through_its_links(run: Run, single: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some-one--tiny--moe"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(single.iterdir()):
        path.rename(repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    run(snapshot)
    manifest = json.loads((tmp_path / "model" / "coli.json").read_text())
    assert manifest["source"] == {"format": "huggingface", "name": "some-one/tiny--moe"}
    assert not any(path.is_symlink() for path in (tmp_path / "model").iterdir())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_dangling_link_is_an_unfinished_download(run: Run, single: Path, tmp_path: Path, name: str) -> None:
    snapshot = tmp_path / "models--some-one--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    single.rename(snapshot)
    (snapshot / name).unlink()
    (snapshot / name).symlink_to("../../blobs/gone")
    text = refusal(run, snapshot)
    assert f"{name}: link to a missing file, download unfinished: run hf download some-one/tiny" in text


def test_a_dangling_shard_of_an_index_is_an_unfinished_download(run: Run, sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    (sharded / SHARDS[1]).symlink_to("gone")
    assert "download unfinished: download it again" in refusal(run, sharded)


def test_the_folder_above_the_snapshots_is_refused_with_the_snapshot(run: Run, single: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--some-one--tiny"
    (repository / "snapshots").mkdir(parents=True)
    single.rename(repository / "snapshots" / "abc")
    assert f"give a snapshot: {repository / 'snapshots' / 'abc'}" in refusal(run, repository, OptionError)


@pytest.mark.parametrize("suffix", [".incomplete", ".part", ".aria2"])
def test_markers_of_running_downloads_are_heeded(run: Run, single: Path, suffix: str) -> None:
    (single / f"model.safetensors{suffix}").write_bytes(b"")
    assert "download of model.safetensors unfinished" in refusal(run, single)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_git_lfs_pointers_are_recognised(run: Run, single: Path, name: str) -> None:
    (single / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    text = refusal(run, single)
    assert name in text
    assert "a Git LFS pointer" in text


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_web_pages_are_recognised(run: Run, single: Path, name: str) -> None:
    (single / name).write_text("<!doctype html>\n<title>Log in</title>")
    text = refusal(run, single)
    assert name in text
    assert "a web page" in text


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_truncated_side_files_are_named(run: Run, single: Path, name: str) -> None:
    path = single / name
    path.write_bytes(path.read_bytes()[:50])
    assert f"{path}: not valid JSON" in refusal(run, single)


# what is not a Hugging Face folder


def test_a_folder_without_config_is_refused(run: Run, single: Path) -> None:
    (single / "config.json").unlink()
    assert "config.json: missing" in refusal(run, single)


def test_a_folder_without_weights_is_refused(run: Run, single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert "no weights: expected model.safetensors" in refusal(run, single)


def test_pickles_are_named_and_not_read(run: Run, single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    assert "only PyTorch pickle files" in refusal(run, single)


def test_a_path_that_is_no_folder_is_refused(run: Run, single: Path) -> None:
    assert "no such folder" in refusal(run, single.parent / "absent", OptionError)
    assert "a file" in refusal(run, single / "model.safetensors", OptionError)


def test_a_container_is_not_converted_again(run: Run, single: Path, tmp_path: Path) -> None:
    run(single)
    with pytest.raises(OptionError, match="already a coli model"):
        run(tmp_path / "model", tmp_path / "again")


# headers


@pytest.mark.parametrize(
    ("offsets", "fragment"),
    [
        ([0, 84480], "overlaps"),
        ([84480, 0], "run backwards: 84480 to 0"),
        ([10**9, 10**9 + 84480], "leaves a gap"),
        ([-84480, 0], "data_offsets must be"),
    ],
)
def test_spoilt_offsets_are_refused(run: Run, single: Path, offsets: list[int], fragment: str) -> None:
    header, _ = split_file(single / "model.safetensors")
    assert header["model.embed_tokens.weight"]["data_offsets"] != offsets
    edit_header(
        single / "model.safetensors",
        lambda header: header["model.embed_tokens.weight"].update(data_offsets=offsets),
    )
    text = refusal(run, single)
    assert "model.safetensors: tensor" in text
    assert fragment in text


def test_unknown_dtypes_are_refused_by_name(run: Run, single: Path) -> None:
    edit_header(single / "model.safetensors", lambda header: header["lm_head.weight"].update(dtype="INT2"))
    assert "tensor lm_head.weight: unknown dtype 'INT2'" in refusal(run, single)


def test_a_header_length_near_two_to_the_64_is_refused(run: Run, single: Path) -> None:
    (single / "model.safetensors").write_bytes(struct.pack("<Q", 2**64 - 8) + b"{}")
    assert "header length 18446744073709551608" in refusal(run, single)


def test_known_but_unsupported_dtypes_are_refused_by_name(run: Run, single: Path) -> None:
    tensors = read_tensors(single)
    tensors["model.norm.weight"] = np.ones(64, np.int64)
    write_tensors(single / "model.safetensors", tensors)
    text = refusal(run, single, UnsupportedModelError)
    assert "tensor model.norm.weight: dtype I64 is not supported; supported: F32, F16, BF16" in text


# tensors


def change(source: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = {name: tensor.copy() for name, tensor in read_tensors(source).items()}
    edit(tensors)
    write_tensors(source / "model.safetensors", tensors)


def test_missing_tensors_are_counted_and_the_first_is_named(run: Run, single: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in ("model.norm.weight", "model.layers.1.mlp.experts.3.up_proj.weight", "lm_head.weight"):
            del tensors[name]

    change(single, drop)
    assert "3 tensors missing, first lm_head.weight" in refusal(run, single)


def test_left_over_tensors_are_counted_and_the_first_is_named(run: Run, single: Path) -> None:
    change(single, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}))
    text = refusal(run, single)
    assert "1 tensor not part of a olmoe with this config.json, first model.layers.0.self_attn.q_proj.bias" in text


def test_a_configured_shared_expert_that_is_absent_is_named(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("qwen2_moe-sparse-step", tmp_path / "source")
    tensors = {name: tensor for name, tensor in read_tensors(source).items() if "shared_expert" not in name}
    write_tensors(source / "model.safetensors", tensors)
    assert "4 tensors missing, first model.layers.3.mlp.shared_expert.down_proj.weight" in refusal(run, source)


def test_wrong_shapes_are_named_with_both_shapes(run: Run, single: Path) -> None:
    edit_config(single, vocab_size=331)
    text = refusal(run, single)
    assert "tensor model.embed_tokens.weight" in text
    assert "shape [330, 64], but config.json makes it [331, 64]" in text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.experts.7.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_weights_that_are_no_numbers_are_refused_by_tensor(run: Run, single: Path, name: str, value: float) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].reshape(-1)[-1] = value

    change(single, spoil)
    text = refusal(run, single)
    assert f"tensor {name} in {single / 'model.safetensors'}: {np.float32(value)} in row" in text


@pytest.mark.parametrize("quant", ["q4", "q8"])
def test_weights_beyond_the_scales_are_refused_by_tensor(run: Run, single: Path, tmp_path: Path, quant: str) -> None:
    change(single, lambda tensors: tensors["lm_head.weight"].reshape(-1).__setitem__(5, 1e30))
    with pytest.raises(CheckpointError, match=f"lm_head.weight.*1e\\+30 are too large for {quant}: convert with f32"):
        run(single, quant=quant)
    assert not list(tmp_path.glob("*model*"))


def test_absurd_counts_in_the_config_stay_cheap(run: Run, single: Path) -> None:
    gates = {f"model.layers.{layer_idx}.mlp.gate.weight": np.zeros((4096, 64), np.float32) for layer_idx in range(2)}
    change(single, lambda tensors: tensors.update(gates))
    edit_config(single, num_hidden_layers=1024, num_experts=4096)
    assert "more than 10000 tensors missing, first" in refusal(run, single)


# config


@pytest.mark.parametrize(
    ("changes", "kind", "fragment"),
    [
        ({"model_type": "falcon"}, UnsupportedModelError, "model_type 'falcon' is not supported"),
        ({"model_type": ...}, CheckpointError, "key 'model_type' is missing"),
        ({"rope_scaling": {"type": "dynamic"}}, UnsupportedModelError, "rope_type 'dynamic' is not supported"),
        ({"hidden_size": "wide"}, CheckpointError, "hidden_size: expected a whole number, found 'wide'"),
        ({"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok: expected 1..8, found 9"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "quantization_config 'awq'"),
        ({"quantization_config": "fp8"}, CheckpointError, "quantization_config: expected an object, found 'fp8'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [10**400]}},
            CheckpointError,
            "short_factor: expected a",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1}},
            CheckpointError,
            "rope_scaling.original_max_position_embeddings: expected at least 2, found 1",
        ),
    ],
)
def test_bad_configs_are_refused_with_the_key(
    run: Run, single: Path, changes: dict[str, Any], kind: type[ColiError], fragment: str
) -> None:
    edit_config(single, **changes)
    text = refusal(run, single, kind)
    assert text.startswith(str(single / "config.json"))
    assert fragment in text


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ('{"model_type": "olmoe", "model_type": "llama"}', "key 'model_type' appears twice"),
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"a": "' + "x" * (9 << 20) + '"}', "larger than 8388608 bytes"),
    ],
)
def test_config_files_that_are_no_config_are_refused(run: Run, single: Path, text: str, fragment: str) -> None:
    (single / "config.json").write_text(text)
    assert fragment in refusal(run, single)


def test_a_gguf_file_that_is_only_a_beginning_is_refused(run: Run, single: Path) -> None:
    path = single / "model.gguf"
    path.write_bytes(b"GGUF")
    assert f"{path}: header cut short" in refusal(run, path)


@pytest.mark.parametrize("option", ["quant", "dense", "experts"])
def test_unknown_quantizations_are_refused_by_name(run: Run, single: Path, option: str) -> None:
    with pytest.raises(OptionError, match=r"unknown quantization 'int3'; allowed: f32, q4, q8"):
        run(single, **{option: "int3"})
