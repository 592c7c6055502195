"""The processor kernels are compiled for, in LLVM's words, and the SIMD path its features allow."""

import os
from collections.abc import Callable
from typing import NamedTuple

from coli.errors import OptionError

SIMD_PATHS = ("avx512", "avx2", "generic")
AVX2 = ("avx", "avx2", "fma", "f16c", "bmi", "bmi2")
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")
UNSOUND_AVX = ("corei7-avx", "core-avx-i", "sandybridge", "ivybridge")  # numba does not use AVX there

IDENTIFYING = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")


class Target(NamedTuple):
    """A processor as LLVM is told of it: its model, and every feature with + or - before it ("+avx,-avx512f,...").

    Code compiled for one runs only where all of its + features are; the cache of compiled kernels is kept per target.
    """

    name: str
    features: str


# What a forced avx2 compiles for on a processor that has more: the features of the first avx2 processors.
PLAIN_AVX2 = Target(
    "haswell",
    "+64bit,+avx,+avx2,+bmi,+bmi2,+cmov,+cx16,+f16c,+fma,+fxsr,+lzcnt,+mmx,+movbe,"
    + ("+pclmul,+popcnt,+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2"),
)


def choose_target(simd: str, host: Callable[[], Target]) -> Target:
    """The processor to compile for; `host`: this one.

    simd: auto | avx512 | avx2 | generic; OptionError when this processor cannot execute it."""
    if simd == "auto":
        return _own(host)
    if simd not in SIMD_PATHS:
        raise OptionError(f"simd: expected auto, {', '.join(SIMD_PATHS)}, found {simd!r}")
    here = host()
    found = {name[1:] for name in here.features.split(",") if name.startswith("+")}
    needed = {"avx512": AVX512 + AVX2, "avx2": AVX2, "generic": ()}[simd]
    missing = [name for name in needed if name not in found]
    if missing:
        raise OptionError(
            f"simd: {simd} needs {', '.join(missing)}, which this processor ({here.name}) lacks; use auto or generic"
        )
    if simd == "generic":
        return Target("generic", "")
    return PLAIN_AVX2 if simd == "avx2" and found & {"avx512f", "avxvnni"} else _own(host)


def _own(host: Callable[[], Target]) -> Target:
    """This processor, or what numba's own variables say instead."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name is None and features is None:
        return host()
    if features is None:
        features = "" if name == "generic" else host().features
    return Target(name or host().name, features)


def ask_llvm() -> Target:
    """This processor as LLVM describes it."""
    from llvmlite import binding

    name = binding.get_host_cpu_name()
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # it cannot tell on every system
        return Target(name, "")
    if name in UNSOUND_AVX:
        features.update({feature: False for feature in features if feature.startswith("avx")})
    return Target(name, features.flatten())


def identity() -> str | None:
    """Everything the system says that could change what LLVM says of this processor; None: it says nothing."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(8192).partition(b"\n\n")[0].decode()
    except (OSError, ValueError):
        return None
    kept = [line for line in first.splitlines() if line.partition("\t")[0] in IDENTIFYING]
    return repr((kept, os.uname())) if any(line.startswith("flags") for line in kept) else None


def simd_path_of(features: str) -> str:
    """avx512, avxvnni, avx2 or generic: the path for a target's features. They are part of the key of the code cache: a
    path chosen from them can never be stale in it."""
    found = {name[1:] for name in features.split(",") if name.startswith("+")}
    if {"avx512vnni", "avx512bw"} <= found:
        return "avx512"
    return "avxvnni" if "avxvnni" in found else "avx2" if "avx2" in found else "generic"
