"""An MTP head comes along whole, at 8 bits or more, or is left out with a line."""

import json
from pathlib import Path

import numpy as np
import pytest
from containers import MTP_FIXTURE
from convert.checkpoints import copy_fixture, edit_config, read_tensors, stored_expert, stored_matrix, write_tensors
from convert.test_gguf_deepseek import gguf_of

from coli.convert import ConvertOptions, convert
from coli.model.tensors import container_spec
from coli.store.container import Container

HEAD = "model.layers.3."


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copy_fixture(MTP_FIXTURE, tmp_path / "source")


def rewrite(folder: Path, **changed: np.ndarray | None) -> None:
    """Replace tensors, or drop those that are None."""
    tensors = {name: values.astype(np.float32) for name, values in read_tensors(folder).items()} | changed
    write_tensors(folder / "model.safetensors", {n: v for n, v in tensors.items() if v is not None})


@pytest.mark.parametrize(("quant", "head"), [("f32", "f32"), ("q8", "q8"), ("q4", "q8"), (None, "q8")])
def test_the_head_has_eight_bits_or_the_source_s_numbers(source: Path, run, tmp_path: Path, quant, head) -> None:
    run(source, quant=quant)
    manifest = json.loads((tmp_path / "model" / "coli.json").read_text())
    assert manifest["quantization"]["mtp"] == head
    assert manifest["tensors"][HEAD + "eh_proj.weight"]["kind"] == head
    assert {part["kind"] for part in manifest["experts"]["layers"]["3"]["parts"]} == {head}
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in manifest["tensors"] if HEAD in name)
    if quant == "f32":
        tensors = read_tensors(source)
        assert np.array_equal(
            stored_matrix(tmp_path / "model", HEAD + "eh_proj.weight"), tensors[HEAD + "eh_proj.weight"]
        )
        expert = tensors[HEAD + "mlp.experts.5.up_proj.weight"]
        assert np.array_equal(stored_expert(tmp_path / "model", 3, 5, "up"), expert)


def test_announced_but_absent_is_one_line(source: Path, run, tmp_path: Path) -> None:
    rewrite(source, **{name: None for name in read_tensors(source) if name.startswith(HEAD)})
    run(source)
    assert run.notices == ["source: config.json names an MTP head, but its tensors are not here: no MTP drafts"]
    assert container_spec(Container.open(tmp_path / "model")).mtp is None


@pytest.mark.parametrize("lost", ["enorm.weight", "mlp.experts.3.up_proj.weight", "self_attn.kv_b_proj.weight"])
def test_an_incomplete_head_is_left_out_with_a_line(source: Path, run, tmp_path: Path, lost: str) -> None:
    rewrite(source, **{HEAD + lost: None})
    run(source)
    (line,) = run.notices
    assert line.startswith(f"source: its MTP head lacks {HEAD}")
    assert container_spec(Container.open(tmp_path / "model")).mtp is None
    assert Container.open(tmp_path / "model").moe_layers == (1, 2)


def test_a_head_without_copies_of_embedding_and_output_is_complete(source: Path, run, tmp_path: Path) -> None:
    rewrite(source, **{HEAD + name: None for name in ("embed_tokens.weight", "shared_head.head.weight")})
    run(source)
    assert run.notices == []
    assert container_spec(Container.open(tmp_path / "model")).mtp is not None


def test_a_copy_that_differs_is_named(source: Path, run) -> None:
    changed = read_tensors(source)[HEAD + "embed_tokens.weight"] + 1
    rewrite(source, **{HEAD + "embed_tokens.weight": changed})
    run(source)
    assert run.notices == [
        f"source: {HEAD}embed_tokens.weight differs from model.embed_tokens.weight; MTP drafts use the latter"
    ]


def test_of_several_heads_the_first_is_taken(source: Path, run, tmp_path: Path) -> None:
    tensors = read_tensors(source)
    second = {name.replace(".3.", ".4.", 1): values for name, values in tensors.items() if name.startswith(HEAD)}
    rewrite(source, **second)
    edit_config(source, num_nextn_predict_layers=2)
    run(source)
    assert run.notices == []
    assert container_spec(Container.open(tmp_path / "model")).record_layers == (1, 2, 3)


def test_a_gguf_file_gives_the_head_of_the_folder(source: Path, tmp_path: Path) -> None:
    path = gguf_of(source, MTP_FIXTURE, split=False, block_count=4, nextn_predict_layers=1)
    for one, name in ((source, "a"), (path, "b")):
        convert(one, tmp_path / name, ConvertOptions(quant="f32"), lambda line: None)
    first, second = (read_tensors(tmp_path / folder) for folder in "ab")
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    assert container_spec(Container.open(tmp_path / "b")).mtp is not None
