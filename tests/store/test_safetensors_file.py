import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coli.errors import CheckpointError, ReadError
from coli.store.safetensors_file import MAX_HEADER_BYTES, SafetensorsFile, read_header


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def write(path: Path, header: dict[str, Any] | bytes, data_bytes: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_what_the_reference_library_writes_is_accepted(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.zeros((0, 4), np.int64),
        "c": np.ones(3, np.int8),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    with SafetensorsFile(tmp_path / "x.safetensors") as file:
        tensors = file.header.tensors
        assert {name: tensor.shape for name, tensor in tensors.items()} == {"a": (2, 3), "b": (0, 4), "c": (3,)}
        assert file.read(tensors["a"], 4, 8).view(np.float32).tolist() == [1.0, 2.0]


def test_a_file_without_tensors_is_accepted(tmp_path: Path) -> None:
    assert not read_header(write(tmp_path / "x", {"__metadata__": {}}, 0)).tensors


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_header_length_is_capped_before_allocating(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    assert f"header length {length}" in refusal(path)


@pytest.mark.parametrize("size", [0, 5, 7])
def test_files_too_short_for_a_header_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(size))
    assert f"{size} bytes, too short" in refusal(path)


def test_a_header_cut_short_names_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": entry(0, 4)}, 4)
    os.truncate(path, 20)
    assert "header cut short" in refusal(path)
    assert "found 20" in refusal(path)


def test_data_cut_short_names_the_missing_bytes_and_the_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": entry(0, 40), "b": entry(40, 100)}, 100)
    os.truncate(path, path.stat().st_size - 30)
    text = refusal(path)
    assert "30 missing (tensor b is not complete)" in text
    assert "download the file again" in text


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    assert "3 bytes after the last tensor" in refusal(write(tmp_path / "x", {"a": entry(0, 4)}, 7))


@pytest.mark.parametrize(
    ("header", "fragment"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, "tensor b overlaps tensor a"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, "overlaps"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, "tensor b leaves a gap after tensor a"),
        ({"a": entry(4, 12)}, "tensor a leaves a gap after the header"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [8, 4]}}, "tensor a: data_offsets run backwards: 8 to 4"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}, "tensor a: data_offsets must be"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 8]}}, "tensor a: data_offsets must be"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.0]}}, "tensor a: data_offsets must be"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2**64]}}, "tensor a: data_offsets must be"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, "tensor a: shape must be"),
        ({"a": {"dtype": "U8", "shape": [-1, -12], "data_offsets": [0, 12]}}, "tensor a: shape must be"),
        ({"a": {"dtype": "U8", "shape": "12", "data_offsets": [0, 12]}}, "tensor a: shape must be"),
        ({"a": entry(0, 12, [2**40, 2**40])}, "larger than any file"),
        ({"a": entry(0, 12, [2**32, 2**32])}, "is 18446744073709551616 bytes, but data_offsets span 12"),
        ({"a": entry(0, 12, [5])}, "shape [5] of U8 is 5 bytes, but data_offsets span 12"),
        ({"a": entry(0, 12, [12], "F32")}, "shape [12] of F32 is 48 bytes"),
        ({"a": entry(0, 12, dtype="Q2_K")}, "tensor a: unknown dtype 'Q2_K'"),
        ({"a": {"dtype": 3, "shape": [12], "data_offsets": [0, 12]}}, "tensor a: dtype must be a name, found 3"),
        ({"a": {"dtype": "U8", "shape": [12]}}, "tensor a: expected dtype, shape and data_offsets"),
        ({"a": [1, 2]}, "tensor a: expected dtype, shape and data_offsets"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b"[]", "expected a JSON object"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ({"a": entry(0, 1000)}, "988 missing"),
    ],
)
def test_damaged_headers_are_refused_before_any_slice(
    tmp_path: Path, header: dict[str, Any] | bytes, fragment: str
) -> None:
    assert fragment in refusal(write(tmp_path / "x", header, 12))


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")
    assert "a Git LFS pointer" in refusal(path)


@pytest.mark.parametrize("page", ["<!DOCTYPE html>\n<html>", "<html>", "\n<HTML lang='en'>"])
def test_a_web_page_is_recognised(tmp_path: Path, page: str) -> None:
    path = tmp_path / "x"
    path.write_text(page)
    assert "a web page" in refusal(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "absent")
    assert "cannot be read" in refusal(tmp_path)


def test_a_file_cut_after_opening_is_a_read_error_and_never_zeros(tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"a": entry(0, 4096)}, 4096)
    with SafetensorsFile(path) as file:
        os.truncate(path, file.header.data_start + 1000)
        assert file.read(file.header.tensors["a"], 0, 1000).size == 1000
        with pytest.raises(ReadError, match=rf"{path}: ends at byte {file.header.data_start + 1000}, 3096 bytes early"):
            file.read(file.header.tensors["a"], 0, 4096)
