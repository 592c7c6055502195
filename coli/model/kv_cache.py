"""The attention memory of one sequence, all layers.

Owns the key and value arrays and how many slots hold rows; the kernels read and write them by address. Committed rows
lie in position order (slot = position, less the base of a window); the rows of a forward are appended behind them and
either kept or dropped. Called by the model's one thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coli.errors import CheckpointError, ContextLengthError
from coli.kernels.attention import copy_slots, slide
from coli.kernels.latent import padded
from coli.model.config import LatentSpec, LayerSpec, ModelSpec

SLOT_BLOCK = 16
STEP = 64  # rows a layer with a window takes at a time: the most a verify has
Ints = NDArray[np.int64]


class SlidingRows:
    """The rows of the layers with one window: those that the next row sees, and STEP more.

    Slot 0 holds position `base`, a multiple of 16, so that positions lie in the lanes of a cache that keeps everything.
    Where the next rows do not fit, the window moves to the front.
    """

    def __init__(
        self, window: int, layers: tuple[int, ...], capacity: int, heads: int, head_dim: int, element: type
    ) -> None:
        self.window, self.layers, self.capacity = window, layers, capacity
        self.keys: NDArray[Any] = np.zeros((len(layers), heads, capacity // SLOT_BLOCK, head_dim, SLOT_BLOCK), element)
        self.values: NDArray[Any] = np.zeros((len(layers), heads, capacity, head_dim), element)
        self.base = 0
        self.bases: list[int] = []  # of each STEP rows of the last append
        self.moves = np.zeros((1, 2), np.int64)  # (first slot, rows) that go to slot 0 in front of each

    def addresses(self) -> tuple[Ints, Ints]:
        """Where the keys and the values of each of `layers` lie, each (n,)."""
        layers = np.arange(len(self.layers), dtype=np.int64)
        return (
            self.keys.ctypes.data + layers * self.keys.strides[0],
            self.values.ctypes.data + layers * self.values.strides[0],
        )

    def append(self, start: int, count: int) -> None:
        """Make room for rows at positions start .. start+count-1, STEP at a time: for the first of them now, for the
        others by `moves`, which the forward carries out."""
        steps = range(0, count, STEP)
        self.bases, self.moves = [], np.zeros((max(len(steps), 1), 2), np.int64)
        for i, at in enumerate(steps):
            first, stop = start + at, start + min(at + STEP, count)
            if stop - self.base > self.capacity:
                base = max(0, first - self.window + 1) // SLOT_BLOCK * SLOT_BLOCK
                self.moves[i] = base - self.base, -(-(first - base) // SLOT_BLOCK) * SLOT_BLOCK
                self.base = base
            self.bases.append(self.base)
        if self.moves[0, 1]:
            _, heads, _, head_dim, _ = self.keys.shape
            keys, values = self.addresses()
            for layer in range(len(self.layers)):
                slide(keys, values, layer, self.moves, 0, heads, head_dim, self.capacity, self.keys.itemsize == 2)

    def reaches(self, length: int) -> bool:
        """Whether everything that a row at position `length` sees is still here."""
        return self.base <= max(0, length - self.window + 1)


@dataclass(frozen=True, slots=True)
class HeldWindows:
    """What the layers with windows held at one length of a cache: their keys, values and base by window."""

    length: int
    rows: tuple[tuple[NDArray[Any], NDArray[Any], int], ...]


class Follower(Protocol):
    """What keeps rows of its own beside a cache's, and is told what becomes of those (coli.model.mtp)."""

    @property
    def nbytes(self) -> int: ...

    def rewind(self, length: int) -> None: ...

    def keep_path(self, start: int, rows: Sequence[int]) -> None: ...

    def copy_prefix(self, other: Any, length: int) -> None: ...


class KVCache:
    """Keys and values of up to `capacity` positions, of layers with a window as many as it needs (`sliding`).

    Keys: (L, K, capacity/16, D, 16), 16 positions side by side, so that a score is a chain over D for 16 positions at
    once. Values: (L, K, capacity, D). float32, or float16 held as uint16. L counts the layers that keep everything.
    """

    follower: Follower | None = None
    original_context = 0  # longrope: positions of the short factors; 0: another rope
    is_long = False  # every row has the long factors, because a prompt was longer than that

    def __init__(
        self,
        num_layers: int,
        num_key_value_heads: int,
        head_dim: int,
        capacity: int,
        dtype: str,
        windows: Sequence[int | None] = (),
    ) -> None:
        self.capacity = -(-capacity // SLOT_BLOCK) * SLOT_BLOCK
        self.is_f16 = dtype == "f16"
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        element = np.uint16 if self.is_f16 else np.float32
        short: dict[int, list[int]] = {}  # window -> layers
        for layer_idx, window in enumerate(windows):
            if window is not None and rows_kept(window, self.capacity) < self.capacity:
                short.setdefault(window, []).append(layer_idx)
        self.sliding = tuple(
            SlidingRows(window, tuple(layers), rows_kept(window, self.capacity), num_key_value_heads, head_dim, element)
            for window, layers in sorted(short.items())
        )
        sliding = {layer_idx for rows in self.sliding for layer_idx in rows.layers}
        self.whole = tuple(layer_idx for layer_idx in range(num_layers) if layer_idx not in sliding)
        blocks = self.capacity // SLOT_BLOCK
        # zeros, not empty: lanes of a block that hold no position yet are computed too, then dropped
        self.keys = np.zeros((len(self.whole), num_key_value_heads, blocks, head_dim, SLOT_BLOCK), element)
        self.values = np.zeros((len(self.whole), num_key_value_heads, self.capacity, head_dim), element)
        self._addresses = self._find_addresses()
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + sum(s.keys.nbytes + s.values.nbytes for s in self.sliding)

    @property
    def reads_alone(self) -> bool:
        """Windows move between the STEP rows of a long forward, for one sequence only."""
        return bool(self.sliding)

    def addresses(self) -> tuple[Ints, Ints]:
        """Where the keys and the values of each layer lie, each (L,); for as long as the cache lives."""
        return self._addresses

    def _find_addresses(self) -> tuple[Ints, Ints]:
        keys, values = (np.zeros(len(self.whole) + sum(len(s.layers) for s in self.sliding), np.int64) for _ in "kv")
        layers = np.arange(len(self.whole), dtype=np.int64)
        whole = list(self.whole)
        keys[whole] = self.keys.ctypes.data + layers * self.keys.strides[0]
        values[whole] = self.values.ctypes.data + layers * self.values.strides[0]
        for rows in self.sliding:
            keys[list(rows.layers)], values[list(rows.layers)] = rows.addresses()
        return keys, values

    def append(self, count: int) -> Ints:
        """Reserve `count` slots behind the rows held; returns them (count,) in order."""
        if self.length + count > self.capacity:
            raise ContextLengthError(
                f"context: {self.length + count} positions are needed, {self.capacity} are allocated; raise --ctx"
            )
        slots = np.arange(self.length, self.length + count, dtype=np.int64)
        for rows in self.sliding:
            rows.append(self.length, count)
        self.length += count
        return slots

    def expect(self, prompt_length: int) -> None:
        """A prompt of so many ids, rows held included, comes next. Longrope turns the rows of a longer prompt than its
        original context by the long factors, those of a shorter one by the short ones up to there: rows held that were
        turned the other way are forgotten."""
        if self.original_context and self.is_long != (prompt_length > self.original_context):
            self.rewind(0)
            self.is_long = prompt_length > self.original_context

    def rewind(self, length: int) -> None:
        """Forget every row from position `length` on; all rows where a window no longer reaches that far back.

        Rows of the last STEP appended can always be taken back.
        """
        assert 0 <= length <= self.length
        self.length = length if all(rows.reaches(length) for rows in self.sliding) else 0
        if self.length == 0:
            for rows in self.sliding:
                rows.base = 0
        if self.follower is not None:
            self.follower.rewind(self.length)

    def held_windows(self) -> HeldWindows:
        """A copy of what the windows hold, for `return_to`."""
        return HeldWindows(
            self.length, tuple((rows.keys.copy(), rows.values.copy(), rows.base) for rows in self.sliding)
        )

    def return_to(self, held: HeldWindows) -> None:
        """Take back every row appended since `held` was taken, however many they are."""
        assert held.length <= self.length
        for rows, (keys, values, base) in zip(self.sliding, held.rows, strict=True):
            rows.keys[:], rows.values[:], rows.base = keys, values, base
        self.rewind(held.length)

    def copy_prefix(self, other: "KVCache", length: int) -> None:
        """Hold the first `length` rows of `other`, a cache of the same shape, bit for bit, and nothing else; no row
        where its windows have left them behind."""
        assert (other.capacity, other.is_f16) == (self.capacity, self.is_f16)
        assert length <= other.length
        self.rewind(0)
        self.is_long = other.is_long
        if not all(rows.reaches(length) for rows in other.sliding):
            return
        blocks = -(-length // SLOT_BLOCK)
        self.keys[:, :, :blocks] = other.keys[:, :, :blocks]
        self.values[:, :, :length] = other.values[:, :, :length]
        for mine, theirs in zip(self.sliding, other.sliding, strict=True):
            mine.keys[:], mine.values[:], mine.base = theirs.keys, theirs.values, theirs.base
        self._copied(other, length)

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """Of the rows appended since `start`, keep `rows` (ascending offsets from it) bit for bit, drop the others."""
        moves = [(start + row, start + i) for i, row in enumerate(rows) if row != i]
        if moves:
            source = np.array([move[0] for move in moves], np.int64)
            target = np.array([move[1] for move in moves], np.int64)
            bases: dict[int, int] = {}
            capacities: dict[int, int] = {}
            for sliding in self.sliding:
                bases |= dict.fromkeys(sliding.layers, sliding.base)
                capacities |= dict.fromkeys(sliding.layers, sliding.capacity)
            for layer_idx, (keys, values) in enumerate(zip(*self.addresses(), strict=True)):
                base = bases.get(layer_idx, 0)
                copy_slots(
                    int(keys),
                    int(values),
                    source - base,
                    target - base,
                    self.num_key_value_heads,
                    self.head_dim,
                    capacities.get(layer_idx, self.capacity),
                    self.is_f16,
                )
        self._kept(start, rows)

    def _kept(self, start: int, rows: Sequence[int]) -> None:
        self.length = start + len(rows)
        if self.follower is not None:
            self.follower.keep_path(start, rows)

    def _copied(self, other: "KVCache", length: int) -> None:
        self.length = length
        if self.follower is not None and other.follower is not None:
            self.follower.copy_prefix(other.follower, length)

    def saved(self, length: int) -> dict[str, NDArray[Any]]:
        """The first `length` rows as named arrays, for `restore`; those of keys and values are this cache's memory."""
        arrays: dict[str, NDArray[Any]] = {
            "keys": self.keys[:, :, : -(-length // SLOT_BLOCK)],
            "values": self.values[:, :, :length],
        }
        if self.original_context:
            arrays["is_long"] = np.array([self.is_long], np.int64)
        for rows in self.sliding:
            arrays[f"keys.{rows.window}"], arrays[f"values.{rows.window}"] = rows.keys, rows.values
            arrays[f"base.{rows.window}"] = np.array([rows.base], np.int64)
        return arrays

    def restore(self, arrays: Mapping[str, NDArray[Any]], length: int) -> None:
        """Hold what `saved` gave, arrays of the shapes this cache's would have; they may be its own, filled in.

        Raises CheckpointError where a window does not lie around the newest row.
        """
        for name, mine in self.saved(length).items():
            assert arrays[name].shape == mine.shape
        for rows in self.sliding:
            base = int(arrays[f"base.{rows.window}"][0])
            first = max(0, length - rows.window + 1)
            if base % SLOT_BLOCK or not max(0, length - rows.capacity) <= base <= first:
                raise CheckpointError(f"base.{rows.window}: expected a block's beginning up to {first}, found {base}")
        self.keys[:, :, : -(-length // SLOT_BLOCK)] = arrays["keys"]
        self.values[:, :, :length] = arrays["values"]
        self.is_long = bool(self.original_context and arrays["is_long"][0])
        for rows in self.sliding:
            rows.keys[:], rows.values[:] = arrays[f"keys.{rows.window}"], arrays[f"values.{rows.window}"]
            rows.base = int(arrays[f"base.{rows.window}"][0])
        self.length = length


class LatentCache(KVCache):
    """What latent attention keeps of up to `capacity` positions: values (L, capacity, width), one compressed row each.

    keys (F, capacity, index width): the keys of the layers in `index_layers`, whose indexer chooses positions.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: str) -> None:
        assert spec.latent is not None
        self.capacity = -(-capacity // SLOT_BLOCK) * SLOT_BLOCK
        self.is_f16 = dtype == "f16"
        self.sliding = ()
        element = np.uint16 if self.is_f16 else np.float32
        self.index_layers = tuple(layer.layer_idx for layer in spec.layers if layer.indexer == "full")
        indexer = spec.latent.indexer
        index_width = 0 if indexer is None else padded(indexer.index_head_dim)
        self.keys = np.zeros((len(self.index_layers), self.capacity, index_width), element)
        self.values = np.zeros((spec.num_hidden_layers, self.capacity, latent_width(spec.latent)), element)
        self.length = 0

    def addresses(self) -> tuple[Ints, Ints]:
        keys = np.zeros(len(self.values), np.int64)
        for i, layer_idx in enumerate(self.index_layers):
            keys[layer_idx] = self.keys.ctypes.data + i * self.keys.strides[0]
        layers = np.arange(len(self.values), dtype=np.int64)
        return keys, self.values.ctypes.data + layers * self.values.strides[0]

    def copy_prefix(self, other: KVCache, length: int) -> None:
        assert (other.capacity, other.is_f16) == (self.capacity, self.is_f16)
        assert length <= other.length
        self.keys[:, :length], self.values[:, :length] = other.keys[:, :length], other.values[:, :length]
        self._copied(other, length)

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        source = start + np.array(rows, np.int64)
        for array in (self.keys, self.values):
            array[:, start : start + len(rows)] = array[:, source]
        self._kept(start, rows)

    def saved(self, length: int) -> dict[str, NDArray[Any]]:
        return {name: getattr(self, name)[:, :length] for name in ("keys", "values")}

    def restore(self, arrays: Mapping[str, NDArray[Any]], length: int) -> None:
        self.keys[:, :length], self.values[:, :length] = arrays["keys"], arrays["values"]
        self.length = length


def mtp_cache_spec(spec: ModelSpec, layer: LayerSpec) -> ModelSpec:
    """What the cache of the MTP head alone is made from."""
    return replace(spec, num_hidden_layers=1, layers=(replace(layer, layer_idx=0),))


def rows_kept(window: int, capacity: int) -> int:
    """Rows a layer with this window keeps of up to `capacity`: the window, STEP new ones, and whole blocks."""
    return min(capacity, -(-(window + STEP) // SLOT_BLOCK) * SLOT_BLOCK + SLOT_BLOCK)


def new_cache(spec: ModelSpec, capacity: int, dtype: str) -> KVCache:
    """The cache of one sequence of this model; dtype f16 or f32."""
    if spec.latent is not None:
        return LatentCache(spec, capacity, dtype)
    windows = [layer.sliding_window for layer in spec.layers]
    cache = KVCache(spec.num_hidden_layers, spec.num_key_value_heads, spec.head_dim, capacity, dtype, windows)
    if spec.rope.kind == "longrope":
        cache.original_context = spec.rope.original_max_position_embeddings
    return cache


def latent_width(latent: LatentSpec) -> int:
    """Numbers of one cached row: the latent and the rotated part, each in whole vectors."""
    return padded(latent.kv_lora_rank) + padded(latent.qk_rope_head_dim)


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Bytes one position takes in all layers that hold it, the keys of an indexer and the MTP head's rows included."""
    if spec.mtp is not None:
        alone = replace(mtp_cache_spec(spec, spec.mtp), mtp=None)
        return kv_bytes_per_token(replace(spec, mtp=None), dtype) + kv_bytes_per_token(alone, dtype)
    values = 2 * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim
    if spec.latent is not None:
        values = spec.num_hidden_layers * latent_width(spec.latent)
        if spec.latent.indexer is not None:
            full = sum(layer.indexer == "full" for layer in spec.layers)
            values += full * padded(spec.latent.indexer.index_head_dim)
    return values * (2 if dtype == "f16" else 4)


def kv_bytes(spec: ModelSpec, dtype: str, context: int) -> int:
    """Bytes of the cache of one sequence of up to `context` positions."""
    capacity = -(-context // SLOT_BLOCK) * SLOT_BLOCK
    if all(layer.sliding_window is None for layer in spec.layers):
        return kv_bytes_per_token(spec, dtype) * capacity
    each = kv_bytes_per_token(spec, dtype) // spec.num_hidden_layers
    return each * sum(rows_kept(layer.sliding_window or capacity, capacity) for layer in spec.layers)
