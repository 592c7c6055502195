"""Law 1 across processors: every instruction set, numpy feature set and thread count gives the same bits.

Each variant runs in a process of its own, because code generation is settled at the first compilation."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

SCRIPT = Path(__file__).with_name("fingerprint.py")
HOST = {name for name, present in binding.get_host_cpu_features().items() if present}
PLAIN_AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2"}


@functools.cache
def fingerprint(simd: str, threads: int, variables: tuple[tuple[str, str], ...] = ()) -> dict:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_CPU", "NPY_"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), simd, str(threads)],
        capture_output=True, text=True, timeout=1200, env={**environment, **dict(variables)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_two_threads_give_the_bits_of_one():
    assert fingerprint("auto", 2)["hashes"] == fingerprint("auto", 1)["hashes"]


@pytest.mark.parametrize("simd", ["avx512", "avx2", "generic"])
def test_a_forced_path_gives_the_same_bits(simd):
    needed = {"avx512": "avx512vnni", "avx2": "avx2"}.get(simd)
    if needed and needed not in HOST:
        pytest.skip(f"this processor has no {needed}")
    forced = fingerprint(simd, 1)
    assert forced["path"] == simd
    assert forced["hashes"] == fingerprint("auto", 1)["hashes"]


@pytest.mark.skipif("avx2" not in HOST or "fma" not in HOST, reason="needs avx2")
def test_another_processor_name_gives_the_same_bits():
    assert fingerprint("auto", 1, tuple(PLAIN_AVX2.items()))["hashes"] == fingerprint("auto", 1)["hashes"]


def test_numpy_without_its_cpu_features_gives_the_same_bits():
    features = "AVX2 FMA3" if "avx512f" not in HOST else "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX"
    plain = fingerprint("auto", 1, (("NPY_DISABLE_CPU_FEATURES", features),))
    assert plain["hashes"] == fingerprint("auto", 1)["hashes"]
