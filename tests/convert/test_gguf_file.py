"""GGUF headers are checked before anything is believed: every spoilt file is one line, and nothing else is raised."""

import contextlib
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from convert.gguf_models import floats, tensor_field, tiny, write
from gguf import GGMLQuantizationType as Type

from coli.convert.gguf_file import GgufFile, read_header
from coli.errors import CheckpointError

EMBEDDING = "token_embd.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny(tmp_path / "m.gguf")


def refuse(path: Path, *expected: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    for part in expected:
        assert part in message
    return message


def overwrite(path: Path, position: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[position : position + len(data)] = data
    path.write_bytes(raw)


def test_values_and_rows_are_those_that_were_written(path: Path):
    rng = np.random.default_rng(1)
    expected = rng.standard_normal((3, 32)).astype(np.float32)
    with GgufFile(path) as file:
        assert file.header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "ab"]
        assert file.header.metadata["llama.rope.freq_base"] == 10000.0
        assert file.header.metadata["tokenizer.ggml.add_bos_token"] is True
        info = file.header.tensors[EMBEDDING]
        assert info.shape == (3, 32)
        assert np.array_equal(file.read_rows(info, 1, 3).view("<f4"), expected[1:])


def test_a_float32_value_is_its_shortest_decimal(tmp_path: Path):
    path = write(tmp_path / "m.gguf", {"general.architecture": "llama", "llama.eps": 1e-5}, {})
    assert read_header(path).metadata["llama.eps"] == 1e-5


def test_version_2_is_read(path: Path):
    overwrite(path, 4, struct.pack("<I", 2))
    assert read_header(path).version == 2


def test_wrong_magic(path: Path):
    overwrite(path, 0, b"GGUX")
    refuse(path, "not a GGUF file", "GGUX")


def test_a_file_from_before_gguf_is_called_that(path: Path):
    overwrite(path, 0, b"tjgg")
    refuse(path, "before GGUF")


@pytest.mark.parametrize("version", [0, 1, 4, 77])
def test_wrong_version(path: Path, version: int):
    overwrite(path, 4, struct.pack("<I", version))
    refuse(path, f"version {version}", "expected 2 or 3")


def test_big_endian_is_refused_by_name(tmp_path: Path):
    import gguf

    path = write(tmp_path / "m.gguf", {"general.architecture": "llama"}, {}, endianess=gguf.GGUFEndian.BIG)
    refuse(path, "big-endian", "version 3")


@pytest.mark.parametrize("text", [b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\noid"])
def test_what_downloads_leave_instead_is_recognised(path: Path, text: bytes):
    path.write_bytes(text)
    refuse(path)


def test_an_empty_file(path: Path):
    path.write_bytes(b"")
    refuse(path, "cut short")


def test_a_missing_file(tmp_path: Path):
    refuse(tmp_path / "none.gguf", "cannot be read")


def test_every_truncation_is_one_line(path: Path):
    data = path.read_bytes()
    for size in range(len(data) - 1):
        path.write_bytes(data[:size])
        refuse(path, "cut short" if size != 0 else "")


def test_a_cut_tensor_is_named_with_the_missing_bytes(path: Path):
    path.write_bytes(path.read_bytes()[:-16])
    refuse(path, "16 missing", "output_norm.weight")


@pytest.mark.parametrize(("position", "what"), [(8, "tensor count"), (16, "key count"), (24, "length of key 0")])
@pytest.mark.parametrize("value", [2**63, 2**40, 2**64 - 1])
def test_counts_are_capped_before_anything_is_allocated(path: Path, position: int, what: str, value: int):
    overwrite(path, position, struct.pack("<Q", value))
    refuse(path)


@pytest.mark.parametrize("value", [2**63, 2**33, 10**6])
def test_array_lengths_are_held_against_the_file(path: Path, value: int):
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4 + 4
    overwrite(path, at, struct.pack("<Q", value))
    refuse(path, "tokenizer.ggml.tokens")


@pytest.mark.parametrize("value", [13, 99, 2**31])
def test_an_unknown_value_type_is_named(path: Path, value: int):
    at = path.read_bytes().index(b"llama.block_count") + len(b"llama.block_count")
    overwrite(path, at, struct.pack("<I", value))
    refuse(path, "llama.block_count", f"unknown value type {value}")


def test_an_array_of_arrays_is_refused(path: Path):
    at = path.read_bytes().index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4
    overwrite(path, at, struct.pack("<I", 9))
    refuse(path, "array of arrays")


def test_a_key_that_appears_twice_is_refused(path: Path):
    path.write_bytes(path.read_bytes().replace(b"llama.rope.freq_base", b"general.architecture"))
    refuse(path, "'general.architecture' appears twice")


@pytest.mark.parametrize("name", [b"llama.block_count", EMBEDDING.encode()])
def test_a_name_that_would_break_the_line_is_refused(path: Path, name: bytes):
    path.write_bytes(path.read_bytes().replace(name, name[:-2] + b"\n\r"))
    refuse(path, "not printable")


@pytest.mark.parametrize("name", [b"\xff\xfe\xfd", b"\xc3\x28\x41"])
def test_a_name_that_is_not_utf_8_is_refused(path: Path, name: bytes):
    overwrite(path, path.read_bytes().index(b"llama.block_count"), name)
    refuse(path, "not UTF-8")


@pytest.mark.parametrize("kind", [31, 36, 60, 2**31])
def test_an_unknown_tensor_type_is_named(path: Path, kind: int):
    overwrite(path, tensor_field(path.read_bytes(), EMBEDDING, 4 + 16), struct.pack("<I", kind))
    refuse(path, EMBEDDING, f"unknown tensor type {kind}")


@pytest.mark.parametrize("offset", [32 * 1000, 2**62])
def test_an_offset_beyond_the_file_is_cut_short(path: Path, offset: int):
    overwrite(path, tensor_field(path.read_bytes(), EMBEDDING, 4 + 16 + 4), struct.pack("<Q", offset))
    refuse(path, "cut short", EMBEDDING)


def test_an_offset_that_is_not_aligned_is_refused(path: Path):
    overwrite(path, tensor_field(path.read_bytes(), EMBEDDING, 4 + 16 + 4), struct.pack("<Q", 8))
    refuse(path, EMBEDDING, "no multiple of 32")


def test_tensors_that_overlap_are_refused(path: Path):
    overwrite(path, tensor_field(path.read_bytes(), "output_norm.weight", 4 + 8 + 4), struct.pack("<Q", 32))
    refuse(path, "overlaps")


@pytest.mark.parametrize("dimensions", [0, 5, 2**31])
def test_dimensions_out_of_range_are_refused(path: Path, dimensions: int):
    overwrite(path, tensor_field(path.read_bytes(), EMBEDDING, 0), struct.pack("<I", dimensions))
    refuse(path, EMBEDDING)


@pytest.mark.parametrize("sizes", [(0, 3), (2**63, 3), (2**40, 2**40), (32, 0)])
def test_shapes_that_are_empty_or_overflow_are_refused(path: Path, sizes: tuple[int, int]):
    overwrite(path, tensor_field(path.read_bytes(), EMBEDDING, 4), struct.pack("<2Q", *sizes))
    refuse(path, EMBEDDING)


def test_rows_that_do_not_divide_into_blocks_are_refused(path: Path):
    overwrite(path, tensor_field(path.read_bytes(), EMBEDDING, 4), struct.pack("<2QI", 33, 2, Type.Q4_0))
    refuse(path, EMBEDDING, "33", "Q4_0")


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31])
def test_an_alignment_that_cannot_be_is_refused(tmp_path: Path, alignment: int):
    metadata = {"general.architecture": "llama", "general.alignment": alignment}
    refuse(write(tmp_path / "m.gguf", metadata, {}), "general.alignment", str(alignment))


def test_another_alignment_is_followed(tmp_path: Path):
    import gguf

    path = tmp_path / "m.gguf"
    values = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name in ("a", "b"):
        writer.add_tensor(name, values)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        assert file.header.tensors["b"].start % 256 == 0
        assert np.array_equal(file.read_rows(file.header.tensors["b"], 0, 3).view("<f4"), values)


def test_random_damage_never_raises_anything_else(path: Path):
    data = path.read_bytes()
    rng = random.Random(7)
    header = data.index(b"output_norm.weight") + 50
    for _ in range(1500):
        raw = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(header)] = rng.choice((0, 1, 0xFF, 0x80, rng.randrange(256)))
        path.write_bytes(raw)
        with contextlib.suppress(CheckpointError):
            read_header(path)


def test_nothing_is_a_whole_file(tmp_path: Path):
    assert read_header(write(tmp_path / "m.gguf", {"general.architecture": "llama"}, {}, floats)).tensors == {}
