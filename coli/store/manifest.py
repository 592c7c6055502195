"""coli.json, the manifest of a container: what is stored, how, and where, typed and checked.

Written by convert, read by container. Holds no array and opens no other file.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.errors import CheckpointError
from coli.store.layout import KINDS, Kind, MatrixShape, RecordPart
from coli.store.strict_json import read_object

FORMAT_VERSION = 1
MANIFEST = "coli.json"
VECTOR = "vector"  # kind of one-dimensional float32 tensors
MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerRecords:
    """What coli.json says about the expert records of one layer."""

    file: str
    record_bytes: int
    parts: Mapping[str, RecordPart]


@dataclass(frozen=True, slots=True)
class Manifest:
    """coli.json, typed. `tensors` maps a full tensor name to its MatrixShape, or to the length of a vector."""

    source: Mapping[str, Any]
    quantization: Mapping[str, str]
    tensors: Mapping[str, MatrixShape | int]
    num_experts: int
    layers: Mapping[int, LayerRecords]
    digests: Mapping[str, str]  # sha256 of each file of the container but coli.json

    def to_json(self, fingerprint: str) -> dict[str, Any]:
        """The JSON object of coli.json."""
        tensors = {
            name: {"kind": shape.kind.label, "rows": shape.rows, "cols": shape.cols}
            if isinstance(shape, MatrixShape)
            else {"kind": VECTOR, "rows": shape}
            for name, shape in self.tensors.items()
        }
        layers = {
            str(layer_idx): {
                "file": layer.file,
                "record_bytes": layer.record_bytes,
                "parts": [_part_to_json(name, part) for name, part in layer.parts.items()],
            }
            for layer_idx, layer in self.layers.items()
        }
        return {
            "format_version": FORMAT_VERSION,
            "source": dict(self.source),
            "quantization": dict(self.quantization),
            "tensors": tensors,
            "experts": {"num_experts": self.num_experts, "layers": layers},
            "digests": dict(self.digests),
            "fingerprint": fingerprint,
        }

    @staticmethod
    def read(path: Path) -> "Manifest":
        """Parse and check coli.json; CheckpointError names the entry that is wrong."""
        data = read_object(path, MAX_MANIFEST_BYTES)
        version = data.get("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version {str(version)[:20]}, this version of coli reads {FORMAT_VERSION}:"
                " convert the model again"
            )
        try:
            return _manifest(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
            if isinstance(error, TypeError | AttributeError):
                reason = "an entry is not of the type it should be"
            raise CheckpointError(f"{path}: damaged: {reason[:120]}: convert the model again") from None


def container_fingerprint(config: bytes, digests: Mapping[str, str]) -> str:
    """One hash over config.json and the digests of the weight files."""
    weights = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    text = json.dumps([hashlib.sha256(config).hexdigest(), sorted(weights.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _manifest(data: Mapping[str, Any]) -> Manifest:
    tensors: dict[str, MatrixShape | int] = {}
    for name, entry in data["tensors"].items():
        if entry["kind"] == VECTOR:
            tensors[name] = _size(entry, "rows", name)
        else:
            tensors[name] = _matrix_shape(entry, name)
    layers: dict[int, LayerRecords] = {}
    for key, entry in data["experts"]["layers"].items():
        parts = {part["name"]: _part_from_json(part) for part in entry["parts"]}
        layers[int(key)] = LayerRecords(_file_name(entry["file"]), _size(entry, "record_bytes", key), parts)
    digests = {_file_name(name): str(digest) for name, digest in data["digests"].items()}
    quantization = {str(name): str(value) for name, value in data["quantization"].items()}
    num_experts = data["experts"]["num_experts"]
    if not isinstance(num_experts, int) or num_experts < 0:
        raise ValueError(f"num_experts is {num_experts!r}")
    return Manifest(dict(data["source"]), quantization, tensors, num_experts, layers, digests)


def _size(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry[key]
    if type(value) is not int or not 0 < value < 2**62:
        raise ValueError(f"{where}: {key} is {value!r}")
    return value


def _matrix_shape(entry: Mapping[str, Any], where: str) -> MatrixShape:
    if entry["kind"] not in KINDS:
        raise ValueError(f"{where}: unknown kind {entry['kind']!r}")
    return MatrixShape(KINDS[entry["kind"]], _size(entry, "rows", where), _size(entry, "cols", where))


def _file_name(value: str) -> str:
    if not value or "/" in value or value.startswith("."):
        raise ValueError(f"{value!r} is not a plain file name")
    return value


def _part_to_json(name: str, part: RecordPart) -> dict[str, Any]:
    entry = {"name": name, "kind": part.kind.label, "rows": part.rows, "cols": part.cols}
    offsets = {"weights": part.weights_offset, "scales": part.scales_offset, "bias": part.bias_offset}
    return entry | {key: offset for key, offset in offsets.items() if offset is not None}


def _part_from_json(entry: Mapping[str, Any]) -> RecordPart:
    shape = _matrix_shape(entry, entry["name"])
    offsets = [entry["weights"], entry.get("scales"), entry.get("bias")]
    if any(offset is not None and (type(offset) is not int or offset < 0 or offset % 16) for offset in offsets):
        raise ValueError(f"{entry['name']}: offsets are {offsets}")
    return RecordPart(shape.kind, shape.rows, shape.cols, *offsets)


def packed_tensors(name: str, shape: MatrixShape | int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of what the dense file stores for one entry of the manifest."""
    if isinstance(shape, int):
        return {name: ("F32", (shape,))}
    if shape.kind is Kind.F32:
        return {name: ("F32", (shape.tiles, shape.groups * 32, 16))}
    return {
        name: ("U8", (shape.tiles, shape.groups, shape.kind.group_bytes)),
        f"{name}.scales": ("F16" if shape.kind.scale_bytes == 2 else "U8", (shape.tiles, shape.groups, 16)),
    }


def expert_tensor_name(layer_idx: int) -> str:
    """Name of the tensor that holds the records of a layer."""
    return f"layers.{layer_idx}.experts"
