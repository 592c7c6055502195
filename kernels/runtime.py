"""How kernels are compiled, cached and run on threads.

`configure` is called once, before the first kernel call: it chooses the instruction set, the cache folder and the
thread pool. A kernel is a `Stage`: a function of (address of its int64 arguments, part, parts) that does its part of
the work. Stages are compiled on first use, one by one, and all go through one parallel launcher, so that a new kernel
costs one small compilation and jitted code can call any stage by address. One thread at a time calls kernels.
"""

import contextlib
import ctypes
import hashlib
import os
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import llvmlite
import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.codegen import JITCPUCodegen
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from coli.errors import OptionError

SIMD_PATHS = ("avx512", "avx2", "generic")
AVX2 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2")
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
# What a forced avx2 compiles for on a processor that has more: the features of the first avx2 processors.
AVX2_NAME, AVX2_FEATURES = (
    "haswell",
    "+64bit,+avx,+avx2,+bmi,+bmi2,+cmov,+cx16,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,"
    + ("+pclmul,+popcnt,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"),
)
SPIN_COUNT = "1000"  # of GNU OpenMP: a waiting worker looks this often (some 10 us) before it gives its processor away
CACHE_BYTES = 4 << 20  # room the compiled kernels need
_WORD, _DOUBLE = struct.Struct("<q"), struct.Struct("<d")


class Recorder(Protocol):
    """Takes stage calls instead of the threads (tape.Tape)."""

    def note(self, code: int, args: np.ndarray, threads: int) -> None: ...

    def keep(self, array: np.ndarray) -> None: ...


class _State:
    """What `configure` decided; one per process, because numba's own configuration is."""

    def __init__(self) -> None:
        self.settings: tuple[str, str | None] | None = None
        self.caches = True
        self.cache_note: str | None = None
        self.threads = 1
        self.layer = ""
        self.launch: Callable[..., None] | None = None


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
    _choose_simd(simd)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    _state.threads = threads or usable
    numba.config.NUMBA_NUM_THREADS = max(_state.threads, 1)
    numba.config.LOOP_VECTORIZE = 0  # vectors are written out; automatic ones only cost compile time
    folder = _choose_cache(cache_dir)
    _state.caches = folder is not None
    numba.config.CACHE_DIR = str(folder or "")
    os.putenv("GOMP_SPINCOUNT", SPIN_COUNT)  # libgomp reads it once, when the next line loads it
    _state.layer = _choose_layer()
    numba.config.THREADING_LAYER = _state.layer
    if simd_path_of(_magic()) != "avx512":
        # With 16 registers LLVM's machine scheduler loads early and spills; the order in which we emit is a third
        # faster. With 32 registers it is the other way round.
        binding.set_option("coli", "-enable-misched=false")
    _state.settings = settings


def _choose_simd(simd: str) -> None:
    if simd == "auto":
        return
    if simd not in SIMD_PATHS:
        raise OptionError(f"simd: expected auto, {', '.join(SIMD_PATHS)}, found {simd!r}")
    host = {name for name, present in binding.get_host_cpu_features().items() if present}
    needed = {"avx512": AVX512 + AVX2, "avx2": AVX2, "generic": ()}[simd]
    missing = [name for name in needed if name not in host]
    if missing:
        raise OptionError(
            f"simd: {simd} needs {', '.join(missing)}, which this processor ({binding.get_host_cpu_name()}) lacks; "
            "use auto or generic"
        )
    if simd == "generic":
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = "generic", ""
    elif simd == "avx2" and host & {"avx512f", "avxvnni"}:
        numba.config.CPU_NAME, numba.config.CPU_FEATURES = AVX2_NAME, AVX2_FEATURES
    # Decorators of modules that were imported before have made numba read the processor's own features already.
    cpu_target.target_context._internal_codegen = JITCPUCodegen("numba.exec")


def _choose_layer() -> str:
    try:
        from numba.np.ufunc import omppool  # noqa: F401  (fails without the system's OpenMP library)
    except ImportError:
        return "workqueue"
    return "omp"


def _choose_cache(cache_dir: Path | str | None) -> Path | None:
    name = f"kernels-{_source_hash()}"
    try:
        base = Path(cache_dir) if cache_dir is not None else Path.home() / ".cache" / "coli"
    except RuntimeError as problem:  # no home directory
        reason = str(problem)
    else:
        try:
            return _private_folder(base / name)
        except OSError as problem:
            reason = f"{base}: {problem.strerror or problem}"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder: Path | None
    try:
        folder = _private_folder(Path(tempfile.gettempdir()) / f"coli-{user}" / name)
    except OSError:
        folder = _fresh_folder()
    place = (
        f"using {folder}" if folder else "nor can a temporary folder be written: kernels are compiled at every start"
    )
    _state.cache_note = f"kernel cache: {reason}; {place}"
    return folder


def _fresh_folder() -> Path | None:
    with contextlib.suppress(OSError):
        return _private_folder(Path(tempfile.mkdtemp(prefix="coli-kernels-")) / "kernels")
    return None


def _private_folder(folder: Path) -> Path:
    """The folder, made if need be and writable. Compiled code is loaded from it, so nobody else may own or write it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (folder, folder.parent):
        status = place.stat()
        if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH):
            raise PermissionError(13, f"{place} belongs to or can be written by another user")
    with tempfile.TemporaryFile(dir=folder) as file:
        if not any(folder.glob("complete-*")):
            file.write(bytes(CACHE_BYTES))
            file.flush()  # on a full disk this fails here and not after the compilation
        return folder


def _source_hash() -> str:
    """One hash over every kernel source: numba itself checks only the file that holds the function."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update(f"{numba.__version__} {llvmlite.__version__} {np.__version__} {sys.version}".encode())
    return digest.hexdigest()[:16]


def _ensure_configured() -> None:
    if _state.settings is None:
        configure()


# ------------------------------------------------------------------ what callers may ask
def simd_path() -> str:
    """avx512, avxvnni, avx2 or generic: the path the integer products are compiled for."""
    _ensure_configured()
    return simd_path_of(_magic())


def threading_layer() -> str:
    """omp, or workqueue (launches cost 50-80 us instead of 1 us) where the system has no OpenMP library."""
    _ensure_configured()
    return _state.layer


def threads() -> int:
    """Threads of the pool; the usual value of the `threads` argument of kernels."""
    _ensure_configured()
    return _state.threads


def caches() -> bool:
    """Whether compiled code is kept for the next process."""
    _ensure_configured()
    return _state.caches


def cache_note() -> str | None:
    """One line when the cache folder is a fallback."""
    _ensure_configured()
    return _state.cache_note


def cold() -> bool:
    """Whether kernels will be compiled (some 20 s) rather than loaded: nobody has completed `warm` for these sources,
    this numba and this processor."""
    _ensure_configured()
    return not (_state.caches and _marker().exists())


def warm(stages: "tuple[Stage, ...] | None" = None) -> None:
    """Compile or load the launcher and the stages a run needs (default: `coli.kernels.catalog.RUN`)."""
    from coli.kernels.catalog import RUN
    from coli.kernels.precompile import helpers

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = stages is not None or not cold() or not _state.caches or _state.cache_note is not None
    assert _state.settings is not None
    with contextlib.nullcontext() if alone else helpers(*_state.settings, cores - 1):
        _launcher()
        for stage in RUN if stages is None else stages:
            _ = stage.address
    if _state.caches:
        _marker().touch()


def _magic() -> tuple[str, str, str]:
    return cpu_target.target_context.codegen().magic_tuple()


def simd_path_of(magic: tuple[str, str, str]) -> str:
    """The path for numba's (triple, processor, features). It is part of its cache key: a path chosen from it can never
    be stale in the cache."""
    found = {name[1:] for name in magic[2].split(",") if name.startswith("+")}
    if {"avx512vnni", "avx512bw"} <= found:
        return "avx512"
    return "avxvnni" if "avxvnni" in found else "avx2" if "avx2" in found else "generic"


def _marker() -> Path:
    # numba keeps code by the place and the time of the source files: another installation compiles anew
    folder = Path(__file__).parent
    stamps = [(path.name, path.stat().st_mtime) for path in sorted(folder.glob("*.py"))]
    name = hashlib.sha256(repr((_magic(), str(folder), stamps)).encode()).hexdigest()[:16]
    return Path(numba.config.CACHE_DIR) / f"complete-{name}"


@contextmanager
def light_cache_loads() -> Iterator[None]:
    """Inside this block numba loads cached code without setting up its typing registries first, and compiles anew what
    a crash or a full disk has damaged.

    Loading needs the symbols of numba's runtime only; the registries (0.3 s, a third of a short run) are set up by the
    compiler itself when something is not in the cache. Where numba's parts are not found under these names, it loads as
    it always does.
    """
    try:
        from numba.core.caching import FunctionCache
        from numba.core.runtime import rtsys

        usual = FunctionCache.load_overload
        _ = FunctionCache._load_overload, FunctionCache._guard_against_spurious_io_errors, rtsys.initialize
    except (ImportError, AttributeError):
        yield
        return

    def load_overload(self, signature, target_context):
        rtsys.initialize(target_context)
        try:
            with self._guard_against_spurious_io_errors():
                return self._load_overload(signature, target_context)
        except Exception:  # whatever unpickling damaged bytes comes to
            self.flush()
            _marker().unlink(missing_ok=True)
            return None

    FunctionCache.load_overload = load_overload
    try:
        yield
    finally:
        FunctionCache.load_overload = usual


# ------------------------------------------------------------------ routines and stages
class Routine:
    """A jitted function of int64 arguments without a result, compiled on its own and called by address, so that the big
    loops exist once and not in every caller. It must not allocate Python objects nor raise."""

    __slots__ = ("_code", "_compiled", "arguments", "function")

    def __init__(self, function: Callable[..., None], arguments: int) -> None:
        self.function, self.arguments = function, arguments
        self._compiled: Any = None
        self._code = 0

    @property
    def address(self) -> int:
        """Of the machine code; compiles or loads it on first use."""
        if not self._code:
            _ensure_configured()
            signature = types.void(*[types.int64] * self.arguments)
            with light_cache_loads():
                self._compiled = numba.cfunc(signature, cache=_state.caches, error_model="numpy")(self.function)
            self._code = self._compiled.address
        return self._code


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
        else:
            (_state.launch or _launcher())(self.address, args, threads)


def caller(arguments: int) -> Any:
    """An intrinsic call_address(address, ...) of a routine with so many int64 arguments."""

    def codegen(context, builder, _sig, values):
        i64 = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [i64] * arguments)
        builder.call(builder.inttoptr(values[0], function.as_pointer()), values[1:])
        return context.get_dummy_value()

    names = ", ".join(f"x{i}" for i in range(arguments + 1))
    scope = {"signature": types.void(*[types.int64] * (arguments + 1)), "codegen": codegen}
    exec(f"def call_address(typingctx, {names}):\n    return signature, codegen", scope)
    return intrinsic(scope["call_address"])


call_stage = caller(3)


def record(recorder: Recorder | None) -> None:
    """Hand this thread's stage calls to `recorder` from now on; None ends that."""
    _recording.by = recorder
    _recording.keep = None if recorder is None else recorder.keep


def unpacker(count: int) -> Any:
    """An intrinsic (args, first) -> tuple of `count` int64 arguments from number `first` on. One statement instead of
    one per argument: what numba spends on a function grows with its statements."""

    def codegen(context, builder, signature, values):
        base = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        index = [builder.add(values[1], ir.Constant(ir.IntType(64), i)) for i in range(count)]
        words = [builder.load(builder.gep(base, [i])) for i in index]
        return context.make_tuple(builder, signature.return_type, words)

    result = types.UniTuple(types.int64, count)

    @intrinsic
    def unpack(typingctx, args, first):
        return result(types.int64, types.int64), codegen

    return unpack


def _launch(address, args, threads):
    """The one parallel loop of the project."""
    base = args.ctypes.data
    if threads == 1:
        call_stage(address, base, 0, 1)
    else:
        for part in numba.prange(threads):
            call_stage(address, base, np.int64(part), threads)


def _launcher() -> Callable[..., None]:
    if _state.launch is None:
        _ensure_configured()
        signature = types.void(types.int64, types.int64[::1], types.int64)
        with light_cache_loads():
            _state.launch = numba.njit(signature, parallel=True, nogil=True, cache=_state.caches)(_launch)
    return _state.launch


def device(function: Callable[..., Any]) -> Any:
    """Decorator of the jitted parts of stages: compiled with the stage that calls them, not cached by themselves."""
    return numba.njit(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


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
