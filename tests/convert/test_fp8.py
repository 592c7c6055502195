"""FP8 checkpoints give the very container of the float32 checkpoint with the same numbers; ragged blocks included."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert.checkpoints import copy_fixture, edit_config, edit_header, join_file, split_file

from coli.convert import ConvertOptions, convert
from coli.errors import CheckpointError, ColiError


def value(byte: int) -> float:
    """OCP 8-bit floating point, E4M3."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


FINITE = [byte for byte in range(256) if byte & 0x7F != 0x7F]


def checkpoints(folder: Path, block: tuple[int, int] | None) -> tuple[Path, Path]:
    """deepseek_v3-yarn with random FP8 matrices, and the same in float32."""
    eight, plain = (copy_fixture("deepseek_v3-yarn", folder / name) for name in ("eight", "plain"))
    config: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    if block is not None:
        config["weight_block_size"] = list(block)
    edit_config(eight, quantization_config=config)
    rows, cols = block or (128, 128)
    header, data = split_file(eight / "model.safetensors")
    rng, table = np.random.default_rng(5), np.array([value(byte) for byte in range(256)], np.float32)
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        array = np.frombuffer(data[start:end], np.float32).reshape(entry["shape"])
        if "_proj.weight" in name:
            numbers = rng.choice(np.array(FINITE, np.uint8), array.shape)
            scales = rng.uniform(1e-4, 1e-3, (-(-array.shape[0] // rows), -(-array.shape[1] // cols))).astype(
                np.float32
            )
            tensors[name], tensors[f"{name}_scale_inv"] = ("F8_E4M3", numbers), ("F32", scales)
            array = table[numbers]
            for i, j in np.ndindex(*array.shape):
                array[i, j] *= scales[i // rows, j // cols]
            write_at(plain / "model.safetensors", start, array)
        else:
            tensors[name] = ("F32", array)
    at, entries, parts = 0, {}, []
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        parts.append(raw)
    join_file(eight / "model.safetensors", entries, b"".join(parts))
    return eight, plain


def write_at(path: Path, start: int, array: np.ndarray) -> None:
    with path.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        file.seek(8 + size + start)
        file.write(array.tobytes())


def converted(source: Path) -> dict[str, bytes]:
    target = source.with_name(f"{source.name}-coli")
    convert(source, target, ConvertOptions(quant="f32"), lambda line: None)
    return {path.name: path.read_bytes() for path in target.glob("*.safetensors")}


@pytest.mark.parametrize("block", [None, (32, 24), (5, 7)])
def test_fp8_is_its_numbers_times_the_scale_of_the_block(tmp_path: Path, block: tuple[int, int] | None) -> None:
    eight, plain = checkpoints(tmp_path, block)
    assert converted(eight) == converted(plain)


def test_blocks_larger_than_any_matrix_cost_no_memory(tmp_path: Path) -> None:
    eight, plain = checkpoints(tmp_path, (2**31 - 1, 2**31 - 1))
    assert converted(eight) == converted(plain)
    edit_config(eight, quantization_config={"quant_method": "fp8", "weight_block_size": [2**31, 128]})
    assert "weight_block_size: expected two numbers from 1 to 2147483647" in refusal(eight)


def refusal(source: Path) -> str:
    with pytest.raises(ColiError) as raised:
        converted(source)
    return str(raised.value)


def test_scales_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    eight, _ = checkpoints(tmp_path, (32, 24))
    edit_config(eight, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 24]})
    assert "_scale_inv" in refusal(eight)
    edit_config(eight, quantization_config={"quant_method": "fp8", "weight_block_size": [0, 24]})
    assert "weight_block_size" in refusal(eight)
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    edit_config(eight, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 24]})
    edit_header(eight / "model.safetensors", lambda header: header.update({"stray": header.pop(name)}))
    assert name in refusal(eight)


def test_a_number_that_is_none_is_found(tmp_path: Path) -> None:
    eight, _ = checkpoints(tmp_path, None)
    header, data = split_file(eight / "model.safetensors")
    at = header["model.layers.1.self_attn.o_proj.weight"]["data_offsets"][0]
    join_file(eight / "model.safetensors", header, data[:at] + b"\x7f" + data[at + 1 :])
    with pytest.raises(CheckpointError, match="o_proj"):
        converted(eight)
