"""The sparse MLP: route all rows, take the union of their experts, compute each while the others are being read.

Records router, expert matrices and the sum onto a program's tape; the store decides which records are in memory.
Whatever order experts arrive in, a row's outputs are summed by ascending expert id. Called by the transformer.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.kernels import activations, elementwise, experts, matmul, moe, routing
from coli.kernels.tape import PHASES
from coli.model.config import ModelSpec
from coli.model.layers import TILE, Machine, Mlp, Projection, Rows, scaled_add, spread, tile_padded
from coli.model.loader import MoeWeights
from coli.model.program import Ints, Program, SparsePoint
from coli.store.container import ExpertLayout

_SCORING = {"softmax": routing.SOFTMAX, "sigmoid": routing.SIGMOID, "sparsemixer": routing.SPARSEMIXER}
_GROUP_MODES = {"none": routing.GROUPS_NONE, "max": routing.GROUPS_MAX, "top2": routing.GROUPS_TOP2}


class Experts(Protocol):
    """What the forward needs of the store (coli.store.expert_store)."""

    residency: NDArray[np.int64]
    reads_ahead: bool  # whether `prefetch` is worth a guess

    def fetch(self, layer_idx: int, expert_ids: Ints, *, prefill: bool) -> Iterator[Ints]:
        """Yield each distinct expert once, in arrays, as their records become available."""
        ...

    def touched(self, layer_idx: int, expert_ids: Ints, *, prefill: bool = False) -> None:
        """Account for a layer that ran entirely from `residency`."""
        ...

    def touched_all(self, layer_idxs: list[int], expert_ids: Ints) -> None:
        """Account for a forward of one row whose layers, expert_ids (n, A), all ran so."""
        ...

    def prefetch(self, layer_idx: int, expert_ids: Sequence[int]) -> None:
        """Read experts that may be wanted soon, behind all demanded reads."""
        ...

    def settle(self, committed_rows: Ints | int) -> None: ...


class Moe:
    """One sparse layer over its experts."""

    def __init__(self, spec: ModelSpec, layer_idx: int, weights: MoeWeights, residency: Ints) -> None:
        self._spec = spec
        self._layer_idx = layer_idx
        self._residency = residency[layer_idx]  # (E,)
        self._router = Projection("router_logits", (weights.gate,))
        self._correction_bias = weights.e_score_correction_bias  # (E,)
        self._matrices = ExpertMatrices(weights.experts, spec.swiglu_limit)
        self._shared = Mlp(weights.shared_expert) if weights.shared_expert else None
        gate = weights.shared_expert_gate
        self._shared_gate = Projection("shared_gate", (gate,)) if gate else None

    def __call__(self, machine: Machine, x: Rows, hidden: Rows, program: Program) -> None:
        """x (S, H) normed; adds the routed experts' and then the shared expert's output to hidden (S, H)."""
        spec = self._spec
        S, A, H = len(x), spec.num_experts_per_tok, spec.hidden_size
        program.tape.phase = PHASES.index("experts")
        point, routing_weights = self._route(machine, self._router(machine, x), program)
        index = np.zeros((S, A), np.int64)
        outputs = machine.buffers.rows("expert_outputs", S * A, spread(tile_padded(H)))
        self._matrices.record(machine, x, self._residency, point, index, outputs, program)
        point.sum_call = len(program.tape)
        program.points.append(point)
        moe.combine(hidden, outputs, index, routing_weights, machine.threads_for(2 * S * A * H))
        if self._shared is not None:
            shared = self._shared(machine, x)
            threads = machine.threads_for(S * H)
            if self._shared_gate is not None:
                elementwise.gate_rows(shared[:, :H], self._shared_gate(machine, x)[:, 0], threads)
            scaled_add(hidden, shared, spec.residual_multiplier, threads)
        program.tape.phase = 0

    def guess(self, machine: Machine, x: Rows) -> Ints:
        """x (S, H) normed: record the router on rows that are not this layer's yet; expert_ids (S, A) it will leave."""
        S, A = len(x), self._spec.num_experts_per_tok
        expert_ids, weights = np.zeros((S, A), np.int64), np.zeros((S, A), np.float32)
        self._choose(machine, self._router(machine, x), expert_ids, weights, np.zeros(machine.threads, np.int64))
        return expert_ids

    def _route(self, machine: Machine, router_logits: Rows, program: Program) -> tuple[SparsePoint, Rows]:
        """(S, E) -> the layer's point with expert_ids (S, A) ascending, and routing_weights (S, A)."""
        S, E, A = len(router_logits), self._spec.num_experts, self._spec.num_experts_per_tok
        weights = np.zeros((S, A), np.float32)
        point = SparsePoint(
            self._layer_idx,
            plan_call=0,
            sum_call=0,
            expert_ids=np.zeros((S, A), np.int64),
            batch=np.zeros(E, np.int64),
            batch_count=np.array([experts.ALL_RESIDENT], np.int64),
            done=np.zeros(1, np.int64),
        )
        self._choose(machine, router_logits, point.expert_ids, weights, program.flags[self._layer_idx, 1])
        point.plan_call = len(program.tape)
        return point, weights

    def _choose(self, machine: Machine, router_logits: Rows, expert_ids: Ints, weights: Rows, bad: Ints) -> None:
        """(S, E) -> expert_ids and weights (S, A); bad (threads,) counts rows with a NaN."""
        spec = self._spec
        S, E, A = len(router_logits), spec.num_experts, spec.num_experts_per_tok
        threads = machine.threads_for(S * E * A)
        routing.route(
            router_logits[:, :E],
            A,
            _SCORING[spec.scoring_func],
            self._correction_bias,
            spec.n_group,
            spec.topk_group,
            _GROUP_MODES[spec.group_score],
            spec.norm_topk_prob,
            spec.routed_scaling_factor * spec.residual_multiplier,
            expert_ids,
            weights,
            threads,
            bad=bad[:threads],
            jitter=spec.router_jitter_noise,
        )


class ExpertMatrices:
    """The matrices inside a record of one layer."""

    def __init__(self, layout: ExpertLayout, swiglu_limit: float | None) -> None:
        self._swiglu_limit = swiglu_limit
        gate, up, down = (layout.parts[name] for name in ("gate", "up", "down"))
        self._width, self._padded = gate.rows, TILE * gate.tiles
        # gate and up of one kind lie back to back, weights, scales and biases: one matrix of twice the rows
        inputs = [(gate, 2, 0)] if gate.kind == up.kind else [(gate, 1, 0), (up, 1, self._padded)]
        self._parts = np.array(
            [
                [
                    part.kind,
                    part.groups,
                    fused * part.tiles,
                    part.weights_offset,
                    part.scales_offset or 0,
                    column,
                    part.bias_offset or 0,
                ]
                for part, fused, column in [*inputs, (down, 1, 0)]
            ],
            np.int64,
        )

    def record(
        self,
        machine: Machine,
        x: Rows,
        residency: Ints,
        point: SparsePoint,
        index: Ints,
        outputs: Rows,
        program: Program,
    ) -> None:
        """Record plan, gate and up, swiglu, down: outputs (S*A, >= H), placed as `index` (S, A) will say."""
        S, A = point.expert_ids.shape
        E, n, P = len(residency), len(self._parts) - 1, S * A
        tape, buffers = program.tape, machine.buffers
        gate_up = buffers.rows("expert_gate_up", P, spread(2 * self._padded))
        hidden = buffers.rows("expert_hidden", P, self._width)
        rows_in, every_row = np.zeros(P, np.int64), np.arange(P, dtype=np.int64)
        most = min(E, P)
        blocks_in, blocks_down = np.zeros((n * most, 4), np.int64), np.zeros((most, 4), np.int64)
        jobs_in, jobs_down = matmul.job_table(n * most), matmul.job_table(most)
        packed_in = buffers.bytes("expert_packed_in", self._packed_bytes(self._parts[:-1], P, most))
        packed_down = buffers.bytes("expert_packed_down", self._packed_bytes(self._parts[-1:], P, most))
        threads = machine.threads_for(P * x.shape[1] * 16)
        if machine.sight is not None:
            machine.sight.experts(point, x, index, hidden)

        # the plan's arguments name those of the calls behind it, so these are noted first and placed behind it
        with tape.held_back() as calls:
            activations.pack_blocks(x, rows_in, blocks_in, packed_in, machine.threads_for(4 * P * x.shape[1]))
            pack_in = tape.last_arguments
            matmul.run_jobs(jobs_in, packed_in, gate_up.reshape(-1), threads)
            multiply_in = tape.last_arguments
            self._activate(gate_up, hidden, machine.threads_for(8 * hidden.size))
            activate = tape.last_arguments
            activations.pack_blocks(hidden, every_row, blocks_down, packed_down, machine.threads_for(4 * hidden.size))
            pack_down = tape.last_arguments
            matmul.run_jobs(jobs_down, packed_down, outputs.reshape(-1), threads)
            multiply_down = tape.last_arguments
        experts.plan_experts(
            point.expert_ids,
            residency,
            point.batch,
            point.batch_count,
            tape.status,
            1 + point.layer_idx,
            point.done,
            index,
            rows_in,
            self._parts,
            (blocks_in, jobs_in, blocks_down, jobs_down),
            (pack_in, multiply_in, activate, pack_down, multiply_down),
            (gate_up.strides[0] // 4, outputs.strides[0] // 4),
        )
        tape.place(calls)

    def _activate(self, gate_up: Rows, hidden: Rows, threads: int) -> None:
        if self._swiglu_limit is None:
            elementwise.swiglu(gate_up, self._width, self._padded, hidden, threads)
        else:
            elementwise.clamped_swiglu(gate_up, self._width, self._padded, self._swiglu_limit, hidden, threads)

    @staticmethod
    def _packed_bytes(parts: Ints, pairs: int, blocks: int) -> int:
        return sum(pairs * activations.x_stride(int(part[0]), int(part[1])) + 64 * blocks for part in parts)
