"""The one parallel loop of the project: the parts of a stage on the threads of a pool.

The pool is OpenMP's (GNU's library, a launch costs about 1 us), or numba's queue of its own (50-80 us) where the system
has none. Which parts run on which thread changes no bit. Called by routines and, through `Launcher`, by Python.
"""

import ctypes

import numpy as np

from coli.kernels.ops import call_i32, load_i64, stack, store_i64
from coli.kernels.runtime import Routine, call_stage, caller, data_pointer, unpacker

unpack3, unpack5 = unpacker(3), unpacker(5)
call_gomp, call_queue = caller(4), caller(8)
team_words, queue_words = stack(40), stack(48)


# ------------------------------------------------------------------ OpenMP
def _team(data):
    """What every thread of a team does: its share of the parts. data: code, args, parts, addresses of
    omp_get_thread_num and omp_get_num_threads."""
    code, args, parts, number, threads = unpack5(data, 0)
    part, step = call_i32(number), call_i32(threads)
    while part < parts:  # a range could raise for its step
        call_stage(code, args, part, parts)
        part += step


TEAM = Routine(_team, 1)


def _launch_team(code, args, parts, pool):
    """pool: addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads and TEAM, then the most threads."""
    gomp, number, threads, team, most = unpack5(pool, 0)
    data = team_words()
    store_i64(data, code)
    store_i64(data + 8, args)
    store_i64(data + 16, parts)
    store_i64(data + 24, number)
    store_i64(data + 32, threads)
    call_gomp(gomp, team, data, min(parts, most), 0)


LAUNCH_TEAM = Routine(_launch_team, 4)


# ------------------------------------------------------------------ numba's queue
def _from_queue(first, count, steps, data):
    """A stretch of the parts: `first` and `count` point to the number of the first one and how many there are."""
    code, args, parts = unpack3(data, 0)
    start = load_i64(first)
    for part in range(start, start + load_i64(count)):
        call_stage(code, args, part, parts)


FROM_QUEUE = Routine(_from_queue, 4)


def _launch_queue(code, args, parts, pool):
    """pool: addresses of numba's parallel_for and FROM_QUEUE, then the most threads."""
    parallel_for, body, most = unpack3(pool, 0)
    data = queue_words()
    store_i64(data, code)
    store_i64(data + 8, args)
    store_i64(data + 16, parts)
    store_i64(data + 24, 0)  # the "array" a part gets its place in: number of the first part,
    store_i64(data + 32, 1)  # and bytes from part to part
    store_i64(data + 40, parts)
    call_queue(parallel_for, body, data + 24, data + 40, data + 32, data, 0, 1, min(parts, most))


LAUNCH_QUEUE = Routine(_launch_queue, 4)


# ------------------------------------------------------------------ from Python
class Launcher:
    """A pool of `threads` threads. library: GNU OpenMP's; None: numba's queue."""

    def __init__(self, library: ctypes.CDLL | None, threads: int) -> None:
        if library is not None:
            self.routine = LAUNCH_TEAM
            functions = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
            words = [*(_address_of(function) for function in functions), TEAM.address, threads]
        else:
            from numba.np.ufunc import workqueue  # 0.3 s, which only this layer has to wait for

            ctypes.CFUNCTYPE(None, ctypes.c_int)(workqueue.launch_threads)(threads)
            self.routine = LAUNCH_QUEUE
            words = [workqueue.parallel_for, FROM_QUEUE.address, threads]
        self._words = np.array(words, np.int64)
        self.pool = data_pointer(self._words)

    def run(self, code: int, args: int, parts: int) -> None:
        """All parts of a stage: addresses of its code and of its arguments."""
        self.routine.call(code, args, parts, self.pool)


def _address_of(function: object) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found
