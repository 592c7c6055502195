"""Configuration of the kernels: refused paths, cache folders, and what a cold cache says about itself."""

import ctypes
import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from coli.errors import OptionError
from coli.kernels import code_cache, image, precompile, runtime
from coli.kernels.elementwise import COUNT_BAD, count_bad
from coli.kernels.target import Target, ask_llvm, choose_target

REPORT = """
import json, sys
from coli.kernels import precompile, runtime
from coli.kernels.elementwise import COUNT_BAD, count_bad
runtime.configure(*json.loads(sys.argv[1]))
import numpy as np
before = runtime.cold()
runtime.warm((COUNT_BAD,))
bad = count_bad(np.full((1, 3), np.nan, np.float32)).tolist()
print(json.dumps([before, runtime.cold(), runtime.cache_note(), runtime.threads(), bad]))
"""


def run(*settings: object, **environment: str) -> tuple[list, str]:
    """(cold before, cold after, note, threads, result) of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT, json.dumps(settings)],
        capture_output=True, text=True, timeout=900, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_cache_is_cold_once(tmp_path):
    folder = str(tmp_path / "cache")
    assert run("auto", folder)[0] == [True, False, None, runtime._processors(), [3.0]]
    assert run("auto", folder)[0][:2] == [False, False]


def test_a_damaged_cache_is_compiled_anew(tmp_path):
    folder = str(tmp_path / "cache")
    run("auto", folder)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.code")}
    assert len(whole) == 3  # the launcher, what its threads do, and the stage
    for path, damage in zip(
        whole, (lambda code: code[:900], lambda code: code[:-9] + bytes(9), lambda code: b""), strict=True
    ):
        path.write_bytes(damage(whole[path]))
    assert run("auto", folder)[0] == [False, False, None, runtime._processors(), [3.0]]
    assert {path: len(path.read_bytes()) for path in whole} == {path: len(code) for path, code in whole.items()}


def test_the_processor_is_remembered_and_asked_where_that_is_damaged(tmp_path):
    here = ask_llvm()
    assert code_cache.host_target(tmp_path) == here
    (remembered,) = tmp_path.iterdir()
    assert code_cache.host_target(tmp_path) == here
    remembered.write_text("one line\n")
    assert code_cache.host_target(tmp_path) == here
    assert code_cache.host_target(None) == here


LOADED = """
import sys
from coli.kernels import runtime
runtime.configure(*sys.argv[1:3])
from coli.kernels.catalog import ALL
for stage in ALL:
    stage.address
runtime.launcher().routine.address
print(runtime.threading_layer(), [name for name in ("numba", "llvmlite", "coli.kernels.simd") if name in sys.modules])
"""


def test_what_is_in_the_cache_is_loaded_without_numba():
    """All stages: machine code must refer to nothing that only numba has."""
    settings = [os.environ.get("COLI_SIMD", "auto"), *filter(None, [os.environ.get("COLI_KERNEL_CACHE")])]
    for expected in (None, "[]"):  # what is missing is compiled by the first process
        done = subprocess.run(
            [sys.executable, "-c", LOADED, *settings],
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        layer, _, loaded = done.stdout.strip().partition(" ")
        if expected and layer == "omp":
            assert loaded == expected


def test_object_files_are_loaded_where_there_are_no_images(monkeypatch):
    """As on other systems: by LLVM's loader."""
    compiler = runtime._compiler()
    monkeypatch.setattr(compiler, "sys", SimpleNamespace(platform="darwin"))
    code = compiler.machine_code(COUNT_BAD.function, COUNT_BAD.arguments, "as_elsewhere")
    assert not code.startswith(image.MAGIC)
    rows, counts = np.full((3, 5), np.inf, np.float32), np.zeros(3)
    block = runtime.arguments(runtime.address(rows), 3, 5, 5, runtime.address(counts))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(code_cache.load(code, "as_elsewhere"))
    function(runtime.address(block), 0, 1)
    assert counts.tolist() == [5.0] * 3


QUEUE = REPORT.replace("runtime.configure(", "runtime._openmp = lambda: None\nruntime.configure(").replace(
    "bad = count_bad(np.full((1, 3), np.nan, np.float32)).tolist()",
    "queued = int(runtime.threading_layer() == 'workqueue')\n"
    "bad = [queued, *count_bad(np.full((9, 3), np.nan, np.float32), 4).tolist()]",
)


def test_the_queue_runs_every_part_once(tmp_path):
    """4 parts on 2 threads."""
    done = subprocess.run(
        [sys.executable, "-c", QUEUE, json.dumps(["auto", str(tmp_path), 2])],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[4] == [1, *[3.0] * 9]


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_a_launch_runs_every_part_once_whatever_the_pool_has(threads):
    assert count_bad(np.full((11, 3), np.nan, np.float32), threads).tolist() == [3.0] * 11


def test_threads_are_taken_as_given(tmp_path):
    assert run("auto", str(tmp_path), 3)[0][3] == 3


def test_a_folder_that_cannot_be_written_falls_back_with_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    report, stderr = run("auto", str(tmp_path / "file" / "cache"), TMPDIR=str(tmp_path))
    assert report[2].startswith(f"kernel cache: {tmp_path / 'file' / 'cache'}: Not a directory; using ")
    assert str(tmp_path) in report[2]
    assert report[4] == [3.0]
    assert stderr == ""


def test_a_temporary_folder_of_somebody_else_is_not_trusted(tmp_path):
    (tmp_path / "file").write_text("")
    shared = tmp_path / f"coli-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    report, _ = run("auto", str(tmp_path / "file" / "cache"), TMPDIR=str(tmp_path))
    assert f"using {shared}" not in report[2]
    assert report[4] == [3.0]


def full_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_any_folder_kernels_are_compiled_at_every_start(monkeypatch, tmp_path):
    monkeypatch.setattr(code_cache, "_private_folder", full_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder, note = code_cache.choose_folder(tmp_path)
    assert folder is None
    begin = f"kernel cache: {tmp_path}: No space left on device; nor can a temporary folder be written: kernels are"
    assert note.startswith(begin)


def test_kernels_run_without_a_cache(tmp_path):
    script = REPORT.replace(
        "runtime.configure(", "runtime.choose_folder = lambda folder: (None, None)\nruntime.configure("
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "[]"], capture_output=True, text=True, timeout=900,
        env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after, _, _, bad = json.loads(done.stdout)
    assert (before, after, bad) == (True, True, [3.0])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_path_is_refused():
    with pytest.raises(OptionError, match=r"simd: expected auto, avx512, avx2, generic, found 'sse'"):
        choose_target("sse", ask_llvm)


def test_a_path_the_processor_lacks_is_refused():
    with pytest.raises(OptionError, match=r"simd: avx512 needs avx512f, .*avx512vnni.* lacks; use auto or generic"):
        choose_target("avx512", lambda: Target("old", "+avx2,+fma,-avx512f"))


def test_the_first_configuration_decides_for_the_process():
    before = runtime.simd_path(), runtime.threads()
    runtime.configure("auto", None, 7)
    assert (runtime.simd_path(), runtime.threads()) == before
    other = "generic" if os.environ.get("COLI_SIMD") != "generic" else "avx2"
    with pytest.raises(OptionError, match=rf"simd: this process has started with .*, not {other}"):
        runtime.configure(other)
    with pytest.raises(OptionError, match=r"kernel cache: this process has started with .*, not elsewhere"):
        runtime.configure("auto", "elsewhere")


def test_waiting_workers_soon_give_their_processor_away():
    """libgomp reads its environment when it is loaded; its own default (300000) halts a busy machine."""
    layer = "from coli.kernels import runtime; runtime.configure(); print(runtime.threading_layer())"
    done = subprocess.run(
        [sys.executable, "-c", layer], capture_output=True, text=True, timeout=900,
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose"},
    )  # fmt: skip
    if done.stdout.strip() != "omp" or "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("no GNU OpenMP")
    assert f"GOMP_SPINCOUNT = '{runtime.SPIN_COUNT}'" in done.stderr


def test_arguments_keep_integers_and_floats():
    block = runtime.arguments(3, -7, 0.5, 2**62)
    assert block.dtype == np.int64
    assert block.tolist()[:2] == [3, -7]
    assert block.view(np.float64)[2] == 0.5
    assert block[3] == 2**62


COMPILE = """
import json, sys
from coli.kernels import runtime
runtime.configure("auto", sys.argv[1])
from coli.kernels.loops import OUTER, TILE
TILE.address, OUTER.address
code = runtime._compiler().assembly(TILE.function, TILE.arguments)
print(json.dumps([runtime.simd_path(), code.count("vpdpbusd"), code.count("zmm"), code.count("ymm")]))
"""


@pytest.mark.parametrize(("name", "path"), [("znver4", "avx512"), ("alderlake", "avxvnni")])
def test_vnni_paths_compile_for_processors_that_have_it(tmp_path, name, path):
    """Compiled, not run: this checks the code that this machine may be unable to execute."""
    features = {
        "znver4": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,+evex512",
        "alderlake": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avxvnni",
    }[name]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path)], capture_output=True, text=True, timeout=900,
        env={**os.environ, "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found, products, wide, narrow = json.loads(done.stdout)
    assert found == path
    assert products > 100
    assert wide > 100 if path == "avx512" else narrow > 100


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_without_helpers_the_caller_compiles_alone(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with precompile.helpers("auto", None, 3):
        pass


@pytest.mark.slow
def test_a_cold_cache_is_filled_by_several_processes(tmp_path):
    """Everything is there afterwards, and no helper outlives the call."""
    code = (
        "import sys, psutil; from coli.kernels import runtime; runtime.configure('auto', sys.argv[1]); "
        "cold = runtime.cold(); runtime.warm(); print(cold, runtime.cold(), len(psutil.Process().children()))"
    )
    for expected in ("True False 0", "False False 0"):
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=900)
        assert done.stdout.strip() == expected, done.stderr
