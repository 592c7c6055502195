import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli.convert import ConvertOptions, convert
from coli.errors import CheckpointError, ColiError, NotConvertedError, OptionError, ReadError
from coli.model.tensors import container_spec
from coli.store.container import Container
from coli.store.layout import Kind

ORACLE = Path(__file__).parent.parent / "oracle"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("container") / "model"
    convert(ORACLE / "olmoe-base", folder, ConvertOptions("q8"), print)
    return folder


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "model")


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refusal(path: Path, kind: type[ColiError] = CheckpointError) -> str:
    with pytest.raises(ColiError) as raised:
        container_spec(Container.open(path))
    assert type(raised.value) is kind
    text = str(raised.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


def test_matrices_and_vectors_have_the_packed_shapes(pristine: Path) -> None:
    container = Container.open(pristine)
    head = container.matrix("lm_head.weight")
    assert (head.kind, head.rows, head.cols, head.tiles, head.groups) == (Kind.Q8, 330, 64, 21, 2)
    assert (head.weights.shape, head.weights.dtype) == ((21, 2, 512), np.uint8)
    assert head.scales is not None
    assert (head.scales.shape, head.scales.dtype) == ((21, 2, 16), np.float16)
    router = container.matrix("model.layers.0.mlp.gate.weight")
    assert (router.kind, router.weights.shape, router.scales) == (Kind.F32, (1, 64, 16), None)
    assert container.vector("model.norm.weight").shape == (64,)
    assert not container.has("model.layers.0.self_attn.q_proj.bias")


def test_views_cannot_be_written(pristine: Path) -> None:
    weights = Container.open(pristine).matrix("lm_head.weight").weights
    assert not weights.flags.writeable


def test_tensor_names_and_arrays_cover_the_dense_file(pristine: Path) -> None:
    container = Container.open(pristine)
    names = container.tensor_names()
    assert len(names) == len(set(names))
    assert "lm_head.weight.scales" in names
    header_bytes = 8 + int.from_bytes((pristine / "dense.safetensors").read_bytes()[:8], "little")
    total = sum(container.array(name).nbytes for name in names)
    assert header_bytes + total == (pristine / "dense.safetensors").stat().st_size


def test_tensors_are_read_as_they_are_mapped(pristine: Path) -> None:
    container = Container.open(pristine)
    with container.reading() as read:
        for name in container.tensor_names():
            mapped = container.array(name).reshape(-1).view(np.uint8)
            target = np.empty(mapped.nbytes, np.uint8)
            read(name, target)
            assert np.array_equal(target, mapped)


def test_a_file_cut_after_it_was_opened_is_named(model: Path) -> None:
    container = Container.open(model)
    last = container.tensor_names()[-1]
    target = np.empty(container.array(last).nbytes, np.uint8)
    dense = model / "dense.safetensors"
    os.truncate(dense, dense.stat().st_size - 1)
    with (
        container.reading() as read,
        pytest.raises(ReadError, match=rf"dense.safetensors: ends within tensor {last}: "),
    ):
        read(last, target)


def test_kinds_are_the_numbers_of_the_kernels() -> None:
    from coli.kernels import matmul

    assert (Kind.F32, Kind.Q8, Kind.Q4) == (matmul.KIND_F32, matmul.KIND_Q8, matmul.KIND_Q4)


def test_layers_without_experts_have_no_layout(pristine: Path) -> None:
    container = Container.open(pristine)
    assert container.expert_layout(1).num_experts == 8
    with pytest.raises(KeyError):
        container.expert_layout(2)


# other things than containers


def test_a_hugging_face_folder_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    shutil.copytree(ORACLE / "olmoe-base", folder)
    text = refusal(folder, NotConvertedError)
    assert text.endswith(f"type: coli convert '{folder}' '{folder}-coli'")
    assert NotConvertedError.exit_code == 2


def test_a_gguf_file_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert refusal(path, NotConvertedError).endswith(f"type: coli convert {path} {tmp_path}/model-coli")


def test_what_is_no_model_at_all_is_refused(tmp_path: Path) -> None:
    assert "no such model folder" in refusal(tmp_path / "absent", OptionError)
    (tmp_path / "empty").mkdir()
    assert "not a coli model" in refusal(tmp_path / "empty", OptionError)
    (tmp_path / "file").write_text("")
    assert "a file; expected the folder" in refusal(tmp_path / "file", OptionError)


# damage


def layer(data: dict[str, Any]) -> dict[str, Any]:
    """The first layer's entry of a manifest."""
    return data["experts"]["layers"]["0"]


@pytest.mark.parametrize("name", ["dense.safetensors", "experts-00001.safetensors"])
def test_files_cut_short_are_named_with_the_missing_bytes(model: Path, name: str) -> None:
    os.truncate(model / name, (model / name).stat().st_size - 4096)
    text = refusal(model)
    assert name in text
    assert "4096 missing" in text


@pytest.mark.parametrize("name", ["dense.safetensors", "experts-00001.safetensors", "config.json"])
def test_missing_files_are_named(model: Path, name: str) -> None:
    (model / name).unlink()
    assert f"{name}: cannot be read: No such file" in refusal(model)


def test_a_newer_format_is_refused(model: Path) -> None:
    edit(model / "coli.json", lambda data: data.update(format_version=99))
    assert "format_version 99, this version of coli reads 1" in refusal(model)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda data: data.pop("tensors"), "missing 'tensors'"),
        (lambda data: data.update(tensors=[1]), "damaged"),
        (lambda data: data["tensors"]["lm_head.weight"].update(kind="q2"), "lm_head.weight: unknown kind 'q2'"),
        (lambda data: data["tensors"]["lm_head.weight"].update(rows="330"), "lm_head.weight: rows is '330'"),
        (lambda data: data["tensors"]["lm_head.weight"].update(cols=-1), "lm_head.weight: cols is -1"),
        (lambda data: data["experts"].update(num_experts=None), "num_experts is None"),
        (lambda data: data["experts"]["layers"].update(x={}), "damaged"),
        (lambda data: data["experts"]["layers"]["0"].update(file="../other"), "'../other' is not a plain file name"),
        (lambda data: data["experts"]["layers"]["0"]["parts"][0].update(weights=-64), "gate: offsets are [-64,"),
        (lambda data: data["experts"]["layers"]["0"]["parts"][0].update(scales=7), "gate: offsets are"),
        (lambda data: data.update(digests=None), "damaged"),
    ],
)
def test_a_damaged_manifest_is_refused(model: Path, change: Callable[[dict[str, Any]], Any], fragment: str) -> None:
    edit(model / "coli.json", change)
    text = refusal(model)
    assert text.startswith(str(model / "coli.json"))
    assert fragment in text


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda data: data["tensors"].pop("lm_head.weight"), "tensor lm_head.weight is not in coli.json"),
        (lambda data: data["tensors"].update({"extra": {"kind": "vector", "rows": 3}}), "tensor extra is missing"),
        (
            lambda data: data["tensors"]["lm_head.weight"].update(rows=2000),
            "tensor lm_head.weight: expected U8 [125, 2, 512], found U8 [21, 2, 512]",
        ),
        (lambda data: data["tensors"]["lm_head.weight"].update(rows=331), "needs [330, 64], found [331, 64]"),
        (lambda data: data["experts"].update(num_experts=9), "tensor layers.0.experts: expected U8 [9, 8192]"),
        (lambda data: layer(data).update(record_bytes=4096), "lie elsewhere than expected"),
        (lambda data: layer(data)["parts"].pop(), "expected parts gate, up, down, found gate, up"),
        (lambda data: layer(data)["parts"].reverse(), "expected parts gate, up, down, found down, up, gate"),
        (lambda data: layer(data)["parts"][2].pop("scales"), "lie elsewhere than expected"),
        (lambda data: layer(data)["parts"][2].update(weights=8160), "lie elsewhere than expected"),
        (lambda data: layer(data)["parts"][0].update(kind="f32"), "lie elsewhere than expected"),
        (lambda data: data["experts"]["layers"].pop("1"), "needs 8 experts in 2 layers, found 8 in 1"),
        (lambda data: layer(data)["parts"][0].update(rows=17), "experts.gate: config.json needs [24, 64], found [17"),
    ],
)
def test_a_manifest_that_does_not_fit_the_files_is_refused(
    model: Path, change: Callable[[dict[str, Any]], Any], fragment: str
) -> None:
    edit(model / "coli.json", change)
    assert fragment in refusal(model)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"vocab_size": 331}, "tensor model.embed_tokens.weight: config.json needs [331, 64], found [330, 64]"),
        ({"num_experts": 9}, "tensor model.layers.0.mlp.gate.weight: config.json needs [9, 64]"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2"),
        ({"tie_word_embeddings": True}, "tensor lm_head.weight does not belong to a olmoe"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(model: Path, change: dict[str, Any], fragment: str) -> None:
    edit(model / "config.json", lambda data: data.update(change))
    assert fragment in refusal(model)


def test_a_harmless_change_of_the_config_changes_the_fingerprint(model: Path) -> None:
    before = Container.open(model).fingerprint
    edit(model / "config.json", lambda data: data.update(rope_theta=20000.0))
    assert Container.open(model).fingerprint != before
