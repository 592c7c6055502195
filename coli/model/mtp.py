"""The MTP head: one more layer that guesses the token after next from what the model has computed anyway.

Its rows lie in a cache of their own, one for each position whose next token is known. They are computed with the
prompt, and after that only when somebody asks for a guess; a guess can be wrong, never change what the model says.
Called by the transformer, and through `Predictor` by the draft source; one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coli.errors import NumericError
from coli.kernels import elementwise, quantize, rope
from coli.kernels.tape import Tape
from coli.model.attention import row_paths
from coli.model.kv_cache import KVCache
from coli.model.layers import Machine, Projection, Rows, tile_padded
from coli.model.loader import MtpWeights
from coli.model.program import Ints, Program, RowInputs

if TYPE_CHECKING:
    from coli.model.transformer import Layer, Transformer

WINDOW = 640  # positions whose hidden states are kept until the head has computed its row: a prefill chunk and a verify
MAX_PROGRAMS = 40

Choose = Callable[[NDArray[np.float32], int], int]  # logits (V,), position of the token -> its id


class MtpMemory:
    """What the head keeps of one sequence: rows of its own cache, and the hidden states it has not used yet.

    Row i of `cache` belongs to position `positions[i]`, ascending; positions whose hidden states were lost have none.
    """

    def __init__(self, cache: KVCache, hidden_size: int) -> None:
        self.cache = cache
        self.positions: list[int] = []
        self.is_broken = False  # a row was not a number: no more guesses for this sequence
        self.last: tuple[int, int, Rows] | None = None  # newest position, the id behind it, what the head made of it
        self._hidden = np.zeros((WINDOW, hidden_size), np.float32)  # of position p at p % WINDOW, final norm applied
        self._token_ids = np.zeros(WINDOW, np.int64)
        self._start = self._stop = 0  # positions held

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self._hidden.nbytes

    @property
    def length(self) -> int:
        """Positions the model has computed."""
        return self._stop

    def take(self, start: int, token_ids: Ints, hidden: Rows) -> None:
        """The model has appended rows from position `start` on; hidden (S, H) with the final norm applied."""
        if start != self._stop:  # rows came from elsewhere: a saved session
            self.rewind(min(start, self._stop))
            self._start = self._stop = start
        stop = start + len(token_ids)
        kept = np.arange(max(start, stop - WINDOW), stop)
        self._hidden[kept % WINDOW] = hidden[kept - start]
        self._token_ids[kept % WINDOW] = token_ids[kept - start]
        self._start, self._stop = max(self._start, stop - WINDOW), stop

    def pending(self, newest_id: int | None) -> tuple[Ints, Ints, Rows]:
        """Positions without a row (n,), the ids behind them, their hidden states; newest_id follows the last one."""
        first = max(self._start, self.positions[-1] + 1 if self.positions else 0)
        at = np.arange(first, self._stop if newest_id is not None else self._stop - 1)
        behind = self._token_ids[(at + 1) % WINDOW]
        if newest_id is not None and len(at):
            behind[-1] = newest_id
        return at, behind, self._hidden[at % WINDOW]

    def rewind(self, length: int) -> None:
        """Forget positions from `length` on, and the row before them: it knew the id behind it."""
        self._stop = min(self._stop, length)
        self._start = min(self._start, self._stop)
        while self.positions and self.positions[-1] >= length - 1:
            self.positions.pop()
        self.cache.rewind(min(self.cache.length, len(self.positions)))
        self.last = None

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """Of the positions since `start` keep `rows`; the head has no rows of those yet."""
        source, target = (start + np.array(rows, np.int64)) % WINDOW, np.arange(start, start + len(rows)) % WINDOW
        self._hidden[target], self._token_ids[target] = self._hidden[source], self._token_ids[source]
        self._stop = min(self._stop, start + len(rows))

    def copy_prefix(self, other: MtpMemory, length: int) -> None:
        self.positions = [position for position in other.positions if position < length - 1]
        self.cache.copy_prefix(other.cache, len(self.positions))
        self._hidden[:], self._token_ids[:] = other._hidden, other._token_ids
        self._start, self._stop, self.last = min(other._start, length), min(other._stop, length), None


@dataclass(slots=True)
class MtpProgram:
    """A program of the head for S rows; `states` (S, H) is what it reads beside the tokens in program.inputs."""

    program: Program
    states: Rows


class MtpHead:
    """Runs the head of one model on its buffers, threads and store of experts."""

    def __init__(self, model: Transformer, weights: MtpWeights, layer: Layer, machine: Machine) -> None:
        self._model, self._weights, self._layer, self._machine = model, weights, layer, machine
        self._layer_idx = weights.layer.spec.layer_idx
        self._eh_proj = Projection("mtp_eh_proj", (weights.eh_proj,))
        self._lm_head = Projection("mtp_logits", (model.weights.lm_head,))
        self._programs: OrderedDict[tuple[int, int, bool], MtpProgram] = OrderedDict()
        self._output: tuple[Tape, Rows, Rows] | None = None  # the tape of the output matrix, what it reads and leaves

    def take(self, memory: MtpMemory, start: int, token_ids: Ints, hidden: Rows, *, prefill: bool) -> None:
        """Remember what the model has computed, hidden (S, H) before the final norm; a prompt's rows follow at once."""
        normed = self._machine.buffers.rows("mtp_normed", *hidden.shape)
        spec = self._model.spec
        elementwise.rms_norm(hidden, self._model.weights.norm, spec.rms_norm_eps, normed)
        memory.take(start, token_ids, normed)
        if prefill and not memory.is_broken:
            try:
                self._extend(memory, *memory.pending(None), prefill=True)
            except NumericError:
                memory.is_broken = True

    def guesses(self, memory: MtpMemory, newest_id: int, extension: Sequence[int], choose: Choose) -> Generator[int]:
        """Ids that may follow the newest one and `extension`, one layer's work each; endless, close it when done."""
        position = memory.length
        try:
            state = self._newest_state(memory, newest_id)
            if state is None:
                return
            for token_id in extension:
                position += 1
                state = self._one(memory, position, token_id, state)
            while True:
                position += 1
                token_id = choose(self._logits(state), position)
                yield token_id
                state = self._one(memory, position, token_id, state)
        finally:
            memory.cache.rewind(min(memory.cache.length, len(memory.positions)))

    def tapes(self) -> list[Tape]:
        """For the account of time."""
        return [each.program.tape for each in self._programs.values()] + ([self._output[0]] if self._output else [])

    def _newest_state(self, memory: MtpMemory, newest_id: int) -> Rows | None:
        """(1, H) of the newest position, after all rows before it."""
        if memory.last is not None and memory.last[:2] == (memory.length, newest_id):
            return memory.last[2]
        at, behind, states = memory.pending(newest_id)
        if not len(at):
            return None
        out = self._extend(memory, at, behind, states, prefill=False)[-1:].copy()
        memory.last = memory.length, newest_id, out
        return out

    def _extend(self, memory: MtpMemory, at: Ints, behind: Ints, states: Rows, *, prefill: bool) -> Rows:
        """Compute and keep the rows of positions `at` (n,); returns the head's own hidden states (n, H)."""
        if not len(at):
            return states
        memory.cache.rewind(min(memory.cache.length, len(memory.positions)))  # what an interrupt left behind
        out = self._run(memory.cache, behind, at + 1, states, prefill)
        memory.positions += at.tolist()
        return out

    def _one(self, memory: MtpMemory, position: int, token_id: int, state: Rows) -> Rows:
        """The row of a guess, which is forgotten again: (1, H) -> (1, H)."""
        token_ids, positions = np.array([token_id], np.int64), np.array([position], np.int64)
        return self._run(memory.cache, token_ids, positions, state, prefill=False).copy()

    def _run(self, cache: KVCache, token_ids: Ints, positions: Ints, states: Rows, prefill: bool) -> Rows:
        S, start, row = len(token_ids), cache.length, self._layer_idx
        cache.append(S)
        head = self._program(S, cache)
        inputs, paths = head.program.inputs, row_paths(start, S, None)
        head.states[:] = states
        inputs.token_ids[:], inputs.positions[:] = token_ids, positions
        inputs.slots[:], inputs.prefix_len[:] = paths.slots, paths.prefix_len
        inputs.keys[row], inputs.values[row] = (at[0] for at in cache.addresses())
        self._model.replay_all(head.program, prefill=prefill)
        if not prefill:
            self._model.settle(S)
        return head.program.hidden

    def _program(self, S: int, cache: KVCache) -> MtpProgram:
        key = (S, cache.capacity, cache.is_f16)
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        head = self._programs[key] = self._record(S, cache)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
        return head

    def _record(self, S: int, cache: KVCache) -> MtpProgram:
        """eh_proj of [enorm(embedding of the next token), hnorm(state)], the layer, the shared head's norm."""
        model, weights, machine = self._model, self._weights, self._machine
        spec, embed, H = model.spec, model.weights.embed_tokens, model.spec.hidden_size
        eps, rows = spec.rms_norm_eps, machine.buffers.rows
        inputs = RowInputs.allocate(S, 1, spec.num_stored_layers, ())
        flags = np.zeros((spec.num_stored_layers, 3, machine.threads), np.int64)
        out, states = rows("mtp_out", S, H), rows("mtp_states", S, H)
        program = Program(Tape(), inputs, out, cache.capacity, cache.is_f16, flags)
        with program.tape.recording():
            rotation = rope.rope_table(inputs.positions, model.frequencies, spec.rope.attention_factor)
            embedded, both = rows("mtp_embedded", S, H), rows("mtp_both", S, 2 * H)
            quantize.embed_rows(embed.kind, embed.weights, embed.scales, inputs.token_ids, embed.groups, embedded)
            elementwise.rms_norm(embedded, weights.enorm, eps, both[:, :H])
            elementwise.rms_norm(states, weights.hnorm, eps, both[:, H:])
            hidden = self._eh_proj(machine, both)[:, :H]
            self._layer(machine, hidden, program, rotation)
            elementwise.rms_norm(hidden, weights.shared_head_norm, eps, out)
        return MtpProgram(program, states)

    def _logits(self, state: Rows) -> NDArray[np.float32]:
        """(1, H) -> (V,), valid until the next call."""
        V = self._model.vocab_size
        if self._output is None:
            tape, chosen = Tape(), self._machine.buffers.rows("mtp_chosen", 1, state.shape[1])
            self._machine.buffers.rows("mtp_logits", 1, tile_padded(V))
            with tape.recording():
                logits = self._lm_head(self._machine, chosen)[:, :V]
            self._output = tape, chosen, logits
        tape, chosen, logits = self._output
        chosen[:] = state
        self._model.replay_tape(tape)
        row: NDArray[np.float32] = logits[0]
        return row


class Predictor:
    """Guesses for one response; what the draft source is handed."""

    def __init__(self, head: MtpHead, memory: Any, choose: Choose) -> None:
        """choose: the target's own way from logits to a token, so that a guess that agrees with it is drawn alike."""
        assert isinstance(memory, MtpMemory)
        self._head, self._memory, self._choose = head, memory, choose

    def predict(self, newest_id: int, extension: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` ids that may follow the newest committed one and `extension`."""
        if self._memory.is_broken:
            return []
        found: list[int] = []
        guesses = self._head.guesses(self._memory, newest_id, extension, self._choose)
        try:
            for token_id in guesses:
                found.append(token_id)
                if len(found) == limit:
                    break
        except NumericError:
            self._memory.is_broken = True
        finally:
            guesses.close()
        return found
