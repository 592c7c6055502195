"""Multi-head latent attention of one layer over the rows of a forward, in the absorbed form whatever their number.

Queries are taken into the latent space by each head's key matrix and what attention mixes is taken out of it by the
head's value matrix, so that a position is cached as one compressed row. Called by the transformer.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coli.kernels import activations, elementwise, indexer, matmul, rope
from coli.kernels import latent as kernel
from coli.kernels.tape import PHASES
from coli.model.attention import Rotation
from coli.model.config import IndexerSpec, LayerSpec, ModelSpec
from coli.model.layers import TILE, Machine, Projection, Rows
from coli.model.loader import IndexerWeights, LatentWeights, Linear
from coli.model.program import Program
from coli.store.layout import Kind, MatrixShape

LATENT_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says


class LatentAttention:
    """Compress, norm, rotate, cache, attend in the latent space, o."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, weights: LatentWeights) -> None:
        assert spec.latent is not None
        self._spec, self._latent = spec, spec.latent
        self._layer_idx = layer.layer_idx
        self._q_a_layernorm, self._kv_a_layernorm = weights.q_a_layernorm, weights.kv_a_layernorm
        inputs: tuple[Linear, ...] = (weights.q_proj, weights.kv_a_proj_with_mqa)
        self._indexer: Indexer | None = None
        if weights.indexer is not None and spec.latent.indexer is not None:
            self._indexer = Indexer(spec, spec.latent.indexer, layer, weights.indexer)
            inputs += (weights.indexer.wk, weights.indexer.weights_proj)
        self._chooses = layer.indexer != "none"
        self._in = Projection("latent_in", inputs)
        self._q_b: Projection | None = None
        if weights.q_b_proj is not None:
            from_latent = (weights.q_b_proj, weights.indexer.wq_b) if weights.indexer else (weights.q_b_proj,)
            self._q_b = Projection("latent_q", from_latent)
        N = spec.num_attention_heads
        self._k_up = HeadProjection(weights.k_up, N)
        self._v_up = HeadProjection(weights.v_up, N)
        self._o = Projection("o", (weights.o_proj,))

    def __call__(self, machine: Machine, x: Rows, program: Program, rotation: Rotation) -> Rows:
        """x (S, H) normed -> (S, tile_padded(H)); rows go into the caches that program.inputs names."""
        program.tape.phase = PHASES.index("attention")
        spec, latent, inputs = self._spec, self._latent, program.inputs
        S, N = len(x), spec.num_attention_heads
        nope, rotary, rank = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.kv_lora_rank
        threads = machine.threads_for(4 * S * N * spec.head_dim)
        compressed = self._in(machine, x)
        q_at, kv_at, *index_at = self._in.columns
        if self._q_b is None:
            q = compressed
        else:
            assert self._q_a_layernorm is not None
            assert latent.q_lora_rank is not None
            elementwise.rms_norm_heads(
                compressed, q_at, 1, latent.q_lora_rank, self._q_a_layernorm, LATENT_EPS, threads
            )
            q = self._q_b(machine, compressed[:, q_at : q_at + latent.q_lora_rank])
        elementwise.rms_norm_heads(compressed, kv_at, 1, rank, self._kv_a_layernorm, LATENT_EPS, threads)
        interleaved = spec.rope.interleaved
        rope.apply_rope(compressed, kv_at + rank, 1, rotary, rotary, *rotation, interleaved, threads)
        rope.apply_rope(q, nope, N, spec.head_dim, rotary, *rotation, interleaved, threads)
        rows_at = inputs.values[self._layer_idx]
        overflow = program.flags[self._layer_idx, 0, :threads]
        kernel.append_rows(compressed, kv_at, rank, rotary, rows_at, inputs.slots, program.is_f16, threads, overflow)
        if self._indexer is not None:
            assert self._q_b is not None
            self._indexer(machine, compressed, index_at, q, self._q_b.columns[1], program, rotation)

        width = kernel.padded(rank) + kernel.padded(rotary)
        query = machine.buffers.rows("latent_query", S, N * width).reshape(S, N, width)
        parts = machine.buffers.rows("latent_nope", S * N, nope)
        kernel.split_query(q, N, nope, rotary, parts, query, threads)
        self._k_up(machine, parts, query)
        context = machine.buffers.rows("latent_context", S, N * kernel.padded(rank)).reshape(S, N, -1)
        scratch = kernel.working_bytes(S, N, rank, rotary, program.capacity, machine.threads)
        kernel.attention(
            query,
            context,
            rows_at,
            inputs.prefix_len,
            inputs.path,
            inputs.path_len,
            spec.attention_scale,
            program.capacity,
            program.is_f16,
            machine.threads,
            machine.buffers.bytes("latent_attention", scratch),
            program.chosen if self._chooses else None,
        )
        v_dim = latent.v_head_dim
        values = machine.buffers.rows("latent_values", S, N * kernel.padded(v_dim)).reshape(S, N, -1)
        self._v_up(machine, context.reshape(S * N, -1)[:, :rank], values)
        heads = machine.buffers.rows("latent_heads", S, N * v_dim)
        kernel.join_heads(values, v_dim, heads, threads)
        out = self._o(machine, heads)
        program.tape.phase = 0
        return out


class Indexer:
    """Caches one key per position and chooses, for each row, the positions it attends."""

    def __init__(self, spec: ModelSpec, indexer: IndexerSpec, layer: LayerSpec, weights: IndexerWeights) -> None:
        assert spec.latent is not None
        self._spec, self._layer_idx = indexer, layer.layer_idx
        self._rotary = spec.latent.qk_rope_head_dim
        self._k_norm = weights.k_norm

    def __call__(
        self,
        machine: Machine,
        compressed: Rows,
        columns: Sequence[int],
        q: Rows,
        q_at: int,
        program: Program,
        rotation: Rotation,
    ) -> None:
        """Key and head weights start at `columns` of compressed (S, ...), queries at column q_at of q (S, ...)."""
        spec, inputs, S = self._spec, program.inputs, len(q)
        H, D, layer_idx = spec.index_n_heads, spec.index_head_dim, self._layer_idx
        threads = machine.threads_for(4 * S * H * D)
        k_at, w_at = columns
        indexer.layer_norm(compressed, k_at, *self._k_norm, D, LATENT_EPS, threads)
        rope.apply_rope(compressed, k_at, 1, D, self._rotary, *rotation, spec.interleaved, threads)
        rope.apply_rope(q, q_at, H, D, self._rotary, *rotation, spec.interleaved, threads)
        keys, capacity = inputs.keys[layer_idx], program.capacity
        overflow = program.flags[layer_idx, 2, :threads]
        kernel.append_rows(compressed, k_at, D, 0, keys, inputs.slots, program.is_f16, threads, overflow)
        if program.chosen is None:
            most = min(spec.index_topk, capacity)
            program.chosen = np.zeros((S, most), np.int64), np.ones(S, np.int64)
        scratch = indexer.working_bytes(H, D, capacity, machine.threads)
        indexer.select(
            q[:, q_at:],
            D,
            compressed[:, w_at : w_at + H],
            keys,
            inputs.prefix_len,
            inputs.path,
            inputs.path_len,
            spec.index_topk,
            *program.chosen,
            capacity,
            program.is_f16,
            machine.threads,
            machine.buffers.bytes("indexer", scratch),
        )


class HeadProjection:
    """One matrix per head, stacked (N * rows, cols) with rows a multiple of 16, each on its own rows of the input."""

    def __init__(self, stacked: Linear, heads: int) -> None:
        self._linear, self._tiles = stacked, stacked.tiles // heads
        one = MatrixShape(Kind(stacked.kind), TILE * self._tiles, stacked.cols)
        self._weights_step, self._scales_step = one.weights_bytes, one.scales_bytes

    def __call__(self, machine: Machine, x: Rows, out: NDArray[np.float32]) -> None:
        """x (S*N, cols), row s*N + h -> the first `rows` numbers of out (S, N, width)."""
        S, N, width = out.shape
        linear, cols = self._linear, x.shape[1]
        if machine.sight is not None:
            machine.sight.dense((linear,), x, heads=N)
        row_ids = (np.arange(S) * N + np.arange(N)[:, None]).reshape(-1)  # head by head
        blocks, jobs = np.zeros((N, 4), np.int64), matmul.job_table(N)
        step = matmul.x_bytes(linear.kind, S, linear.groups)
        for h in range(N):
            blocks[h] = h * S, S, linear.kind, h * step
        heads = np.arange(N)
        jobs[:, matmul.JOB_KIND], jobs[:, matmul.JOB_TILES] = linear.kind, self._tiles
        jobs[:, matmul.JOB_WEIGHTS] = linear.weights + heads * self._weights_step
        jobs[:, matmul.JOB_SCALES] = linear.scales + heads * self._scales_step
        jobs[:, matmul.JOB_GROUPS], jobs[:, matmul.JOB_ROWS] = linear.groups, S
        jobs[:, matmul.JOB_X], jobs[:, matmul.JOB_OUT] = heads * step, heads * width
        jobs[:, matmul.JOB_STRIDE] = N * width
        packed = machine.buffers.bytes("packed_heads", N * step)
        activations.pack_blocks(x, row_ids.astype(np.int64), blocks, packed, machine.threads_for(4 * S * N * cols))
        matmul.run_jobs(jobs, packed, out.reshape(-1), machine.threads_for(N * TILE * self._tiles * cols))
