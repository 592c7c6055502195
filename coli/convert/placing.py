"""Where in its file each step of a plan writes, and which steps can run as soon as which source files are there.

A portion is what one output file gets once a certain source file has come, taken in the order of `Source.files`; with
one source file, or with all of them in one, every output file is one portion, written front to back.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from coli.convert.plan import Encode, FilePlan, Held, Pad, Plan, Scales, Vector
from coli.store.layout import MatrixShape


@dataclass(frozen=True, slots=True)
class Placed:
    """A step that writes `nbytes` bytes at `at`, and its scales, if any, at `scales_at`: offsets in the tensor data."""

    step: Encode | Vector | Pad
    at: int
    nbytes: int
    scales_at: int = 0
    scales_bytes: int = 0

    @property
    def source_bytes(self) -> int:
        """Bytes of the source that it reads."""
        match self.step:
            case Encode(rows=rows, start=start, stop=stop):
                return (stop - start) * rows.tensor.row_bytes
            case Vector(rows=rows):
                return rows.rows * rows.tensor.row_bytes
        return 0


@dataclass(frozen=True, slots=True)
class Portion:
    """Steps of one output file; `needs`: the source files they read, in reading order."""

    number: int  # among the portions of its file
    file: FilePlan
    needs: tuple[str, ...]
    steps: tuple[Placed, ...]

    @property
    def nbytes(self) -> int:
        return sum(placed.nbytes + placed.scales_bytes for placed in self.steps)

    @property
    def source_bytes(self) -> int:
        return sum(placed.source_bytes for placed in self.steps)


def portions(plan: Plan, source_files: Sequence[str]) -> list[Portion]:
    """All portions of all files, those first whose source files come first."""
    order = {name: number for number, name in enumerate(source_files)}
    found: list[tuple[int, int, Portion]] = []
    for file_number, file in enumerate(plan.files):
        by_last: defaultdict[int, list[Placed]] = defaultdict(list)
        needs: defaultdict[int, set[str]] = defaultdict(set)
        last = 0
        for placed in _place(plan, file):
            if not isinstance(placed.step, Pad):  # zeros go with what they follow
                files = placed.step.rows.tensor.files
                last = max((order[name] for name in files), default=0)
                needs[last] |= files
            by_last[last].append(placed)
        for number, last in enumerate(sorted(by_last)):
            names = tuple(sorted(needs[last], key=order.__getitem__))
            found.append((last, file_number, Portion(number, file, names, tuple(by_last[last]))))
    return [portion for _, _, portion in sorted(found, key=lambda item: item[:2])]


def _place(plan: Plan, file: FilePlan) -> list[Placed]:
    """The steps of `file` in file order."""
    placed: list[Placed] = []
    waiting: list[int] = []  # steps whose scales have no place yet
    held: dict[str, list[int]] = {}
    position = 0

    def place_scales(steps: Sequence[int]) -> None:
        nonlocal position
        for i in steps:
            old = placed[i]
            placed[i] = Placed(old.step, old.at, old.nbytes, position, old.scales_bytes)
            position += old.scales_bytes

    for step in plan.stream(file):
        match step:
            case Encode(rows=rows, kind=kind, start=start, stop=stop):
                shape = MatrixShape(kind, stop - start, rows.cols)
                if shape.scales_bytes:
                    waiting.append(len(placed))
                placed.append(Placed(step, position, shape.weights_bytes, 0, shape.scales_bytes))
                position += shape.weights_bytes
            case Vector(length=length):
                placed.append(Placed(step, position, 4 * length))
                position += 4 * length
            case Pad(end=end):
                assert end >= position, f"{file.name}: {position} bytes planned, more than {end}"
                if end > position:
                    placed.append(Placed(step, position, end - position))
                position = end
            case Scales(hold=name):
                if name is None:
                    place_scales(waiting)
                else:
                    held[name] = waiting
                waiting = []
            case Held(name=name):
                place_scales(held.pop(name))
    assert position == file.data_bytes, f"{file.name}: {position} bytes planned, not {file.data_bytes}"
    assert not waiting, file.name
    assert not held, file.name
    return placed
