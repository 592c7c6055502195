"""Grouped-query attention of one layer over the rows of a forward.

Owns projections, norms and rope of q and k; the cache belongs to the sequence. Called by the transformer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coli.kernels import attention as kernel
from coli.kernels import elementwise, rope
from coli.kernels.tape import PHASES
from coli.model.config import LayerSpec, ModelSpec
from coli.model.kv_cache import STEP, rows_kept
from coli.model.layers import Machine, Projection, Rows
from coli.model.loader import AttentionWeights
from coli.model.program import Program, RowInputs, WindowInputs

Rotation = tuple[NDArray[np.float32], NDArray[np.float32]]  # cos and sin, each (S, rotary_dim/2)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where each of the S rows of a forward sits in the cache, and what it sees of it.

    slots (S,): where its key and value go. prefix_len (S,): it sees slots 0..prefix_len-1, then the first path_len (S,)
    of path (S, P), in position order, its own slot last.
    """

    slots: NDArray[np.int64]
    prefix_len: NDArray[np.int64]
    path: NDArray[np.int64]
    path_len: NDArray[np.int64]


def row_paths(start: int, count: int, parents: NDArray[np.int64] | None) -> Paths:
    """The paths of `count` rows appended at slot `start`.

    A chain (parents None, or each row's parent the row before) needs no path: its prefix simply grows.
    """
    slots = np.arange(start, start + count, dtype=np.int64)
    if parents is None or np.array_equal(parents, np.arange(-1, count - 1)):
        return Paths(slots, slots + 1, np.zeros((count, 1), np.int64), np.zeros(count, np.int64))
    path_len = np.ones(count, np.int64)
    for row in range(count):
        if parents[row] >= 0:
            path_len[row] = path_len[parents[row]] + 1
    path = np.zeros((count, int(path_len.max())), np.int64)
    for row in range(count):
        depth = int(path_len[row])
        if depth > 1:
            path[row, : depth - 1] = path[parents[row], : depth - 1]
        path[row, depth - 1] = slots[row]
    return Paths(slots, np.full(count, start, np.int64), path, path_len)


class Attention:
    """q, k, v -> norms -> rope -> cache -> attention -> o."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, weights: AttentionWeights) -> None:
        self._spec = spec
        self._layer_idx = layer.layer_idx
        self._window = layer.sliding_window or 0
        self._qkv = Projection("qkv", (weights.q_proj, weights.k_proj, weights.v_proj))
        self._o = Projection("o", (weights.o_proj,))
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm
        self._sinks = weights.sinks

    def __call__(self, machine: Machine, x: Rows, program: Program, rotation: Rotation) -> Rows:
        """x (S, H) normed -> (S, tile_padded(H)); rows go into the caches that program.inputs names."""
        program.tape.phase = PHASES.index("attention")
        spec, inputs = self._spec, program.inputs
        S, N, K, D = len(x), spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        threads = machine.threads_for(4 * S * N * D)
        qkv = self._qkv(machine, x)
        q_at, k_at, v_at = self._qkv.columns
        self._norm(qkv, q_at, N, self._q_norm, threads)
        self._norm(qkv, k_at, K, self._k_norm, threads)
        if spec.clip_qkv is not None:
            for column, width in ((q_at, N * D), (k_at, K * D), (v_at, K * D)):
                elementwise.clip(qkv[:, column : column + width], spec.clip_qkv, threads)
        for column, heads in ((q_at, N), (k_at, K)):
            rope.apply_rope(qkv, column, heads, D, spec.rope.rotary_dim, *rotation, spec.rope.interleaved, threads)
        context = machine.buffers.rows("context", S, N * D)
        places: RowInputs | WindowInputs = inputs
        capacity, step = program.capacity, max(S, 1)
        if self._window in inputs.sliding:  # row by STEP rows, since not all of them have room at a time
            places, capacity, step = inputs.sliding[self._window], rows_kept(self._window, capacity), STEP
        for first in range(0, S, step):
            some = slice(first, min(first + step, S))
            if first > 0:
                assert isinstance(places, WindowInputs)
                keys, values = inputs.keys[self._layer_idx], inputs.values[self._layer_idx]
                moves = places.moves
                kernel.slide(keys, values, first, moves, first // STEP, K, D, capacity, program.is_f16, threads)
            self._attend(machine, program, qkv[some], context[some], places, some, capacity, threads)
        out = self._o(machine, context)
        program.tape.phase = 0
        return out

    def _attend(
        self,
        machine: Machine,
        program: Program,
        qkv: Rows,
        context: Rows,
        places: RowInputs | WindowInputs,
        some: slice,
        capacity: int,
        threads: int,
    ) -> None:
        """Append keys and values of `some` rows to a cache of `capacity` slots, then context (n, N*D) of their q."""
        spec, inputs = self._spec, program.inputs
        n, N, K, D = len(qkv), spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        q_at, k_at, v_at = self._qkv.columns
        keys, values = inputs.keys[self._layer_idx, some], inputs.values[self._layer_idx, some]
        overflow = program.flags[self._layer_idx, 0, :threads]
        kernel.kv_append(
            qkv, k_at, qkv, v_at, keys, values, places.slots[some], K, D, capacity, program.is_f16, threads, overflow
        )
        kernel.attention(
            qkv[:, q_at:],
            context,
            keys,
            values,
            places.prefix_len[some],
            places.path[some],
            inputs.path_len[some],
            self._window,
            spec.attention_scale,
            N,
            K,
            D,
            capacity,
            program.is_f16,
            machine.threads,
            most_positions=capacity,
            scratch=machine.buffers.bytes("attention", kernel.working_bytes(n, N, K, D, capacity, machine.threads)),
            sinks=self._sinks,
        )

    def _norm(self, qkv: Rows, column: int, heads: int, weight: NDArray[np.float32] | None, threads: int) -> None:
        if weight is None:
            return
        D, eps = self._spec.head_dim, self._spec.rms_norm_eps
        if self._spec.qk_norm == "row":
            elementwise.rms_norm_heads(qkv, column, 1, heads * D, weight, eps, threads)
        else:
            elementwise.rms_norm_heads(qkv, column, heads, D, weight, eps, threads)
