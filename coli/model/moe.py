"""The sparse MLP: route all rows, take the union of their experts, compute each while the others are being read.

Owns the grouping of rows by expert; the store decides which records are in memory, the kernels do the arithmetic.
Whatever order experts arrive in, a row's outputs are summed by ascending expert id. Called by the transformer.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coli.errors import NumericError
from coli.kernels import activations, elementwise, matmul, moe, routing
from coli.model.config import ModelSpec
from coli.model.layers import TILE, Machine, Mlp, Projection, Rows, flat, tile_padded
from coli.model.loader import MoeWeights
from coli.store.container import ExpertLayout
from coli.store.layout import RecordPart


class Experts(Protocol):
    """What the forward needs of the store (coli.store.expert_store)."""

    residency: NDArray[np.int64]

    def fetch(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> Iterator[NDArray[np.int64]]:
        """Yield each distinct expert once, in arrays, as their records become available."""
        ...

    def settle(self, committed_rows: NDArray[np.int64]) -> None: ...


class Moe:
    """One sparse layer over its experts."""

    def __init__(self, spec: ModelSpec, layer_idx: int, weights: MoeWeights, experts: Experts) -> None:
        self._spec = spec
        self._layer_idx = layer_idx
        self._experts = experts
        self._router = Projection("router_logits", (weights.gate,))
        self._matrices = ExpertMatrices(weights.experts)
        self._shared = Mlp(weights.shared_expert) if weights.shared_expert else None
        self._shared_gate = (
            Projection("shared_gate", (weights.shared_expert_gate,)) if weights.shared_expert_gate else None
        )

    def __call__(self, machine: Machine, x: Rows, hidden: Rows, prefill: bool) -> None:
        """x (S, H) normed; adds the routed experts' and then the shared expert's output to hidden (S, H)."""
        S, A, H = x.shape[0], self._spec.num_experts_per_tok, self._spec.hidden_size
        expert_ids, routing_weights = self._route(self._router(machine, x))
        order = np.argsort(expert_ids.reshape(-1), kind="stable")  # pairs (row, rank) grouped by expert
        counts = np.bincount(expert_ids.reshape(-1), minlength=self._spec.num_experts)
        starts = np.cumsum(counts) - counts
        outputs = machine.buffers.rows(
            "expert_outputs", S * A, tile_padded(H)
        )  # one row per pair, in the order of arrival
        place = np.empty(S * A, np.int64)
        done = 0
        addresses = self._experts.residency[self._layer_idx]
        for batch in self._experts.fetch(self._layer_idx, expert_ids, prefill=prefill):
            pairs = np.concatenate([order[starts[e] : starts[e] + counts[e]] for e in batch])
            out = outputs[done : done + len(pairs)]
            self._matrices.compute(machine, x, pairs // A, counts[batch], addresses[batch], out)
            place[pairs] = np.arange(done, done + len(pairs))
            done += len(pairs)
        moe.combine(hidden, outputs, place.reshape(S, A), routing_weights, machine.threads)
        if self._shared is not None:
            shared = self._shared(machine, x)
            if self._shared_gate is not None:
                elementwise.gate_rows(shared, self._shared_gate(machine, x)[:, 0])
            elementwise.add(hidden, shared)

    def _route(self, router_logits: Rows) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(S, E) -> expert_ids (S, A) ascending, routing_weights (S, A)."""
        spec = self._spec
        S, A = router_logits.shape[0], spec.num_experts_per_tok
        expert_ids, weights = np.empty((S, A), np.int64), np.empty((S, A), np.float32)
        bad = routing.route(
            router_logits[:, : spec.num_experts],
            A,
            routing.SOFTMAX,
            None,
            1,
            1,
            routing.GROUPS_NONE,
            spec.norm_topk_prob,
            spec.routed_scaling_factor,
            expert_ids,
            weights,
        )
        if bad:
            raise NumericError(f"layer {self._layer_idx}: the router's input is not a number; the weights are damaged")
        return expert_ids, weights


class ExpertMatrices:
    """The matrices inside a record, as jobs of the matmul kernel."""

    def __init__(self, layout: ExpertLayout) -> None:
        gate, up, down = (layout.parts[name] for name in ("gate", "up", "down"))
        self._down = down
        self._I, self._I_padded = gate.rows, tile_padded(gate.rows)
        # gate and up of one kind lie back to back, weights and scales: one matrix of twice the rows
        self._gate_up = ((gate, 2),) if gate.kind == up.kind else ((gate, 1), (up, 1))

    def compute(
        self,
        machine: Machine,
        x: Rows,
        row_ids: NDArray[np.int64],
        counts: NDArray[np.int64],
        addresses: NDArray[np.int64],
        out: Rows,
    ) -> None:
        """Experts at `addresses` (U,) on the rows of x that chose them, grouped by expert (`counts` rows each).

        row_ids: (P,) rows of x, P = sum(counts). out: (P, tile_padded(H)).
        """
        P = len(row_ids)
        gate_up = machine.buffers.rows("expert_gate_up", P, 2 * self._I_padded)
        self._multiply(machine, self._gate_up, x, row_ids, counts, addresses, gate_up)
        hidden = machine.buffers.rows("expert_hidden", P, self._I)
        elementwise.swiglu(gate_up, self._I, self._I_padded, hidden, machine.threads)
        all_rows = np.arange(P, dtype=np.int64)
        self._multiply(machine, ((self._down, 1),), hidden, all_rows, counts, addresses, out)

    def _multiply(
        self,
        machine: Machine,
        parts: tuple[tuple[RecordPart, int], ...],
        x: Rows,
        row_ids: NDArray[np.int64],
        counts: NDArray[np.int64],
        addresses: NDArray[np.int64],
        out: Rows,
    ) -> None:
        """Every part (times the matrices fused into it) of every expert, outputs of the parts side by side."""
        U = len(counts)
        firsts = np.cumsum(counts) - counts
        jobs = matmul.job_table(len(parts) * U)
        blocks = np.empty((len(parts) * U, 4), np.int64)
        at, column = 0, 0
        for i, (part, fused) in enumerate(parts):
            groups, tiles = part.groups, fused * part.tiles
            sizes = np.array([matmul.x_bytes(part.kind, int(count), groups) for count in counts], np.int64)
            starts = at + np.cumsum(sizes) - sizes
            at += int(sizes.sum())
            span = slice(i * U, (i + 1) * U)
            blocks[span] = np.stack([firsts, counts, np.full(U, part.kind), starts], axis=1)
            rows = jobs[span]
            rows[:, matmul.JOB_KIND], rows[:, matmul.JOB_GROUPS], rows[:, matmul.JOB_TILES] = part.kind, groups, tiles
            rows[:, matmul.JOB_WEIGHTS] = addresses + part.weights_offset
            rows[:, matmul.JOB_SCALES] = addresses + (part.scales_offset or 0)
            rows[:, matmul.JOB_ROWS], rows[:, matmul.JOB_X] = counts, starts
            rows[:, matmul.JOB_OUT], rows[:, matmul.JOB_STRIDE] = firsts * out.shape[1] + column, out.shape[1]
            column += tiles * TILE
        packed = machine.buffers.bytes("expert_packed", at)
        activations.pack_blocks(x, row_ids, blocks, packed, machine.threads)
        matmul.run_jobs(jobs, packed, flat(out), machine.threads)
