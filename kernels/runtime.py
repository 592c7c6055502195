"""How kernels are configured, called and run on threads.

`configure` is called once, before the first kernel call: it chooses the instruction set, the code cache and the thread
pool. A kernel is a `Stage`: a function of (address of its int64 arguments, part, parts) that does its part of the work.
Stages are loaded from the code cache, or compiled, on first use, one by one, and all go through one parallel launcher,
so that a new kernel costs one small compilation and jitted code can call any stage by address. One thread at a time
calls kernels. Imports numba only where something has to be compiled.
"""

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from coli.errors import OptionError
from coli.kernels.code_cache import CodeCache, choose_folder, host_target, load
from coli.kernels.deferred import Deferred
from coli.kernels.target import Target, choose_target, simd_path_of

if TYPE_CHECKING:
    from coli.kernels.launch import Launcher

SPIN_COUNT = "1000"  # of GNU OpenMP: a waiting worker looks this often (some 10 us) before it gives its processor away
_WORD, _DOUBLE = struct.Struct("<q"), struct.Struct("<d")


class Recorder(Protocol):
    """Takes stage calls instead of the threads (tape.Tape)."""

    def note(self, code: int, args: np.ndarray, threads: int) -> None: ...

    def keep(self, array: np.ndarray) -> None: ...


class _State:
    """What `configure` decided; one per process, because numba's own configuration is."""

    def __init__(self) -> None:
        self.settings: tuple[str, str | None] | None = None
        self.target = Target("", "")
        self.cache = CodeCache(None, self.target)
        self.cache_note: str | None = None
        self.threads = 1
        self.openmp: ctypes.CDLL | None = None
        self.compiles = False
        self.launcher: Launcher | None = None


_state = _State()


class _Recording(threading.local):
    """Who records the calls of this thread."""

    by: Recorder | None = None
    keep: Callable[[np.ndarray], None] | None = None


_recording = _Recording()


# ------------------------------------------------------------------ configuration
def configure(simd: str = "auto", cache_dir: Path | str | None = None, threads: int | None = None) -> None:
    """Choose the instruction set, the folder of compiled code and the number of threads of the pool.

    simd       auto | avx512 | avx2 | generic; OptionError when this processor cannot execute it
    cache_dir  None is ~/.cache/coli; a folder below it is keyed by a hash of all kernel sources. Where it cannot be
               written, a private temporary folder is used, else none, and `cache_note()` says so
    threads    None is one per usable processor

    The first call decides for the process. A later one may leave simd and cache_dir open and give any number of threads
    (kernels take theirs with each call, the pool stays as it is); another simd or cache_dir is an OptionError."""
    settings = (simd, None if cache_dir is None else str(cache_dir))
    if _state.settings is not None:
        for name, wanted, used in zip(("simd", "kernel cache"), settings, _state.settings, strict=True):
            if wanted not in ("auto", None, used):
                raise OptionError(f"{name}: this process has started with {used or 'the default'}, not {wanted}")
        return
    _state.threads = max(threads or _processors(), 1)
    folder, _state.cache_note = choose_folder(cache_dir)
    _state.target = choose_target(simd, lambda: host_target(folder))
    _state.cache = CodeCache(folder, _state.target)
    os.putenv("GOMP_SPINCOUNT", SPIN_COUNT)  # libgomp reads it once, when the next line loads it
    _state.openmp = _openmp()
    _state.settings = settings


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP library, where the system has it."""
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None


def _ensure_configured() -> None:
    if _state.settings is None:
        configure()


# ------------------------------------------------------------------ what callers may ask
def simd_path() -> str:
    """avx512, avxvnni, avx2 or generic: the path the integer products are compiled for."""
    _ensure_configured()
    return simd_path_of(_state.target.features)


def threading_layer() -> str:
    """omp, or workqueue (launches cost 50-80 us instead of 1 us) where the system has no OpenMP library."""
    _ensure_configured()
    return "workqueue" if _state.openmp is None else "omp"


def threads() -> int:
    """Threads of the pool; the usual value of the `threads` argument of kernels."""
    _ensure_configured()
    return _state.threads


def cache_note() -> str | None:
    """One line when the cache folder is a fallback."""
    _ensure_configured()
    return _state.cache_note


def cold() -> bool:
    """Whether kernels will be compiled (some 20 s) rather than loaded: nobody has completed `warm` for these sources,
    this numba and this processor."""
    _ensure_configured()
    return not _state.cache.complete


def warm(stages: "tuple[Routine, ...] | None" = None) -> None:
    """Compile or load the launcher and the stages a run needs (default: `coli.kernels.catalog.RUN`)."""
    from coli.kernels.catalog import RUN
    from coli.kernels.precompile import helpers

    _ensure_configured()
    alone = stages is not None or not cold() or _state.cache.folder is None or _state.cache_note is not None
    assert _state.settings is not None
    with contextlib.nullcontext() if alone else helpers(*_state.settings, _processors() - 1):
        _ = launcher().routine.address
        for stage in RUN if stages is None else stages:
            _ = stage.address
    _state.cache.set_complete()


# ------------------------------------------------------------------ routines and stages
class Routine:
    """A jitted function of int64 arguments without a result, compiled on its own and called by address, so that the big
    loops exist once and not in every caller. It must not allocate Python objects nor raise."""

    __slots__ = ("_call", "_code", "_function", "arguments")

    def __init__(self, function: Callable[..., None] | Deferred, arguments: int) -> None:
        self._function, self.arguments = function, arguments
        self._code = 0
        self._call: Callable[..., None] | None = None

    @property
    def function(self) -> Callable[..., None]:
        """As it is written."""
        return self._function.made if isinstance(self._function, Deferred) else self._function

    @property
    def name(self) -> str:
        """Of its machine code; unique among those of `coli.kernels`."""
        function = self._function
        if isinstance(function, Deferred):
            return function.name
        return f"{function.__module__.removeprefix('coli.kernels.')}.{function.__name__}"

    @property
    def address(self) -> int:
        """Of the machine code; loads or compiles it on first use."""
        if not self._code:
            _ensure_configured()
            symbol = "coli_" + self.name.replace(".", "_")
            code = _state.cache.get(self.name)
            if code is None:
                code = _compiler().machine_code(self.function, self.arguments, symbol)
                if self.function.__module__.startswith("coli.kernels."):  # others are not in the key of the cache
                    _state.cache.put(self.name, code)
            self._code = load(code, symbol)
        return self._code

    @property
    def call(self) -> Callable[..., None]:
        """It as a function of Python ints, which runs without the interpreter's lock."""
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.arguments)(self.address)
        return self._call


class Stage(Routine):
    """A routine (args, part, parts): `args` is the address of its int64 arguments (floats as float64 bits)."""

    __slots__ = ()

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        super().__init__(function, 3)

    def run(self, args: np.ndarray, threads: int = 1) -> None:
        """Run all parts; args int64 (n,) contiguous. While a tape is being recorded, only note the call."""
        recorder = _recording.by
        if recorder is not None:
            recorder.note(self._code or self.address, args, threads)
        elif threads == 1:
            (self._call or self.call)(data_pointer(args), 0, 1)
        else:
            (_state.launcher or launcher()).run(self._code or self.address, data_pointer(args), threads)


def _compiler() -> Any:
    from coli.kernels import compiler

    if not _state.compiles:
        _ensure_configured()
        compiler.prepare(_state.target)
        _state.compiles = True
    return compiler


def launcher() -> "Launcher":
    """The thread pool."""
    if _state.launcher is None:
        from coli.kernels.launch import Launcher

        _ensure_configured()
        _state.launcher = Launcher(_state.openmp, _state.threads)
    return _state.launcher


# ------------------------------------------------------------------ for jitted functions
def device(function: Callable[..., Any]) -> Deferred:
    """Decorator of the jitted parts of stages: compiled with the stage that calls them, not kept by themselves."""
    return Deferred(lambda: _compiler().device(function), function.__globals__)


def caller(arguments: int) -> Deferred:
    """A jitted call_address(address, ...) of a routine with so many int64 arguments."""
    return Deferred(lambda: _compiler().caller(arguments))


def unpacker(count: int) -> Deferred:
    """A jitted (args, first) -> tuple of `count` int64 arguments from number `first` on. One statement instead of one
    per argument: what numba spends on a function grows with its statements."""
    return Deferred(lambda: _compiler().unpacker(count))


call_stage = caller(3)


# ------------------------------------------------------------------ arguments and their recording
def record(recorder: Recorder | None) -> None:
    """Hand this thread's stage calls to `recorder` from now on; None ends that."""
    _recording.by = recorder
    _recording.keep = None if recorder is None else recorder.keep


def address(array: np.ndarray) -> int:
    """Address of the first element; the caller keeps the array alive during the call (recorded: the tape does)."""
    keep = _recording.keep
    if keep is not None:
        keep(array)
    return _word_at(id(array) + _DATA_AT).value


# Read from the array object itself, where numpy's interface has the address right behind the object's head: ten times
# faster than asking for it, and recording a tape asks thousands of times.
_word_at, _DATA_AT = ctypes.c_ssize_t.from_address, object.__basicsize__


def data_pointer(array: np.ndarray) -> int:
    """Address of the first element, whoever is recording."""
    return _word_at(id(array) + _DATA_AT).value


if data_pointer(_probe := np.zeros(3, np.int8)[1:]) != _probe.__array_interface__["data"][0]:  # another object layout

    def address(array: np.ndarray) -> int:
        if _recording.keep is not None:
            _recording.keep(array)
        return data_pointer(array)

    def data_pointer(array: np.ndarray) -> int:
        return array.__array_interface__["data"][0]


def arguments(*values: int | float) -> np.ndarray:
    """The int64 argument block of a stage; a float is stored as the bits of its float64."""
    words = [_WORD.unpack(_DOUBLE.pack(v))[0] if isinstance(v, float) else v for v in values]
    return np.array(words, np.int64)
