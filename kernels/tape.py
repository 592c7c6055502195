"""A recorded sequence of stage calls, replayed by one jitted loop without going back to Python.

While a `Tape` records, kernels called as usual are noted instead of run; every buffer they address must stay where it
is (the tape keeps it alive). A stage may stop the replay by writing to the tape's status word; `run` then returns the
number of the call that did, so that the caller can do what only Python can (bring missing experts) and go on behind it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
from numba import types

from coli.kernels import runtime
from coli.kernels.runtime import call_stage

COLUMNS = 3  # of one call: machine code, address of the arguments, parts


def _replay(calls, start, stop, status):
    """Run calls start .. stop-1; returns the number of the call that set status[0], or stop."""
    for i in range(start, stop):
        code, args, parts = calls[i, 0], calls[i, 1], calls[i, 2]
        if parts == 1:
            call_stage(code, args, 0, 1)
        else:
            for part in numba.prange(parts):
                call_stage(code, args, np.int64(part), parts)
        if status[0] != 0:
            return i
    return stop


class _Loop:
    """The compiled loop, made on first use."""

    compiled = None

    @classmethod
    def get(cls):
        if cls.compiled is None:
            signature = types.int64(types.int64[:, ::1], types.int64, types.int64, types.int64[::1])
            cls.compiled = numba.njit(signature, parallel=True, nogil=True, cache=True)(_replay)
        return cls.compiled


class Tape:
    """Stage calls with the arrays they need. `status` int64 (1,): 0, or what a stage stopped the replay with."""

    def __init__(self) -> None:
        self.status = np.zeros(1, np.int64)
        self._calls: list[tuple[int, int, int]] = []
        self._kept: list[np.ndarray] = []
        self._packed: np.ndarray | None = None
        self._held: list[tuple[int, int, int]] | None = None
        self.last_arguments = self.status  # argument block of the call noted last; its words may be changed later

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this block kernels are noted, not run; their results must not be looked at."""
        runtime.record(self)
        try:
            yield
        finally:
            runtime.record(None)
        self._packed = np.array(self._calls, np.int64).reshape(-1, COLUMNS)

    def note(self, code: int, args: np.ndarray, threads: int) -> None:
        self._kept.append(args)
        self.last_arguments = args
        (self._calls if self._held is None else self._held).append((code, args.__array_interface__["data"][0], threads))

    def keep(self, array: np.ndarray) -> None:
        self._kept.append(array)

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def held_back(self) -> Iterator[list[tuple[int, int, int]]]:
        """Calls noted inside this block go to the list it gives, for `place`: so a call can know the arguments of those
        that will follow it."""
        self._held = held = []
        try:
            yield held
        finally:
            self._held = None

    def place(self, held: list[tuple[int, int, int]]) -> None:
        """Append the calls that were held back."""
        self._calls += held

    def run(self, start: int = 0, stop: int | None = None) -> int:
        """Replay the calls start .. stop-1 (default: all); returns where it ended, `stop` unless a stage stopped it."""
        self.status[0] = 0
        return int(_Loop.get()(self._packed, start, len(self._calls) if stop is None else stop, self.status))


def prepare() -> None:
    """Compile or load the loop."""
    _Loop.get()
