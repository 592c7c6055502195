"""Most of a tape without most of the recording: layers that are alike are copied from one that was recorded.

The first program of a model is recorded in full and kept as the pattern. In every later one (other rows, another cache)
the first two layers of a kind are recorded; of the others' calls each word is either what the recorded layer has, or
the layer's own in the pattern (where the pattern shows that rows do not change it), or an address in a table the
recording made, which the copy gets its own of. A word that is none of these ends the copying: that kind of layer is
recorded as ever. Called by the transformer while it records.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.kernels.activations import aligned
from coli.kernels.runtime import data_pointer
from coli.kernels.tape import Call
from coli.model.program import Ints, Program, SparsePoint

LINE = 64  # bytes a table starts on

AnyArray = NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One layer as it was recorded. owners: the arrays whose memory its calls address, each once."""

    calls: tuple[Call, ...]
    owners: tuple[AnyArray, ...]
    point: SparsePoint | None
    first_call: int


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Layers of one kind in the program that was recorded in full: members, the one to copy from first.

    shape: what is the same for any number of rows. starts (members, owners): addresses; owners keeps them taken.
    contents: per owner its words (members, n) as they were recorded, None for other types than int64; own: which of
    them differ between the layers.
    """

    members: tuple[int, ...]
    shape: Hashable
    owners: tuple[tuple[AnyArray, ...], ...]
    starts: Ints
    contents: tuple[Ints | None, ...]
    own: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class _Copies:
    """Layers made from one recorded layer: their calls, points and the memory behind both."""

    calls: dict[int, list[Call]]
    points: dict[int, SparsePoint]
    memory: AnyArray


class _CannotCopy(Exception):
    """A word is not what copying can explain."""


class LayerCopies:
    """The pattern of one model. kinds: per layer, equal for layers whose Python does the same things."""

    def __init__(self, kinds: Sequence[Hashable]) -> None:
        self._members: dict[Hashable, list[int]] = {}
        for layer_idx, kind in enumerate(kinds):
            self._members.setdefault(kind, []).append(layer_idx)
        self._kinds = kinds
        self._patterns: dict[Hashable, _Pattern] | None = None
        self._pattern_arrays: list[AnyArray] = []
        self.copied = 0  # layers so far, for tests

    def recording(self, program: Program) -> "Recording":
        """What `program`, a new one, is recorded through."""
        return Recording(self, program)

    def template(self, layer_idx: int) -> int | None:
        """The layer that `layer_idx` can be copied from; None to record it."""
        kind = self._kinds[layer_idx]
        members = self._members[kind]
        if self._patterns is None or kind not in self._patterns or layer_idx in members[:2]:
            return None  # the first of a kind may still have grown buffers, the second has not
        return members[1]

    def copies(self, program: Program, layer: _Recorded, template: int) -> _Copies | None:
        """All layers of the kind of `template`, which is `layer` in `program`; None if that is not possible."""
        kind = self._kinds[template]
        assert self._patterns is not None
        try:
            return _copy(self._patterns[kind], self._pattern_arrays, layer, _program_arrays(program))
        except _CannotCopy:
            del self._patterns[kind]
            return None

    def keep(self, layers: Sequence[_Recorded], program: Program) -> None:
        """Make a program that was recorded in full the pattern, unless there is one. Not replayed yet."""
        if self._patterns is not None:
            return
        self._patterns, self._pattern_arrays = {}, _program_arrays(program)
        for kind, members in self._members.items():
            found = _pattern(members[1:], layers) if len(members) > 2 else None
            if found is not None:
                self._patterns[kind] = found


class Recording:
    """The layers of one program as they are recorded or copied."""

    def __init__(self, owner: LayerCopies, program: Program) -> None:
        self._owner, self._program = owner, program
        self._layers: dict[int, _Recorded] = {}
        self._made: dict[int, _Copies | None] = {}

    def copy(self, layer_idx: int) -> bool:
        """Append the layer's calls to the tape if they can be copied; else the caller records the layer."""
        template = self._owner.template(layer_idx)
        if template is None:
            return False
        tape, at = self._program.tape, len(self._program.tape)
        if template not in self._made:
            self._made[template] = self._owner.copies(self._program, self._layers[template], template)
            if copies := self._made[template]:
                tape.keep(copies.memory)
        made = self._made[template]
        if made is None:
            return False
        tape.place(made.calls[layer_idx])
        if (point := made.points.get(layer_idx)) is not None:
            shift = at - self._layers[template].first_call
            point.plan_call += shift
            point.sum_call += shift
            self._program.points.append(point)
        self._owner.copied += 1
        return True

    @contextmanager
    def layer(self, layer_idx: int) -> Iterator[None]:
        """Around the recording of one layer."""
        tape, points = self._program.tape, self._program.points
        call, kept, point = len(tape), len(tape.kept), len(points)
        yield
        mine = points[point] if len(points) > point else None
        self._layers[layer_idx] = _Recorded(tuple(tape.calls[call:]), _owners(tape.kept[kept:]), mine, call)

    def end(self) -> None:
        """All layers are on the tape."""
        if len(self._layers) == len(self._owner._kinds):
            self._owner.keep([self._layers[i] for i in sorted(self._layers)], self._program)


def _program_arrays(program: Program) -> list[AnyArray]:
    """What a program has for all its layers together; the first axis may be the layer."""
    named = [getattr(program.inputs, field.name) for field in fields(program.inputs)]
    return [value for value in [*named, program.flags] if isinstance(value, np.ndarray)]


def _owner_of(array: AnyArray) -> AnyArray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _owners(arrays: Sequence[AnyArray]) -> tuple[AnyArray, ...]:
    """The arrays whose memory `arrays` look at, each once, in order of appearance."""
    found: dict[int, AnyArray] = {}
    for array in arrays:
        owner = array if array.base is None else _owner_of(array)
        found[id(owner)] = owner
    return tuple(found.values())


def _require(condition: object) -> None:
    if not condition:
        raise _CannotCopy


def _shape(layer: _Recorded) -> Hashable:
    return tuple((code, phase) for code, _, _, phase in layer.calls), len(layer.owners), layer.point is None


def _pattern(members: Sequence[int], layers: Sequence[_Recorded]) -> _Pattern | None:
    """The layers as they have just been recorded; None if they are not alike."""
    known = [layers[i] for i in members]
    shape = _shape(known[0])
    if any(_shape(each) != shape for each in known):
        return None
    contents: list[Ints | None] = []
    for arrays in zip(*(each.owners for each in known), strict=True):
        first = arrays[0]
        if any(array.dtype != np.int64 or array.nbytes != first.nbytes for array in arrays):
            contents.append(None)
        else:
            contents.append(np.array([array.reshape(-1) for array in arrays]))
    starts = np.array([[data_pointer(array) for array in each.owners] for each in known], np.int64)
    none = np.zeros(0, np.int64)
    own = tuple(none if words is None else np.flatnonzero((words != words[0]).any(axis=0)) for words in contents)
    return _Pattern(tuple(members), shape, tuple(each.owners for each in known), starts, tuple(contents), own)


@dataclass(frozen=True, slots=True)
class _Table:
    """An array the recording made for its layer: which of the owners, where it is, where a copy has its own."""

    array: AnyArray
    k: int
    start: int
    offset: int


def _copy(
    pattern: _Pattern, pattern_arrays: Sequence[AnyArray], layer: _Recorded, program_arrays: Sequence[AnyArray]
) -> _Copies:
    """The pattern's members from `layer`, which is the first of them. Raises _CannotCopy."""
    _require(_shape(layer) == pattern.shape)
    tables, size = _tables(pattern, layer, (*pattern_arrays, *program_arrays))
    count = len(pattern.members)
    memory = aligned(count * size)
    bases = data_pointer(memory) + size * np.arange(count, dtype=np.int64)
    image = np.zeros(size // 8, np.int64)
    image_bytes = image.view(np.uint8)
    own, theirs = [np.zeros(0, np.int64)], [np.zeros((count, 0), np.int64)]
    for table in tables:
        at = table.offset // 8
        image_bytes[table.offset : table.offset + table.array.nbytes] = table.array.reshape(-1).view(np.uint8)
        if len(which := pattern.own[table.k]):
            words = pattern.contents[table.k]
            assert words is not None
            _require(words.shape[1] == table.array.size)  # one that grows with the rows has nothing of the layer's own
            own.append(which + at)
            theirs.append(words[:, which])
    rows = memory.view(np.int64).reshape(count, -1)
    rows[:] = image
    inside, offsets = _inside(tables, image)
    own_words, values = np.concatenate(own), np.concatenate(theirs, axis=1)
    _require(np.isin(inside, own_words).all())
    explained = np.isin(own_words, inside)
    rows[:, own_words] = _own(image[own_words], values, explained, pattern, pattern_arrays, program_arrays)
    rows[:, inside] = bases[:, None] + offsets
    arguments = np.array([call[1] for call in layer.calls], np.int64)
    inside, offsets = _inside(tables, arguments)
    _require(len(inside) == len(arguments))
    calls = {
        layer_idx: [(code, at, parts, phase) for (code, _, parts, phase), at in zip(layer.calls, found, strict=True)]
        for layer_idx, found in zip(pattern.members, (bases[:, None] + offsets).tolist(), strict=True)
    }
    return _Copies(calls, _points(layer.point, pattern.members, tables, memory.reshape(count, size)), memory)


def _tables(pattern: _Pattern, layer: _Recorded, common: Sequence[AnyArray]) -> tuple[list[_Table], int]:
    """The arrays that were made for `layer` alone, and the bytes of a copy's memory."""
    shared = {id(_owner_of(array)) for array in common}
    alike = (pattern.starts == pattern.starts[0]).all(axis=0)
    found, offset = [], 0
    for k, owner in enumerate(layer.owners):
        start = data_pointer(owner)
        if alike[k] or id(owner) in shared or start == pattern.starts[0, k]:
            continue  # of all layers, of the program, or of this layer whatever the rows
        starts = pattern.starts[:, k]
        _require(len(np.unique(starts)) == len(starts) and owner.flags.c_contiguous)
        if pattern.contents[k] is None:
            _require(owner.dtype != np.int64 and not owner.reshape(-1).view(np.uint8).any())  # zeros need no reasons
        found.append(_Table(owner, k, start, offset))
        offset += -(-owner.nbytes // LINE) * LINE
    return found, offset


def _inside(tables: Sequence[_Table], words: Ints) -> tuple[Ints, Ints]:
    """Which words are addresses in the recorded layer's tables, and where that is in a copy's memory."""
    ordered = sorted(tables, key=lambda table: table.start)
    starts = np.array([table.start for table in ordered], np.int64)
    ends = starts + np.array([table.array.nbytes for table in ordered], np.int64)
    k = np.searchsorted(starts, words, "right") - 1
    inside = np.flatnonzero((k >= 0) & (words < ends[k]))
    k = k[inside]
    return inside, np.array([table.offset for table in ordered], np.int64)[k] + words[inside] - starts[k]


def _own(
    mine: Ints,
    theirs: Ints,
    explained: NDArray[np.bool_],
    pattern: _Pattern,
    pattern_arrays: Sequence[AnyArray],
    program_arrays: Sequence[AnyArray],
) -> Ints:
    """Words that differ between the layers of the pattern: mine (n,) of the recorded layer, theirs (members, n) in the
    pattern -> (members, n). explained: those that will be addresses in tables."""
    out, open_ = theirs.copy(), ~explained
    steps = np.array(pattern.members, np.int64)[:, None] - pattern.members[0]
    for now, before in zip(program_arrays, pattern_arrays, strict=True):
        start = data_pointer(now)
        here = np.flatnonzero(open_ & (mine >= start) & (mine < start + now.nbytes))
        if len(here):
            _require((theirs[:, here] - theirs[0, here] == steps * before.strides[0]).all())
            out[:, here] = mine[here] + steps * now.strides[0]
            open_[here] = False
    _require((mine[open_] == theirs[0, open_]).all())  # the layer's own, whatever the rows
    return out


def _points(
    point: SparsePoint | None, members: Sequence[int], tables: Sequence[_Table], rows: NDArray[np.uint8]
) -> dict[int, SparsePoint]:
    """The point of each copy; its tables lie in the copy's memory, rows (members, bytes)."""
    if point is None:
        return {}
    places = {}
    for field in fields(point):
        array = getattr(point, field.name)
        if isinstance(array, np.ndarray):
            owner = _owner_of(array)
            table = next((table for table in tables if table.array is owner), None)
            if table is None:
                raise _CannotCopy
            places[field.name] = array, table.offset + data_pointer(array) - table.start
    found = {}
    for layer_idx, memory in zip(members, rows, strict=True):
        moved: dict[str, Any] = {
            name: np.ndarray(array.shape, array.dtype, memory.data, at, array.strides)
            for name, (array, at) in places.items()
        }
        found[layer_idx] = replace(point, layer_idx=layer_idx, **moved)
    return found
