"""The attention memory of one sequence, all layers.

Owns the key and value arrays and how many slots hold rows; the kernels read and write them by address. Committed rows
lie in position order (slot = position); the rows of a forward are appended behind them and either kept or dropped.
Called by the model's one thread.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coli.errors import ContextLengthError
from coli.kernels.attention import copy_slots
from coli.kernels.latent import padded
from coli.model.config import LatentSpec, LayerSpec, ModelSpec

SLOT_BLOCK = 16


class Follower(Protocol):
    """What keeps rows of its own beside a cache's, and is told what becomes of those (coli.model.mtp)."""

    @property
    def nbytes(self) -> int: ...

    def rewind(self, length: int) -> None: ...

    def keep_path(self, start: int, rows: Sequence[int]) -> None: ...

    def copy_prefix(self, other: Any, length: int) -> None: ...


class KVCache:
    """Keys and values of up to `capacity` positions.

    Keys: (L, K, capacity/16, D, 16), 16 positions side by side, so that a score is a chain over D for 16 positions at
    once. Values: (L, K, capacity, D). float32, or float16 held as uint16.
    """

    follower: Follower | None = None

    def __init__(self, num_layers: int, num_key_value_heads: int, head_dim: int, capacity: int, dtype: str) -> None:
        self.capacity = -(-capacity // SLOT_BLOCK) * SLOT_BLOCK
        self.is_f16 = dtype == "f16"
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        element = np.uint16 if self.is_f16 else np.float32
        blocks = self.capacity // SLOT_BLOCK
        # zeros, not empty: lanes of a block that hold no position yet are computed too, then dropped
        self.keys = np.zeros((num_layers, num_key_value_heads, blocks, head_dim, SLOT_BLOCK), element)
        self.values = np.zeros((num_layers, num_key_value_heads, self.capacity, head_dim), element)
        self.length = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def addresses(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the keys and the values of each layer lie, each (L,)."""
        layers = np.arange(len(self.values), dtype=np.int64)
        return (
            self.key_address(0) + layers * self.keys.strides[0],
            self.value_address(0) + layers * self.values.strides[0],
        )

    def key_address(self, layer_idx: int) -> int:
        return int(self.keys.ctypes.data + layer_idx * self.keys.strides[0])

    def value_address(self, layer_idx: int) -> int:
        return int(self.values.ctypes.data + layer_idx * self.values.strides[0])

    def held(self, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The keys and values of the first `length` positions, as views: for saving a session, and for restoring it."""
        return self.keys[:, :, : -(-length // SLOT_BLOCK)], self.values[:, :, :length]

    def append(self, count: int) -> NDArray[np.int64]:
        """Reserve `count` slots behind the rows held; returns them (count,) in order."""
        if self.length + count > self.capacity:
            raise ContextLengthError(
                f"context: {self.length + count} positions are needed, {self.capacity} are allocated; raise --ctx"
            )
        slots = np.arange(self.length, self.length + count, dtype=np.int64)
        self.length += count
        return slots

    def rewind(self, length: int) -> None:
        """Forget every row from position `length` on."""
        assert 0 <= length <= self.length
        self.length = length
        if self.follower is not None:
            self.follower.rewind(length)

    def copy_prefix(self, other: "KVCache", length: int) -> None:
        """Hold the first `length` rows of `other`, a cache of the same shape, bit for bit, and nothing else."""
        assert (other.capacity, other.is_f16) == (self.capacity, self.is_f16)
        assert length <= other.length
        blocks = -(-length // SLOT_BLOCK)
        self.keys[:, :, :blocks] = other.keys[:, :, :blocks]
        self.values[:, :, :length] = other.values[:, :, :length]
        self._copied(other, length)

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """Of the rows appended since `start`, keep `rows` (ascending offsets from it) bit for bit, drop the others."""
        moves = [(start + row, start + i) for i, row in enumerate(rows) if row != i]
        if moves:
            source = np.array([move[0] for move in moves], np.int64)
            target = np.array([move[1] for move in moves], np.int64)
            for layer_idx in range(self.keys.shape[0]):
                copy_slots(
                    self.key_address(layer_idx),
                    self.value_address(layer_idx),
                    source,
                    target,
                    self.num_key_value_heads,
                    self.head_dim,
                    self.capacity,
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


class LatentCache(KVCache):
    """What latent attention keeps of up to `capacity` positions: values (L, capacity, width), one compressed row each.

    keys (F, capacity, index width): the keys of the layers in `index_layers`, whose indexer chooses positions.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: str) -> None:
        assert spec.latent is not None
        self.capacity = -(-capacity // SLOT_BLOCK) * SLOT_BLOCK
        self.is_f16 = dtype == "f16"
        element = np.uint16 if self.is_f16 else np.float32
        self.index_layers = tuple(layer.layer_idx for layer in spec.layers if layer.indexer == "full")
        indexer = spec.latent.indexer
        index_width = 0 if indexer is None else padded(indexer.index_head_dim)
        self.keys = np.zeros((len(self.index_layers), self.capacity, index_width), element)
        self.values = np.zeros((spec.num_hidden_layers, self.capacity, latent_width(spec.latent)), element)
        self.length = 0

    def addresses(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        keys = np.zeros(len(self.values), np.int64)
        for i, layer_idx in enumerate(self.index_layers):
            keys[layer_idx] = self.keys.ctypes.data + i * self.keys.strides[0]
        layers = np.arange(len(self.values), dtype=np.int64)
        return keys, self.values.ctypes.data + layers * self.values.strides[0]

    def held(self, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.keys[:, :length], self.values[:, :length]

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


def mtp_cache_spec(spec: ModelSpec, layer: LayerSpec) -> ModelSpec:
    """What the cache of the MTP head alone is made from."""
    return replace(spec, num_hidden_layers=1, layers=(replace(layer, layer_idx=0),))


def new_cache(spec: ModelSpec, capacity: int, dtype: str) -> KVCache:
    """The cache of one sequence of this model; dtype f16 or f32."""
    if spec.latent is not None:
        return LatentCache(spec, capacity, dtype)
    return KVCache(spec.num_hidden_layers, spec.num_key_value_heads, spec.head_dim, capacity, dtype)


def latent_width(latent: LatentSpec) -> int:
    """Numbers of one cached row: the latent and the rotated part, each in whole vectors."""
    return padded(latent.kv_lora_rank) + padded(latent.qk_rope_head_dim)


def kv_bytes_per_token(spec: ModelSpec, dtype: str) -> int:
    """Bytes one position takes in all layers, the keys of an indexer and the MTP head's rows included."""
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
