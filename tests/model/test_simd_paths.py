"""Law 1 across processors, end to end: instruction set, numpy build and threads never change a bit of a forward.

Each variant runs in a process of its own and compiles its kernels when it is the first of its kind.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from containers import FIXTURES, container
from llvmlite import binding

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("forward_hashes.py")
HOST = {name for name, present in binding.get_host_cpu_features().items() if present}
PLAIN_AVX2 = (
    ("NUMBA_CPU_NAME", "haswell"),
    ("NUMBA_CPU_FEATURES", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+sse4.2"),
)
OLD_NUMPY = (
    ("NPY_DISABLE_CPU_FEATURES", "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX" if "avx512f" in HOST else "AVX2 FMA3"),
)


@functools.cache
def run(simd: str, threads: int, variables: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    paths = [str(container(name, quant)) for name in FIXTURES for quant in ("f32", "q8", "q4")]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NUMBA_CPU", "NPY_", "COLI_SIMD"))}
    tests = SCRIPT.parent.parent
    search = os.pathsep.join([str(tests), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), simd, str(threads), *paths],
        capture_output=True,
        text=True,
        timeout=900,
        env={**kept, "PYTHONPATH": search, **dict(variables)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_cuts_of_one_variant_agree() -> None:
    for name, (alone, *others, _) in run("auto", 1)["hashes"].items():
        assert set(others) == {alone}, name
    assert len({tuple(found) for found in run("auto", 1)["hashes"].values()}) > len(FIXTURES) * 3  # no constant


def test_two_threads_give_the_bits_of_one() -> None:
    assert run("auto", 2)["hashes"] == run("auto", 1)["hashes"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("simd", ["avx512", "avx2", "generic"])
def test_a_forced_path_gives_the_same_bits(simd: str, threads: int) -> None:
    needed = {"avx512": "avx512vnni", "avx2": "avx2"}.get(simd)
    if needed and needed not in HOST:
        pytest.skip(f"this processor has no {needed}")
    forced = run(simd, threads)
    assert forced["path"] == simd
    assert forced["hashes"] == run("auto", 1)["hashes"]


@pytest.mark.skipif("avx2" not in HOST or "fma" not in HOST, reason="needs avx2")
def test_another_processor_name_gives_the_same_bits() -> None:
    assert run("auto", 2, PLAIN_AVX2)["hashes"] == run("auto", 1)["hashes"]


def test_numpy_without_its_cpu_features_gives_the_same_bits() -> None:
    assert run("auto", 1, OLD_NUMPY)["hashes"] == run("auto", 1)["hashes"]
