"""The files of a container before a byte of them is written: entries, exact sizes, and the stream that fills each.

A stream is a lazy sequence of operations in file order, so that a file is written front to back with its digest, and
no more than a few row blocks and the scales of one matrix are ever in memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coli.convert.importance import Columns, Importance
from coli.convert.matching import Matched
from coli.convert.options import ConvertOptions
from coli.convert.source import Rows
from coli.model.tensors import TensorSpec, expert_matrices, mtp_tensors
from coli.store.container import DENSE_FILE
from coli.store.layout import (
    GROUP_SIZE,
    PART_ALIGNMENT,
    TILE_ROWS,
    Kind,
    MatrixShape,
    RecordPart,
    lay_out_record,
    round_up,
)
from coli.store.manifest import LayerRecords, expert_tensor_name, packed_tensors

BLOCK_WEIGHTS = 1 << 22  # of one encoded row block: 16 MB as float32
PER_HEAD = (".k_up.weight", ".v_up.weight")  # a matrix per attention head, one after the other
SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Encode:
    """Write the packed weights of rows start..stop-1 and keep their scales pending.

    importance: (cols,), or (n, cols) where the rows are n heads' one after the other.
    """

    rows: Rows
    kind: Kind
    start: int
    stop: int
    importance: Columns | None = field(default=None, compare=False)


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
    """Everything conversion writes for one matched source. Kinds may differ between tensors, and records by layer."""

    def __init__(self, matched: Matched, options: ConvertOptions) -> None:
        self.spec = spec = matched.spec
        self.matched = matched
        head = {wanted.name for wanted in mtp_tensors(spec)}
        self.tensors: dict[str, MatrixShape | int] = {}
        for wanted, source in matched.dense:
            kind = options.dense_kind(source.native_kind)
            if wanted.name in head:
                kind = _of_head(kind, source.native_kind)
            self.tensors[wanted.name] = _stored(wanted, kind)
        self._records: dict[int, tuple[Mapping[str, RecordPart], int]] = {}
        for layer_idx in spec.record_layers:
            kinds = []
            for part, rows, cols in expert_matrices(spec):
                native = _shared_kind(matched.experts[layer_idx], part)
                kind = options.expert_kind(native)
                if layer_idx not in spec.moe_layers:
                    kind = _of_head(kind, native)
                kinds.append((part, MatrixShape(kind, rows, cols)))
            self._records[layer_idx] = lay_out_record(kinds, spec.expert_bias)
        self.files: Sequence[FilePlan] = [self._dense_file(), *self._expert_files()]
        matrices = [(wanted.name, stored.kind) for wanted, stored in self._matrices() if wanted.role == "dense"]
        dense = {kind for name, kind in matrices if name not in head}
        experts = {part.kind for i in spec.moe_layers for part in self._records[i][0].values()}
        self.quantization = {
            "dense": _labels(dense),
            "experts": _labels(experts or {options.expert_kind()}),
            "group_size": str(GROUP_SIZE),
        }
        if head:
            self.quantization["mtp"] = _labels({kind for name, kind in matrices if name in head})

        self.importance: Importance | None = None  # set before `stream` where q4 scales are to be weighted

    def chooses_q4_scales(self) -> bool:
        """Whether any matrix becomes q4 from numbers, so that its scales are ours to choose."""
        steps = (step for file in self.files for step in self.stream(file))
        return any(
            isinstance(step, Encode) and step.kind is Kind.Q4 and step.rows.native_kind is not Kind.Q4 for step in steps
        )

    def layers(self) -> dict[int, LayerRecords]:
        """The experts section of the manifest."""
        found: dict[int, LayerRecords] = {}
        for file in self.files:
            for layer_idx in file.layers:
                parts, record_bytes = self._records[layer_idx]
                found[layer_idx] = LayerRecords(file.name, record_bytes, parts)
        return found

    def kinds(self) -> dict[str, str]:
        """Every matrix and what it is stored as, to tell one plan from another."""
        dense = {wanted.name: stored.kind.label for wanted, stored in self._matrices()}
        experts = {
            f"{expert_tensor_name(layer_idx)}.{name}": part.kind.label
            for layer_idx, (parts, _) in self._records.items()
            for name, part in parts.items()
        }
        return dense | experts

    def _matrices(self) -> Iterator[tuple[TensorSpec, MatrixShape]]:
        for wanted, _ in self.matched.dense:
            stored = self.tensors[wanted.name]
            if isinstance(stored, MatrixShape):
                yield wanted, stored

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
        shards: list[list[Entry]] = []
        layers: list[list[int]] = []
        left = 0
        for layer_idx, (_, record_bytes) in self._records.items():
            nbytes = self.spec.num_experts * record_bytes
            if nbytes > left:
                shards.append([])
                layers.append([])
                left = SHARD_BYTES
            left -= nbytes
            shape = (self.spec.num_experts, record_bytes)
            shards[-1].append(Entry(expert_tensor_name(layer_idx), "U8", shape, nbytes))
            layers[-1].append(layer_idx)
        for i, entries in enumerate(shards):
            yield FilePlan(f"experts-{i + 1:05d}.safetensors", tuple(entries), tuple(layers[i]))

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
            importance = None if self.importance is None else self.importance.of_dense(name)
            heads = self.spec.num_attention_heads if name.endswith(PER_HEAD) else 1
            yield from _encode_all(rows, stored.kind, importance, heads)
            if stored.scales_bytes:
                follows = i + 1 < len(names) and names[i + 1] == f"{name}.scales"
                yield Scales(None if follows else f"{name}.scales")

    def _expert_stream(self, file: FilePlan) -> Iterator[Operation]:
        start = 0
        for layer_idx in file.layers:
            parts, record_bytes = self._records[layer_idx]
            for expert_id, sources in enumerate(self.matched.experts[layer_idx]):
                known = self.importance if layer_idx in self.spec.moe_layers else None
                importance = {
                    part: None if known is None else known.of_expert(layer_idx, expert_id, part) for part in parts
                }
                yield from _record_stream(parts, sources, importance, start)
                start += record_bytes
                yield Pad(start)


def _record_stream(
    parts: Mapping[str, RecordPart],
    sources: Mapping[str, Rows],
    importance: Mapping[str, Columns | None],
    start: int,
) -> Iterator[Operation]:
    """Weights in layout order; scales follow the last matrix of their run (the next offset is theirs)."""
    names = list(parts)
    for i, name in enumerate(names):
        part = parts[name]
        yield Pad(start + part.weights_offset)
        yield from _encode_all(sources[name], part.kind, importance[name])
        ends_run = i + 1 == len(names) or parts[names[i + 1]].scales_offset != _scales_end(part)
        if part.scales_offset is not None and ends_run:
            yield Scales()
    for name, part in parts.items():
        if part.bias_offset is not None:
            yield Pad(start + part.bias_offset)
            yield Vector(sources[f"{name}.bias"], round_up(part.rows, TILE_ROWS))


def _encode_all(rows: Rows, kind: Kind, importance: Columns | None, heads: int = 1) -> Iterator[Encode]:
    """Blocks of whole tiles, of whole heads where the matrix holds one per head."""
    whole = TILE_ROWS if heads == 1 else rows.rows // heads
    step = max(whole, BLOCK_WEIGHTS // rows.cols // whole * whole)
    for start in range(0, rows.rows, step):
        stop = min(start + step, rows.rows)
        own = importance if importance is None or importance.ndim == 1 else importance[start // whole : stop // whole]
        yield Encode(rows, kind, start, stop, own)


def _of_head(kind: Kind, native: Kind | None) -> Kind:
    """The kind of an MTP head's matrix: 8 bits where others get 4, unless the source has no more than 4."""
    return Kind.Q8 if kind is Kind.Q4 and native is not Kind.Q4 else kind


def _shared_kind(experts: Sequence[Mapping[str, Rows]], part: str) -> Kind | None:
    """The kind in which the source holds this matrix of every expert of a layer; None if there is no such kind."""
    kinds = {sources[part].native_kind for sources in experts}
    return kinds.pop() if len(kinds) == 1 else None


def _labels(kinds: Iterable[Kind]) -> str:
    return "+".join(sorted(kind.label for kind in kinds))


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
