"""The forward of S rows as a recorded tape, with the buffers it reads its rows from.

Recording runs the blocks' Python once for a number of rows and a cache shape; after that a forward is one jitted
replay, which comes back to Python only where an expert is not in memory. Owned by the transformer, one thread.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coli.kernels.experts import ALL_RESIDENT
from coli.kernels.tape import Tape
from coli.model.kv_cache import STEP

Ints = NDArray[np.int64]


@dataclass(slots=True)
class RowInputs:
    """What a forward is told about its S rows; filled before each replay.

    token_ids, positions, slots, prefix_len, path_len (S,); path (S, P) cache slots; keys, values (L, S) addresses of
    the layer's cache of the row's sequence.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    prefix_len: Ints
    path: Ints
    path_len: Ints
    keys: Ints
    values: Ints
    rope_tables: Ints  # (S,) longrope: 0 short, 1 long
    sliding: dict[int, "WindowInputs"]  # by window, of layers that keep only that

    @staticmethod
    def allocate(S: int, P: int, num_layers: int, windows: Iterable[int]) -> "RowInputs":
        def ints(*shape: int) -> Ints:
            return np.zeros(shape, np.int64)

        prefix_len = np.ones(S, np.int64)  # a row sees at least itself
        caches = ints(num_layers, S), ints(num_layers, S)
        sliding = {
            window: WindowInputs(ints(S), np.ones(S, np.int64), ints(S, P), ints(-(-S // STEP), 2))
            for window in windows
        }
        return RowInputs(ints(S), ints(S), ints(S), prefix_len, ints(S, P), ints(S), *caches, ints(S), sliding)


@dataclass(slots=True)
class WindowInputs:
    """slots, prefix_len (S,) and path (S, P) as RowInputs has them, less the base of the window; moves: the rows that
    go to the front before each STEP of them (kv_cache.SlidingRows)."""

    slots: Ints
    prefix_len: Ints
    path: Ints
    moves: Ints


@dataclass(slots=True)
class SparsePoint:
    """A sparse layer on the tape: where its expert calls begin and end, and the tables Python may fill for them.

    A replay that finds the whole union resident runs through; else it stops at `plan_call`, and the calls from there to
    `sum_call` are run once for each batch of experts that has arrived.
    """

    layer_idx: int
    plan_call: int
    sum_call: int
    expert_ids: Ints  # (S, A)
    batch: Ints  # (E,)
    batch_count: Ints  # (1,)
    done: Ints  # (1,)

    def take(self, expert_ids: Ints) -> None:
        """The next replay of this layer's calls computes these experts."""
        self.batch[: len(expert_ids)] = expert_ids
        self.batch_count[0] = len(expert_ids)

    def take_all(self) -> None:
        """The next replay computes the whole union if it is resident."""
        self.batch_count[0] = ALL_RESIDENT


@dataclass(frozen=True, slots=True)
class Guess:
    """Calls start .. stop-1 apply the router of `layer_idx` to the rows of the sparse layer before it."""

    layer_idx: int
    start: int
    stop: int
    expert_ids: Ints  # (S, A)


@dataclass(slots=True)
class Program:
    """A tape with its inputs, its sparse points in layer order, and what it leaves behind."""

    tape: Tape
    inputs: RowInputs
    hidden: NDArray[np.float32]  # (S, H)
    capacity: int  # positions of the caches it was recorded for
    is_f16: bool
    flags: Ints  # (L, 3, threads) counts: keys and values that did not fit the cache type, rows with NaN router logits,
    # index keys that did not fit
    points: list[SparsePoint] = field(default_factory=list)
    chosen: tuple[Ints, Ints] | None = None  # what the last indexer chose: slots (S, C), how many (S,)
    layers_start: int = 0  # number of the first layer's first call
    layer_ends: list[int] = field(default_factory=list)
    guesses: dict[int, Guess] = field(default_factory=dict)  # by the layer whose rows they use; behind the layers
