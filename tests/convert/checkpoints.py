"""Small Hugging Face folders for the conversion tests, whole or broken on purpose, and readers of both sides.

Nothing here uses the code under test: headers are parsed and packed matrices unpacked with plain numpy.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ORACLE = Path(__file__).parent.parent / "oracle"
FIXTURES = (
    "llama-bias-sharded", "qwen3-base", "olmoe-base", "mixtral-base", "qwen2_moe-sparse-step", "qwen3_moe-padvocab",
)  # fmt: skip

Tensors = dict[str, np.ndarray]


def copy_fixture(name: str, folder: Path) -> Path:
    """A copy of an oracle checkpoint without expected.json, writable."""
    folder.mkdir(parents=True)
    for path in (ORACLE / name).iterdir():
        if path.name != "expected.json":
            shutil.copyfile(path, folder / path.name)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; a value of ... removes the key."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is ...:
            config.pop(key)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def split_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header object and data of a safetensors file."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def join_file(path: Path, header: Mapping[str, Any] | bytes, data: bytes) -> None:
    """Write a safetensors file from a header, which may be wrong, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a file after `change` has spoilt it."""
    header, data = split_file(path)
    change(header)
    join_file(path, header, data)


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of every safetensors file in the folder, as float32 or the stored integers."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, data = split_file(path)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = decode(data[start:end], entry["dtype"]).reshape(entry["shape"])
    return tensors


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Bytes of a tensor as numbers; BF16 becomes float32."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "F16": "<f2", "U8": "u1", "I64": "<i8"}[dtype])


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write float32 or float16 tensors as one safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        dtype = {"float32": "F32", "float16": "F16", "int64": "I64"}[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    join_file(path, header, data)


def unpack(packed: np.ndarray, scales: np.ndarray | None, kind: str, rows: int, cols: int) -> np.ndarray:
    """float32 (rows, cols) from the packed order: tiles of 16 rows, groups of 32 inputs (prototype README)."""
    if kind == "f32":  # (tiles, k, 16)
        tiles, padded, _ = packed.shape
        return packed.transpose(0, 2, 1).reshape(tiles * 16, padded)[:rows, :cols]
    tiles, groups, _ = packed.shape
    if kind == "q8":  # byte 4r+b of chunk j: row r, k = 4j + b, offset by 128
        q = packed.reshape(tiles, groups, 8, 16, 4).transpose(0, 3, 1, 2, 4).astype(np.float32) - 128
    else:  # low nibble of chunk j, byte 4r+b: k = 8j + b; high nibble: k = 8j + 4 + b; offset by 8
        chunks = packed.reshape(tiles, groups, 4, 16, 4)
        nibbles = np.stack([chunks & 15, chunks >> 4], axis=4)  # tile group chunk row half byte
        q = nibbles.transpose(0, 3, 1, 2, 4, 5).astype(np.float32) - 8
    assert scales is not None
    q = q.reshape(tiles, 16, groups, 32) * scales.transpose(0, 2, 1)[..., None].astype(np.float32)
    return q.reshape(tiles * 16, groups * 32)[:rows, :cols]


def stored_matrix(folder: Path, name: str) -> np.ndarray:
    """A dense matrix of a container, dequantized; of the padding, nothing."""
    entry = json.loads((folder / "coli.json").read_text())["tensors"][name]
    tensors = read_tensors(folder)
    return unpack(tensors[name], tensors.get(f"{name}.scales"), entry["kind"], entry["rows"], entry["cols"])


def stored_expert(folder: Path, layer_idx: int, expert_id: int, part: str) -> np.ndarray:
    """One matrix of one expert record of a container, dequantized."""
    layer = json.loads((folder / "coli.json").read_text())["experts"]["layers"][str(layer_idx)]
    record = read_tensors(folder)[f"layers.{layer_idx}.experts"][expert_id]
    entry = next(item for item in layer["parts"] if item["name"] == part)
    tiles, groups = -(-entry["rows"] // 16), -(-entry["cols"] // 32)
    group_bytes = {"f32": 2048, "q8": 512, "q4": 256}[entry["kind"]]
    raw = record[entry["weights"] : entry["weights"] + tiles * groups * group_bytes]
    if entry["kind"] == "f32":
        return unpack(raw.view("<f4").reshape(tiles, groups * 32, 16), None, "f32", entry["rows"], entry["cols"])
    scales = record[entry["scales"] : entry["scales"] + tiles * groups * 32].view("<f2").reshape(tiles, groups, 16)
    return unpack(raw.reshape(tiles, groups, group_bytes), scales, entry["kind"], entry["rows"], entry["cols"])
