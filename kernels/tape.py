"""A recorded sequence of stage calls, replayed by one jitted loop without going back to Python.

While a `Tape` records, kernels called as usual are noted instead of run; every buffer they address must stay where it
is (the tape keeps it alive). A stage may stop the replay by writing to the tape's status word; `run` then returns the
number of the call that did, so that the caller can do what only Python can (bring missing experts) and go on behind it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from coli.kernels import runtime
from coli.kernels.runtime import call_stage

COLUMNS = 4  # of one call: machine code, address of the arguments, parts, phase
PHASES = ("other", "attention", "experts")
Call = tuple[int, int, int, int]  # of COLUMNS


@intrinsic
def _cycles(typingctx):
    """The processor's cycle counter; 0 where reading it is not allowed to programs."""

    def codegen(context, builder, _sig, _args):
        if not builder.module.triple.startswith("x86_64"):
            return ir.Constant(ir.IntType(64), 0)
        return builder.call(builder.module.declare_intrinsic("llvm.readcyclecounter", (), _CYCLES_TYPE), ())

    return types.int64(), codegen


_CYCLES_TYPE = ir.FunctionType(ir.IntType(64), ())


def _replay(calls, start, stop, status, cycles):
    """Run calls start .. stop-1; returns the number of the call that set status[0], or stop. cycles[phase] grows."""
    before = _cycles()
    for i in range(start, stop):
        code, args, parts = calls[i, 0], calls[i, 1], calls[i, 2]
        if parts == 1:
            call_stage(code, args, 0, 1)
        else:
            for part in numba.prange(parts):
                call_stage(code, args, np.int64(part), parts)
        after = _cycles()
        cycles[calls[i, 3]] += after - before
        before = after
        if status[0] != 0:
            return i
    return stop


class _Loop:
    """The compiled loop, made on first use."""

    compiled = None

    @classmethod
    def get(cls):
        if cls.compiled is None:
            words = types.int64[::1]
            signature = types.int64(types.int64[:, ::1], types.int64, types.int64, words, words)
            with runtime.light_cache_loads():
                cls.compiled = numba.njit(signature, parallel=True, nogil=True, cache=runtime.caches())(_replay)
        return cls.compiled


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
        return int(_Loop.get()(self._packed, start, stop, self.status, self.cycles))


def prepare() -> None:
    """Compile or load the loop."""
    _Loop.get()
