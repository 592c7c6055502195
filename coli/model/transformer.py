"""The forward: rows of token ids in, logits out. One page, in execution order.

Does not know that speculation exists: it gets rows with positions and parents, appends them to the cache of their
sequence and computes them; the caller keeps or drops them. One thread calls it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from coli.errors import NumericError
from coli.kernels import elementwise, quantize, rope
from coli.kernels.tape import PHASES, Tape
from coli.model.attention import Attention, Paths, Rotation, row_paths
from coli.model.config import ModelSpec
from coli.model.kv_cache import STEP, KVCache
from coli.model.layer_copies import LayerCopies
from coli.model.layers import Buffers, Machine, Mlp, Projection, Rows, norm, scaled_add, tile_padded
from coli.model.loader import LatentWeights, LayerWeights, ModelWeights, MoeWeights
from coli.model.program import Guess, Ints, Program, RowInputs, SparsePoint
from coli.model.rotary import rope_frequencies
from coli.model.sight import DenseInput, ExpertInputs, Look, Sight

if TYPE_CHECKING:  # what a model does not have is not imported either
    from coli.model.latent_attention import LatentAttention
    from coli.model.moe import Experts, Moe
    from coli.model.mtp import MtpHead

MAX_TREE_ROWS = 64  # more rows than one verify has are a chain, which needs no paths
MAX_PROGRAMS = 80  # tapes kept, one per number of rows and cache shape
MAX_LONG_PROGRAMS = 8  # of these for more rows than a verify has: their memory grows with the rows


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one sequence in a forward; fields as the arguments of `Transformer.forward`."""

    cache: KVCache
    token_ids: Ints
    positions: Ints
    parents: Ints | None


class Layer:
    """One decoder layer: attention and MLP, each behind its norm, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, weights: LayerWeights, residency: Ints | None) -> None:
        self._eps = spec.rms_norm_eps
        self._multiplier = spec.residual_multiplier
        self._norms = (
            (weights.input_layernorm, weights.input_layernorm_bias),
            (weights.post_attention_layernorm, weights.post_attention_layernorm_bias),
        )
        self._attention: Attention | LatentAttention
        if isinstance(weights.attention, LatentWeights):
            from coli.model.latent_attention import LatentAttention

            self._attention = LatentAttention(spec, weights.spec, weights.attention)
        else:
            self._attention = Attention(spec, weights.spec, weights.attention)
        self._mlp: Mlp | None = None
        self._moe: Moe | None = None
        if isinstance(weights.mlp, MoeWeights):
            from coli.model.moe import Moe

            assert residency is not None
            self._moe = Moe(spec, weights.spec.layer_idx, weights.mlp, residency)
        else:
            self._mlp = Mlp(weights.mlp)

    def __call__(self, machine: Machine, hidden: Rows, program: Program, rotation: Rotation) -> None:
        """hidden (S, H), updated in place."""
        threads = machine.threads_for(hidden.size)
        normed = machine.buffers.rows("normed", *hidden.shape)
        norm(hidden, *self._norms[0], self._eps, normed, threads)
        scaled_add(hidden, self._attention(machine, normed, program, rotation), self._multiplier, threads)
        norm(hidden, *self._norms[1], self._eps, normed, threads)
        if self._moe is not None:
            self._moe(machine, normed, hidden, program)
        else:
            assert self._mlp is not None
            scaled_add(hidden, self._mlp(machine, normed), self._multiplier, threads)

    @property
    def is_sparse(self) -> bool:
        return self._moe is not None

    def guess(self, machine: Machine, hidden: Rows) -> Ints:
        """Record a sparse layer's router on hidden (S, H) of an earlier one: expert_ids (S, A)."""
        assert self._moe is not None
        normed = machine.buffers.rows("guess_normed", *hidden.shape)
        norm(hidden, *self._norms[1], self._eps, normed, machine.threads_for(hidden.size))
        return self._moe.guess(machine, normed)


@dataclass(frozen=True, slots=True)
class Head:
    """What turns rows into logits: a tape, the rows it reads (n, H), and the logits (n, V) it leaves."""

    tape: Tape
    chosen: Rows
    logits: Rows


class Transformer:
    """All layers of one model over one store of experts."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, experts: Experts | None, threads: int) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab_size
        self.weights = weights
        self._experts = experts
        self._machine = Machine(Buffers(), threads)
        residency = None if experts is None else experts.residency
        self._layers = [Layer(spec, layer, residency) for layer in weights.layers]
        self._copies = LayerCopies([(replace(layer.spec, layer_idx=0), type(layer.mlp)) for layer in weights.layers])
        self._lm_head = Projection("logits", (weights.lm_head,))
        self.frequencies = rope_frequencies(spec.rope)
        self._programs: OrderedDict[tuple[int, int, bool], Program] = OrderedDict()
        self._heads: dict[int, Head] = {}
        self._last: Program | None = None
        self._replay_s = 0.0
        self._forgotten_cycles = np.zeros(len(PHASES), np.int64)  # of programs that were dropped
        self.mtp: MtpHead | None = None
        if weights.mtp is not None:
            from coli.model.mtp import MtpHead

            self.mtp = MtpHead(self, weights.mtp, Layer(spec, weights.mtp.layer, residency), self._machine)

    def forward(
        self,
        cache: KVCache,
        token_ids: Ints,
        positions: Ints,
        parents: Ints | None,
        logit_rows: Ints,
        *,
        prefill: bool,
    ) -> NDArray[np.float32]:
        """S rows -> logits (len(logit_rows), V) float32, valid until the next forward; the rows go into `cache`.

        Args:
            token_ids, positions: (S,) int64.
            parents: (S,) row index of each row's parent, -1 for the rows already in the cache; None for a chain.
            logit_rows: rows whose logits are wanted.
        """
        return self.forward_many([RowGroup(cache, token_ids, positions, parents)], logit_rows, prefill=prefill)

    def forward_many(self, groups: Sequence[RowGroup], logit_rows: Ints, *, prefill: bool) -> NDArray[np.float32]:
        """The rows of several sequences side by side in one batch union: every row gets the bits it gets alone.

        Each group has a cache of its own, all of one capacity and type; more than MAX_TREE_ROWS rows together only of
        chains without windows, or of one group. logit_rows counts through the groups in order. Returns and keeps what
        `forward` does.
        """
        S = sum(len(group.token_ids) for group in groups)
        first = groups[0].cache
        chains = all(group.parents is None and not group.cache.reads_alone for group in groups)
        assert len(groups) == 1 or S <= MAX_TREE_ROWS or chains
        assert all((g.cache.capacity, g.cache.is_f16) == (first.capacity, first.is_f16) for g in groups)
        program = self._program(S, first)
        program.flags[:] = 0
        at = 0
        for group in groups:
            start, count = group.cache.length, len(group.token_ids)
            group.cache.append(count)
            self._fill(program.inputs, slice(at, at + count), group, row_paths(start, count, group.parents))
            at += count
        # Python hears Ctrl-C between replays only: a prefill chunk goes layer by layer.
        ends = program.layer_ends if S > MAX_TREE_ROWS else program.layer_ends[-1:]
        for _ in self._run(program, ends, prefill):
            pass
        self._last = program
        _check(program)
        if self.mtp is not None:
            self._tell(self.mtp, groups, program.hidden, prefill)
        return self._logits(program.hidden, logit_rows)

    def _tell(self, head: MtpHead, groups: Sequence[RowGroup], hidden: Rows, prefill: bool) -> None:
        """Hand the rows of each sequence to what its MTP head keeps."""
        from coli.model.mtp import MtpMemory

        at = 0
        for group in groups:
            count, memory = len(group.token_ids), group.cache.follower
            if isinstance(memory, MtpMemory):
                start = group.cache.length - count
                head.take(memory, start, group.token_ids, hidden[at : at + count], prefill=prefill)
            at += count

    def watch(self, cache: KVCache, token_ids: Ints, look: Look) -> None:
        """A chain of S rows through all layers as in `forward`; `look` sees what every matrix reads, in order.

        The rows go into `cache`. Raises NumericError where a layer leaves the range of its numbers.
        """
        start, S = cache.length, len(token_ids)
        cache.append(S)
        sight = Sight(Tape())
        program = self._record(S, cache, sight.tape, replace(self._machine, sight=sight))
        group = RowGroup(cache, token_ids, np.arange(start, start + S), None)
        self._fill(program.inputs, slice(0, S), group, row_paths(start, S, None))
        call = 0
        for seen in sight.inputs:
            if isinstance(seen, DenseInput):
                call = self._replay(program, call, seen.call)
                seen.show(look)
            else:
                self._replay(program, call, seen.point.plan_call)
                self._stream(program, seen.point, prefill=True, watching=(seen, look))
                call = seen.point.sum_call
        self._replay(program, call)
        _check(program)
        norm(program.hidden, self.weights.norm, self.weights.norm_bias, self.spec.rms_norm_eps, program.hidden)
        look.dense((self.weights.lm_head,), program.hidden)
        self.settle(np.arange(S))

    def first_bad_layer(self) -> int | None:
        """Compute the rows of the last forward again, layer by layer: the first layer that gives NaN or infinity.

        -1 is the embedding. None when all are finite, so that the final norm or the output matrix is to blame.
        """
        program = self._last
        assert program is not None
        ends = [program.layers_start, *program.layer_ends]
        for layer_idx, _ in enumerate(self._run(program, ends, prefill=False), start=-1):
            if not np.isfinite(program.hidden).all():
                return layer_idx
        return None

    def settle(self, committed_rows: Ints | int) -> None:
        """Tell the expert store which rows of the last forward, or how many of the first, were committed."""
        if self._experts is not None:
            self._experts.settle(committed_rows)

    @property
    def buffer_bytes(self) -> int:
        """Scratch memory in use."""
        return self._machine.buffers.nbytes

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of all forwards so far by phase (attention, experts, other), waiting for reads not included."""
        tapes = [program.tape for program in self._programs.values()] + [head.tape for head in self._heads.values()]
        tapes += [] if self.mtp is None else self.mtp.tapes()
        cycles = sum((tape.cycles for tape in tapes), self._forgotten_cycles)
        total = int(cycles.sum())
        shares = cycles / total if total else np.eye(len(PHASES))[0]
        return {name: float(share) * self._replay_s for name, share in zip(PHASES, shares, strict=True)}

    def replay_all(self, program: Program, *, prefill: bool) -> None:
        """A program recorded elsewhere, from its first call to its last. Raises NumericError."""
        for _ in self._run(program, [len(program.tape)], prefill):
            pass
        _check(program)

    def replay_tape(self, tape: Tape) -> None:
        """A tape that needs no experts."""
        began = time.perf_counter()
        tape.run(0)
        self._replay_s += time.perf_counter() - began

    def _run(self, program: Program, ends: Sequence[int], prefill: bool) -> Iterator[None]:
        """Replay the tape, bringing experts where it stops for them; yields behind each of `ends` (its call numbers).

        The last of `ends` is the end of the tape.
        """
        call, at = 0, 0
        for end in ends:
            while call < end:
                stop = self._replay(program, call, end)
                if stop == end:
                    call = end
                    break
                stopped = next(i for i in range(at, len(program.points)) if program.points[i].plan_call == stop)
                self._touch(program.points[at:stopped], prefill)
                self._stream(program, program.points[stopped], prefill)
                call, at = program.points[stopped].sum_call, stopped + 1
            yield
        self._touch(program.points[at:], prefill)

    def _replay(self, program: Program | Head, start: int, stop: int | None = None) -> int:
        began = time.perf_counter()
        end = program.tape.run(start, stop)
        self._replay_s += time.perf_counter() - began
        return end

    def _stream(
        self, program: Program, point: SparsePoint, prefill: bool, watching: tuple[ExpertInputs, Look] | None = None
    ) -> None:
        """Compute a sparse layer batch by batch while its missing experts are being read."""
        assert self._experts is not None
        point.done[0] = 0
        batches = self._experts.fetch(point.layer_idx, point.expert_ids, prefill=prefill)
        if guess := program.guesses.get(point.layer_idx):
            self._replay(program, guess.start, guess.stop)
            self._experts.prefetch(guess.layer_idx, guess.expert_ids.ravel().tolist())
        for batch in batches:
            point.take(batch)
            earlier = int(point.done[0])
            self._replay(program, point.plan_call, point.sum_call)
            if watching is not None:
                seen, look = watching
                for expert_id in batch:
                    seen.show(look, int(expert_id), earlier)
        point.take_all()

    def _touch(self, points: list[SparsePoint], prefill: bool) -> None:
        """Tell the store about layers that ran without it."""
        if not points:
            return
        assert self._experts is not None
        if len(points[0].expert_ids) == 1 and not prefill and len(points) > 1:
            self._experts.touched_all(
                [point.layer_idx for point in points], np.concatenate([point.expert_ids for point in points])
            )
            return
        for point in points:
            self._experts.touched(point.layer_idx, point.expert_ids, prefill=prefill)

    def _logits(self, hidden: Rows, logit_rows: Ints) -> NDArray[np.float32]:
        if not len(logit_rows):
            return np.empty((0, self.vocab_size), np.float32)
        head = self._heads.get(len(logit_rows)) or self._record_head(len(logit_rows))
        head.chosen[:] = hidden[logit_rows]
        self._replay(head, 0)
        return head.logits

    def _record_head(self, count: int) -> Head:
        """The tape of the final norm and the output matrix for `count` rows."""
        buffers, tape = self._machine.buffers, Tape()
        buffers.rows("logits", max(count, MAX_TREE_ROWS), tile_padded(self.vocab_size))  # one for all a verify can have
        chosen = buffers.rows("chosen", max(count, MAX_TREE_ROWS), self.spec.hidden_size)[:count]
        with tape.recording():
            norm(chosen, self.weights.norm, self.weights.norm_bias, self.spec.rms_norm_eps, chosen)
            logits = self._lm_head(self._machine, chosen)[:, : self.vocab_size]
            if self.spec.logits_scaling != 1.0:
                elementwise.scale(logits, 1.0 / self.spec.logits_scaling)
        self._heads[count] = Head(tape, chosen, logits)
        return self._heads[count]

    def _program(self, S: int, cache: KVCache) -> Program:
        """The tape for S rows and this cache's shape, recorded on first use."""
        key = (S, cache.capacity, cache.is_f16)
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        program = self._programs[key] = self._record(S, cache, Tape(), self._machine)
        long = [kept for kept in self._programs if kept[0] > MAX_TREE_ROWS]
        if len(long) > MAX_LONG_PROGRAMS:
            self._forget(long[0])
        if len(self._programs) > MAX_PROGRAMS:
            self._forget(next(iter(self._programs)))
        return program

    def _forget(self, key: tuple[int, int, bool]) -> None:
        """Drop a program; the account of time keeps what it took."""
        self._forgotten_cycles = self._forgotten_cycles + self._programs.pop(key).tape.cycles

    def _record(self, S: int, cache: KVCache, tape: Tape, machine: Machine) -> Program:
        spec, embed = self.spec, self.weights.embed_tokens
        P = MAX_TREE_ROWS if S <= MAX_TREE_ROWS else 1
        inputs = RowInputs.allocate(S, P, spec.num_hidden_layers, [rows.window for rows in cache.sliding])
        hidden = machine.buffers.rows("hidden", S, spec.hidden_size)
        flags = np.zeros((spec.num_hidden_layers, 3, machine.threads), np.int64)
        program = Program(tape, inputs, hidden, cache.capacity, cache.is_f16, flags)
        with program.tape.recording():
            factors, tables = np.array([spec.rope.attention_factor, spec.rope.long_attention_factor]), None
            if spec.rope.kind == "longrope":
                tables = inputs.rope_tables
            rotation = rope.rope_table(inputs.positions, self.frequencies, factors, tables)
            quantize.embed_rows(embed.kind, embed.weights, embed.scales, inputs.token_ids, embed.groups, hidden)
            if spec.embedding_multiplier != 1.0:
                elementwise.scale(hidden, spec.embedding_multiplier)
            program.layers_start = len(program.tape)
            recording = self._copies.recording(program) if machine.sight is None else None
            for layer_idx, layer in enumerate(self._layers):
                if recording is None:
                    layer(machine, hidden, program, rotation)
                elif not recording.copy(layer_idx):
                    with recording.layer(layer_idx):
                        layer(machine, hidden, program, rotation)
                program.layer_ends.append(len(program.tape))
            if recording is not None:
                recording.end()
            if self._experts is not None and self._experts.reads_ahead and S <= MAX_TREE_ROWS and machine.sight is None:
                self._record_guesses(program, machine)
        return program

    def _record_guesses(self, program: Program, machine: Machine) -> None:
        """For each sparse layer but the last: the next one's router on the rows its own router sees."""
        sparse = [layer_idx for layer_idx, layer in enumerate(self._layers) if layer.is_sparse]
        for layer_idx, later in pairwise(sparse):
            start = len(program.tape)
            expert_ids = self._layers[later].guess(machine, program.hidden)
            program.guesses[layer_idx] = Guess(later, start, len(program.tape), expert_ids)

    def _fill(self, inputs: RowInputs, rows: slice, group: RowGroup, paths: Paths) -> None:
        cache = group.cache
        inputs.token_ids[rows], inputs.positions[rows] = group.token_ids, group.positions
        inputs.slots[rows], inputs.prefix_len[rows] = paths.slots, paths.prefix_len
        inputs.path[rows, : paths.path.shape[1]], inputs.path_len[rows] = paths.path, paths.path_len
        inputs.keys[:, rows], inputs.values[:, rows] = (at[:, None] for at in cache.addresses())
        if self.spec.rope.kind == "longrope":
            beyond = group.positions >= self.spec.rope.original_max_position_embeddings
            inputs.rope_tables[rows] = beyond | cache.is_long
        for window in cache.sliding:
            into, count = inputs.sliding[window.window], len(paths.slots)
            base = np.repeat(np.array(window.bases, np.int64), STEP)[:count]
            into.slots[rows], into.prefix_len[rows] = paths.slots - base, paths.prefix_len - base
            into.path[rows, : paths.path.shape[1]] = paths.path - base[:, None]
            into.moves[: len(window.moves)] = window.moves


def _check(program: Program) -> None:
    """Raise NumericError if a layer left the range of its numbers, naming the first."""
    if not program.flags.any():
        return
    layer_idx, which = (int(at[0]) for at in np.nonzero(program.flags.any(axis=2)))
    what = "the router's logits are not numbers" if which == 1 else "a key or value is not a number"
    if which != 1 and program.is_f16:
        raise NumericError(
            f"layer {layer_idx}: {what}, or too large for a float16 cache: use --kv f32; "
            "should that fail too, the weights are damaged"
        )
    raise NumericError(f"layer {layer_idx}: {what}: the weights are damaged, convert the model again")
