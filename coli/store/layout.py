"""The packed layout in numbers: bytes of a matrix of each kind, and where the parts of an expert record lie.

Pure arithmetic shared by the writer (convert) and the reader (container). The byte order inside a tile belongs to the
kernels: rows in tiles of 16, inputs in groups of 32, with one scale per row and group (all but f32).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

TILE_ROWS = 16
GROUP_SIZE = 32
RECORD_ALIGNMENT = 4096
PART_ALIGNMENT = 64


class Kind(IntEnum):
    """How a matrix is stored; the numbers are those the kernels use."""

    F32 = 0
    Q8 = 1
    Q4 = 2
    MXFP4 = 3

    @property
    def label(self) -> str:
        """The name in coli.json and in options."""
        return self.name.lower()

    @property
    def group_bytes(self) -> int:
        """Bytes of the weights of one tile and group (16 rows x 32 inputs)."""
        return {Kind.F32: 2048, Kind.Q8: 512, Kind.Q4: 256, Kind.MXFP4: 256}[self]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one row and group: a float16, MXFP4 the exponent of a power of two, f32 none."""
        return {Kind.F32: 0, Kind.Q8: 2, Kind.Q4: 2, Kind.MXFP4: 1}[self]


KINDS = {kind.label: kind for kind in Kind}


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """A (rows, cols) matrix of one kind, with its padded extent."""

    kind: Kind
    rows: int
    cols: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.rows // TILE_ROWS)

    @property
    def groups(self) -> int:
        """Groups of 32 inputs."""
        return -(-self.cols // GROUP_SIZE)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self.tiles * self.groups * self.kind.group_bytes

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales, 0 for f32."""
        return self.tiles * self.groups * TILE_ROWS * self.kind.scale_bytes

    @property
    def bias_bytes(self) -> int:
        """Bytes of a float32 bias, padded to whole tiles."""
        return self.tiles * TILE_ROWS * 4


@dataclass(frozen=True, slots=True)
class RecordPart:
    """One matrix inside an expert record; offsets in bytes from the start of the record."""

    kind: Kind
    rows: int
    cols: int
    weights_offset: int
    scales_offset: int | None  # None: f32 has no scales
    bias_offset: int | None = None

    @property
    def shape(self) -> MatrixShape:
        return MatrixShape(self.kind, self.rows, self.cols)

    @property
    def tiles(self) -> int:
        return self.shape.tiles

    @property
    def groups(self) -> int:
        return self.shape.groups


def lay_out_record(parts: Iterable[tuple[str, MatrixShape]], biases: bool = False) -> tuple[dict[str, RecordPart], int]:
    """Offsets of the parts of one expert record, and its size in bytes.

    Neighbours of one kind and width (gate and up) are laid out as one matrix: weights behind weights, then scales
    behind scales, so that a kernel can take both in one pass. Every such block starts at a multiple of 64. Biases,
    where there are any, come last: float32, of each part as many as it has padded rows.
    """
    runs: list[list[tuple[str, MatrixShape]]] = []
    for name, shape in parts:
        if runs and (runs[-1][-1][1].kind, runs[-1][-1][1].cols) == (shape.kind, shape.cols):
            runs[-1].append((name, shape))
        else:
            runs.append([(name, shape)])
    laid: dict[str, RecordPart] = {}
    end = 0
    for run in runs:
        weights = round_up(end, PART_ALIGNMENT)
        scales = round_up(weights + sum(shape.weights_bytes for _, shape in run), PART_ALIGNMENT)
        for name, shape in run:
            has_scales = shape.scales_bytes > 0
            laid[name] = RecordPart(shape.kind, shape.rows, shape.cols, weights, scales if has_scales else None)
            weights += shape.weights_bytes
            scales += shape.scales_bytes
        end = scales
    if biases:
        end = round_up(end, PART_ALIGNMENT)
        for name, part in laid.items():
            laid[name] = replace(part, bias_offset=end)
            end += part.shape.bias_bytes
    return laid, round_up(end, RECORD_ALIGNMENT)
