"""The container that `coli convert` writes: opened and checked in milliseconds, seen as mapped arrays.

Owns the headers of dense.safetensors and experts-*.safetensors and where each expert record lies. Knows files and byte
ranges, not what a tensor means: model.families turns `config` into a spec, and model.tensors checks that the container
holds what the spec needs. Digests are not verified here.
"""

import contextlib
import mmap
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.errors import CheckpointError, NotConvertedError, OptionError, ReadError
from coli.store.layout import RECORD_ALIGNMENT, Kind, MatrixShape, RecordPart, lay_out_record
from coli.store.manifest import MANIFEST, Manifest, container_fingerprint, expert_tensor_name, packed_tensors
from coli.store.safetensors_file import SafetensorsHeader, TensorInfo, read_header
from coli.store.strict_json import read_object

DENSE_FILE = "dense.safetensors"
PARTIAL_SUFFIX = ".partial"  # of the folder a conversion writes before it is complete
_DTYPES: Mapping[str, type[np.generic]] = {"U8": np.uint8, "F16": np.float16, "F32": np.float32}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A packed matrix: scales are F16 (tiles, groups, 16), None for f32."""

    kind: Kind
    rows: int
    cols: int
    tiles: int
    groups: int
    weights: NDArray[Any]  # U8 (tiles, groups, 256|512), or F32 (tiles, 32 * groups, 16)
    scales: NDArray[np.float16] | None


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the experts of one layer lie: record e starts at byte offset + e * record_bytes of the file `path`."""

    path: Path
    offset: int
    record_bytes: int
    num_experts: int
    parts: Mapping[str, RecordPart]  # "gate", "up", "down"


class Container:
    """An open container. Arrays are views of the mapped dense file and must not be written."""

    def __init__(self, path: Path, config: dict[str, Any], manifest: Manifest, fingerprint: str) -> None:
        self.path = path
        self.config = config
        self.manifest = manifest
        self.fingerprint = fingerprint  # of config.json and all weights: equal fingerprints give equal logits
        self._dense = _checked_dense(path / DENSE_FILE, manifest)
        headers = {name: read_header(path / name) for name in sorted({item.file for item in manifest.layers.values()})}
        self._experts = {
            layer_idx: _checked_layer(headers[layer.file], layer_idx, manifest)
            for layer_idx, layer in manifest.layers.items()
        }
        self._data = _map(path / DENSE_FILE)

    @staticmethod
    def open(path: Path) -> "Container":
        """Open the container in the folder `path` and check every header, size and shape against coli.json.

        Raises NotConvertedError (with the line to type) for a folder or file that is a model but no container,
        OptionError when there is no model at all, CheckpointError for a damaged container.
        """
        _refuse_what_is_no_container(path)
        return Container.load(path)

    @staticmethod
    def load(path: Path) -> "Container":
        """Open a folder known to be a container; convert checks its work folder with this."""
        manifest = Manifest.read(path / MANIFEST)
        config = read_object(path / "config.json")
        fingerprint = container_fingerprint((path / "config.json").read_bytes(), manifest.digests)
        return Container(path, config, manifest, fingerprint)

    def tensor_names(self) -> list[str]:
        """Names of all tensors in the dense file, in file order."""
        return sorted(self._dense.tensors, key=lambda name: self._dense.tensors[name].start)

    def array(self, name: str) -> NDArray[Any]:
        """The raw tensor `name` of the dense file."""
        tensor = self._dense.tensors[name]
        raw = self._data[tensor.start : tensor.end]
        return raw.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[str, NDArray[np.uint8]], None]]:
        """Gives read(name, target): a raw tensor of the dense file into memory of its size, past the mapping, whose
        pages would count twice and cost a page fault each. Raises ReadError."""
        path = self.path / DENSE_FILE
        with path.open("rb", buffering=0) as file:

            def read(name: str, target: NDArray[np.uint8]) -> None:
                tensor = self._dense.tensors[name]
                assert target.nbytes == tensor.end - tensor.start
                done = 0
                while done < target.nbytes:  # the system reads at most 2 GiB at once
                    try:
                        count = os.preadv(file.fileno(), [target[done:].data], tensor.start + done)
                    except OSError as problem:
                        raise ReadError(f"{path}: tensor {name}: {problem.strerror}") from None
                    if count == 0:
                        raise ReadError(f"{path}: ends within tensor {name}: it has been cut since it was opened")
                    done += count

            yield read

    def has(self, name: str) -> bool:
        """Whether there is a matrix or vector of this full tensor name (`....weight`, `....bias`)."""
        return name in self.manifest.tensors

    def matrix(self, name: str) -> Matrix:
        """The packed matrix `name` (a full tensor name, such as `lm_head.weight`)."""
        shape = self.manifest.tensors[name]
        assert isinstance(shape, MatrixShape), f"{name} is a vector"
        scales = None if shape.kind is Kind.F32 else self.array(f"{name}.scales")
        return Matrix(shape.kind, shape.rows, shape.cols, shape.tiles, shape.groups, self.array(name), scales)

    def vector(self, name: str) -> NDArray[np.float32]:
        """The float32 vector `name`; biases are padded with zeros to a multiple of 16."""
        assert isinstance(self.manifest.tensors[name], int), f"{name} is a matrix"
        return self.array(name)

    def expert_layout(self, layer_idx: int) -> ExpertLayout:
        """Where the expert records of layer `layer_idx` lie; KeyError if the layer has none."""
        return self._experts[layer_idx]

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with expert records, ascending."""
        return tuple(sorted(self._experts))


def _refuse_what_is_no_container(path: Path) -> None:
    """Say what `path` is instead, with the line to type where it can be converted."""
    target = shlex.quote(f"{path.with_suffix('') if path.suffix == '.gguf' else path}-coli")
    line = f"coli convert {shlex.quote(str(path))} {target}"
    if path.is_file():
        if path.suffix == ".gguf":
            raise NotConvertedError(f"{path}: a GGUF file, not converted yet; type: {line}")
        raise OptionError(f"{path}: a file; expected the folder that `coli convert` wrote")
    if not path.is_dir():
        raise OptionError(f"{path}: no such model folder")
    if path.name.endswith(PARTIAL_SUFFIX):
        raise NotConvertedError(f"{path}: an unfinished conversion; run the same `coli convert` again to complete it")
    if not (path / MANIFEST).is_file():
        if (path / "config.json").exists() or any(path.glob("*.safetensors")):
            raise NotConvertedError(f"{path}: a Hugging Face folder, not converted yet; type: {line}")
        raise OptionError(f"{path}: no {MANIFEST} in this folder, so it is not a coli model")


def _checked_dense(path: Path, manifest: Manifest) -> SafetensorsHeader:
    """The header of the dense file, which must hold exactly the tensors of the manifest in their packed form."""
    header = read_header(path)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in manifest.tensors.items():
        expected |= packed_tensors(name, shape)
    for name, (dtype, size) in expected.items():
        _expect_tensor(header, name, dtype, size)
    for name in header.tensors:
        if name not in expected:
            raise CheckpointError(f"{path}: tensor {name} is not in {MANIFEST}: convert the model again")
    return header


def _expect_tensor(header: SafetensorsHeader, name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    found = header.tensors.get(name)
    if found is None:
        raise CheckpointError(f"{header.path}: tensor {name} is missing: convert the model again")
    if (found.dtype, found.shape) != (dtype, shape):
        raise CheckpointError(
            f"{header.path}: tensor {name}: expected {dtype} {list(shape)}, found {found.dtype} {list(found.shape)}:"
            " convert the model again"
        )
    return found


def _checked_layer(header: SafetensorsHeader, layer_idx: int, manifest: Manifest) -> ExpertLayout:
    """The records of one layer, which must be aligned and laid out exactly as layout.lay_out_record does."""
    layer = manifest.layers[layer_idx]
    path = header.path
    where = f"{path.with_name(MANIFEST)}: layer {layer_idx}"
    if list(layer.parts) != ["gate", "up", "down"]:
        raise CheckpointError(f"{where}: expected parts gate, up, down, found {', '.join(layer.parts)}")
    biases = layer.parts["gate"].bias_offset is not None
    parts, record_bytes = lay_out_record(((name, part.shape) for name, part in layer.parts.items()), biases)
    if (parts, record_bytes) != (layer.parts, layer.record_bytes):
        raise CheckpointError(f"{where}: the parts of a record lie elsewhere than expected: convert the model again")
    name = expert_tensor_name(layer_idx)
    tensor = _expect_tensor(header, name, "U8", (manifest.num_experts, record_bytes))
    if tensor.start % RECORD_ALIGNMENT:
        raise CheckpointError(f"{path}: tensor {name}: records are not aligned to {RECORD_ALIGNMENT} bytes")
    return ExpertLayout(path, tensor.start, layer.record_bytes, manifest.num_experts, layer.parts)


def _map(path: Path) -> NDArray[np.uint8]:
    """The whole file as a read-only mapped array; the mapping lives as long as any view of it."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
