"""The files of a container before a byte of them is written: entries, exact sizes, and the stream that fills each.

A stream is a lazy sequence of operations in file order, so that a file is written front to back with its digest, and
no more than a few row blocks and the scales of one matrix are ever in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coli.convert.matching import Matched
from coli.convert.source import Rows
from coli.model.config import ModelSpec
from coli.model.tensors import TensorSpec, expert_matrices
from coli.store.container import DENSE_FILE
from coli.store.layout import PART_ALIGNMENT, TILE_ROWS, Kind, MatrixShape, RecordPart, lay_out_record, round_up
from coli.store.manifest import LayerRecords, expert_tensor_name, packed_tensors

BLOCK_WEIGHTS = 1 << 22  # of one encoded row block: 16 MB as float32
SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Encode:
    """Write the packed weights of rows start..stop-1 and keep their scales pending."""

    rows: Rows
    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Scales:
    """Write all pending scales, or put them aside under `hold`."""

    hold: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Write the scales put aside under `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Vector:
    """Write one float32 vector, padded with zeros to `length`."""

    rows: Rows
    length: int


@dataclass(frozen=True, slots=True)
class Pad:
    """Write zeros up to byte `end` of the tensor data."""

    end: int


Operation = Encode | Scales | Held | Vector | Pad


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an output file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One output file: its tensors in file order."""

    name: str
    entries: tuple[Entry, ...]
    layers: tuple[int, ...] = ()  # of an experts file

    @property
    def data_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


class Plan:
    """Everything conversion writes for one matched source."""

    def __init__(self, spec: ModelSpec, matched: Matched, dense: Kind, experts: Kind) -> None:
        self.spec = spec
        self.matched = matched
        self.tensors: dict[str, MatrixShape | int] = {
            wanted.name: _stored(wanted, dense) for wanted, _ in matched.dense
        }
        shapes = [(part, MatrixShape(experts, rows, cols)) for part, rows, cols in expert_matrices(spec)]
        self._parts: Mapping[str, RecordPart] = {}
        self.record_bytes = 0
        if spec.moe_layers:
            self._parts, self.record_bytes = lay_out_record(shapes)
        self.files: Sequence[FilePlan] = [self._dense_file(), *self._expert_files()]

    def layers(self) -> dict[int, LayerRecords]:
        """The experts section of the manifest."""
        return {
            layer_idx: LayerRecords(file.name, self.record_bytes, self._parts)
            for file in self.files
            for layer_idx in file.layers
        }

    def stream(self, file: FilePlan) -> Iterator[Operation]:
        """The operations that write the data of `file`, front to back."""
        return self._expert_stream(file) if file.layers else self._dense_stream(file)

    def _dense_file(self) -> FilePlan:
        """Tensors whose size is a multiple of 64 first, so that all of those start at one."""
        entries = [
            Entry(name, dtype, shape, _nbytes(dtype, shape))
            for tensor, stored in self.tensors.items()
            for name, (dtype, shape) in packed_tensors(tensor, stored).items()
        ]
        entries.sort(key=lambda entry: -(entry.nbytes & -entry.nbytes) if entry.nbytes % PART_ALIGNMENT else -(1 << 63))
        return FilePlan(DENSE_FILE, tuple(entries))

    def _expert_files(self) -> Iterator[FilePlan]:
        """Whole layers, as many as fit into a shard."""
        layer_bytes = self.spec.num_experts * self.record_bytes
        layers = self.spec.moe_layers
        per_file = max(1, SHARD_BYTES // layer_bytes) if layers else 1
        for number, first in enumerate(range(0, len(layers), per_file), start=1):
            chosen = layers[first : first + per_file]
            shape = (self.spec.num_experts, self.record_bytes)
            entries = tuple(Entry(expert_tensor_name(layer_idx), "U8", shape, layer_bytes) for layer_idx in chosen)
            yield FilePlan(f"experts-{number:05d}.safetensors", entries, chosen)

    def _dense_stream(self, file: FilePlan) -> Iterator[Operation]:
        sources = {wanted.name: (wanted, rows) for wanted, rows in self.matched.dense}
        names = [entry.name for entry in file.entries]
        for i, name in enumerate(names):
            if name not in sources:
                if i == 0 or names[i - 1] + ".scales" != name:
                    yield Held(name)
                continue
            _, rows = sources[name]
            stored = self.tensors[name]
            if isinstance(stored, int):
                yield Vector(rows, stored)
                continue
            yield from _encode_all(rows, stored.kind)
            if stored.scales_bytes:
                follows = i + 1 < len(names) and names[i + 1] == f"{name}.scales"
                yield Scales(None if follows else f"{name}.scales")

    def _expert_stream(self, file: FilePlan) -> Iterator[Operation]:
        start = 0
        for layer_idx in file.layers:
            for parts in self.matched.experts[layer_idx]:
                yield from self._record_stream(parts, start)
                start += self.record_bytes

    def _record_stream(self, sources: Mapping[str, Rows], start: int) -> Iterator[Operation]:
        """Weights in layout order; scales follow the last matrix of their run (the next offset is theirs)."""
        names = list(self._parts)
        for i, name in enumerate(names):
            part = self._parts[name]
            yield Pad(start + part.weights_offset)
            yield from _encode_all(sources[name], part.kind)
            ends_run = i + 1 == len(names) or self._parts[names[i + 1]].scales_offset != _scales_end(part)
            if part.scales_offset is not None and ends_run:
                yield Scales()
        yield Pad(start + self.record_bytes)


def _encode_all(rows: Rows, kind: Kind) -> Iterator[Encode]:
    step = max(TILE_ROWS, BLOCK_WEIGHTS // rows.cols // TILE_ROWS * TILE_ROWS)
    for start in range(0, rows.rows, step):
        yield Encode(rows, kind, start, min(start + step, rows.rows))


def _scales_end(part: RecordPart) -> int:
    return (part.scales_offset or 0) + part.shape.scales_bytes


def _stored(wanted: TensorSpec, dense: Kind) -> MatrixShape | int:
    if wanted.role == "vector":
        return wanted.shape[0]
    if wanted.role == "bias":
        return round_up(wanted.shape[0], TILE_ROWS)
    rows, cols = wanted.shape
    return MatrixShape(Kind.F32 if wanted.role == "router" else dense, rows, cols)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    nbytes = {"U8": 1, "F16": 2, "F32": 4}[dtype]
    for size in shape:
        nbytes *= size
    return nbytes
