"""A recorded sequence of stage calls, replayed by one jitted loop without going back to Python.

While a `Tape` records, kernels called as usual are noted instead of run; every buffer they address must stay where it
is (the tape keeps it alive). A stage may stop the replay by writing to the tape's status word; `run` then returns the
number of the call that did, so that the caller can do what only Python can (bring missing experts) and go on behind it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from coli.kernels import runtime
from coli.kernels.ops import cycle_counter, load_i64, store_i64
from coli.kernels.runtime import Routine, call_stage, caller, data_pointer, unpacker

COLUMNS = 4  # of one call: machine code, address of the arguments, parts, phase
PHASES = ("other", "attention", "experts")
Call = tuple[int, int, int, int]  # of COLUMNS

unpack4, call_launch = unpacker(4), caller(4)


def _replay(calls, start, stop, status, cycles, end, launch, pool):
    """Run calls start .. stop-1 of a table (n, COLUMNS) of int64 by `launch` and its pool where they have several
    parts; end: becomes the number of the call that set the status word, or stop. cycles (PHASES) grow."""
    before = cycle_counter()
    for i in range(start, stop):
        code, args, parts, phase = unpack4(calls + 32 * i, 0)
        if parts == 1:
            call_stage(code, args, 0, 1)
        else:
            call_launch(launch, code, args, parts, pool)
        after = cycle_counter()
        at = cycles + 8 * phase
        store_i64(at, load_i64(at) + after - before)
        before = after
        if load_i64(status) != 0:
            store_i64(end, i)
            return
    store_i64(end, stop)


REPLAY = Routine(_replay, 8)


class Tape:
    """Stage calls with the arrays they need.

    status int64 (1,): 0, or what a stage stopped the replay with. cycles int64 (3,): processor cycles by phase, since
    recording (threads run at the same time count once). `phase` is what calls noted from now on belong to.
    """

    def __init__(self) -> None:
        self.status = np.zeros(1, np.int64)
        self.cycles = np.zeros(len(PHASES), np.int64)
        self.phase = 0
        self.calls: list[Call] = []
        self.kept: list[np.ndarray] = []  # what the calls address
        self.keep = self.kept.append  # called thousands of times
        self._packed: np.ndarray | None = None
        self._end = np.zeros(1, np.int64)
        self._held: list[Call] | None = None
        self.last_arguments = self.status  # argument block of the call noted last; its words may be changed later

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside this block kernels are noted, not run; their results must not be looked at."""
        runtime.record(self)
        try:
            yield
        finally:
            runtime.record(None)
        self._packed = np.array(self.calls, np.int64).reshape(-1, COLUMNS)

    def note(self, code: int, args: np.ndarray, threads: int) -> None:
        self.kept.append(args)
        self.last_arguments = args
        call = (code, runtime.data_pointer(args), threads, self.phase)
        (self.calls if self._held is None else self._held).append(call)

    def __len__(self) -> int:
        return len(self.calls)

    @contextmanager
    def held_back(self) -> Iterator[list[Call]]:
        """Calls noted inside this block go to the list it gives, for `place`: so a call can know the arguments of those
        that will follow it."""
        self._held = held = []
        try:
            yield held
        finally:
            self._held = None

    def place(self, held: list[Call]) -> None:
        """Append the calls that were held back."""
        self.calls += held

    def run(self, start: int = 0, stop: int | None = None) -> int:
        """Replay the calls start .. stop-1 (default: all); returns where it ended, `stop` unless a stage stopped it."""
        self.status[0] = 0
        stop = len(self.calls) if stop is None else stop
        assert self._packed is not None
        launcher = runtime.launcher()
        REPLAY.call(
            data_pointer(self._packed), int(start), int(stop), data_pointer(self.status), data_pointer(self.cycles),
            data_pointer(self._end), launcher.routine.address, launcher.pool,
        )  # fmt: skip
        return int(self._end[0])
