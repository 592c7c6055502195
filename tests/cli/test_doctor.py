"""`coli doctor` finds each thing that can be wrong, names it, and says what to do."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from containers import ORACLE, container

from coli.builtin import DEMO_MODEL
from coli.options import EngineOptions
from coli.tools.doctor import Finding, Machine, machine_findings, model_findings


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(container("qwen3_moe-padvocab", "q4"), tmp_path / "model"))


@pytest.fixture
def machine() -> Machine:
    return Machine.here(EngineOptions(simd=os.environ.get("COLI_SIMD", "auto")))


def wrong(findings: list[Finding], what: str) -> Finding:
    """The one finding about `what` that is not ok; it must say what to do."""
    (found,) = [finding for finding in findings if finding.what == what and finding.level != "ok"]
    assert found.remedy
    return found


def of_model(model: Path, machine: Machine, deep: bool = False) -> list[Finding]:
    return list(model_findings(model, machine, deep=deep, probe=False))


def alone(*arguments: str, prologue: str = "", **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """(status, what is not ok) of `coli doctor` in a process of its own."""
    program = f"import sys\n{prologue}\nfrom coli.cli.main import main\nmain(['doctor', '--json', *sys.argv[1:]])"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **variables}, check=False)
    facts = json.loads(done.stdout)
    return done.returncode, {f["what"]: f for f in facts["findings"] if f["level"] != "ok"}


def test_a_sound_model_has_no_failures(coli, model):
    done = coli("doctor", model, "--deep")
    assert done.status == 0, done.out
    assert "ok       model files" in done.out
    assert "0 failures" in done.out


def test_without_a_model_the_demo_model_is_looked_at(coli):
    done = coli("doctor", "--json")
    facts = json.loads(done.out)
    assert (done.status, facts["failures"]) == (0, 0)
    assert any(str(DEMO_MODEL) in finding["found"] for finding in facts["findings"])


def test_a_truncated_shard(coli, model):
    (shard,) = model.glob("experts-*")
    os.truncate(shard, shard.stat().st_size - 4096)
    done = coli("doctor", model)
    assert done.status == 1
    assert shard.name in done.out
    assert "->" in done.out


def test_a_missing_shard(model, machine):
    (shard,) = model.glob("experts-*")
    shard.unlink()
    assert f"missing: {shard.name}" in wrong(of_model(model, machine), "files").found


def test_a_foreign_container_version(model, machine):
    manifest = json.loads((model / "coli.json").read_text())
    (model / "coli.json").write_text(json.dumps(manifest | {"format_version": 99}))
    found = wrong(of_model(model, machine), "files")
    assert "format_version 99" in found.found
    assert "convert" in found.remedy


def test_a_byte_that_changed_is_found_by_reading_deep(model, machine):
    (shard,) = model.glob("experts-*")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert not [f for f in of_model(model, machine) if f.level != "ok"]
    assert shard.name in wrong(of_model(model, machine, deep=True), "digests").found


@pytest.mark.parametrize("other", ["llama-bias-sharded", "missing"])
def test_a_wrong_tokenizer(model, machine, other):
    source = ORACLE / other / "tokenizer.json"
    if other == "missing":
        (model / "tokenizer.json").write_bytes((DEMO_MODEL / "tokenizer.json").read_bytes())
    else:
        (model / "tokenizer.json").write_bytes(source.read_bytes() + b"\n")
    found = [f for f in of_model(model, machine) if f.what == "tokenizer" and f.level == "failure"]
    assert "wrong tokenizer" in found[0].found
    assert found[0].remedy


def test_a_cgroup_smaller_than_the_dense_weights(tmp_path, machine):
    root = tmp_path / "root"
    group = root / "sys/fs/cgroup/small"
    group.mkdir(parents=True)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (root / "proc/self/cgroup").write_text("0::/small\n")
    (root / "proc/meminfo").write_text("MemTotal: 24000000 kB\nMemAvailable: 20000000 kB\n")
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("1000\n")
    here = Machine.here(EngineOptions(simd=os.environ.get("COLI_SIMD", "auto")), root)
    found = wrong(of_model(DEMO_MODEL, here), "memory")
    assert "dense weights" in found.found
    assert "cgroup" in found.found


def test_a_read_only_kernel_cache():
    status, found = alone(COLI_KERNEL_CACHE="/proc/coli")
    assert status == 0
    assert "/proc/coli" in found["kernel cache"]["found"]
    assert "COLI_KERNEL_CACHE" in found["kernel cache"]["remedy"]


def test_a_forced_generic_path():
    _, found = alone(COLI_SIMD="generic")
    assert "generic" in found["instructions"]["found"]
    assert "COLI_SIMD" in found["instructions"]["remedy"]


def test_a_missing_libgomp(machine):
    findings = list(machine_findings(dataclasses.replace(machine, openmp=False, layer="workqueue")))
    assert "libgomp1" in wrong(findings, "libgomp").remedy
    assert "libgomp" in wrong(findings, "threads").remedy


def test_a_libgomp_that_the_system_does_not_have():
    """As the loader says it."""
    refuse = (
        "import ctypes\n"
        "class CDLL(ctypes.CDLL):\n"
        "    def __init__(self, name, *rest, **more):\n"
        "        if 'libgomp' in str(name): raise OSError(f'{name}: cannot open shared object file')\n"
        "        super().__init__(name, *rest, **more)\n"
        "ctypes.CDLL = CDLL\n"
    )
    status, found = alone(prologue=refuse)
    assert status == 0
    assert "libgomp.so.1" in found["libgomp"]["found"]
    assert "libgomp1" in found["libgomp"]["remedy"]
    assert "workqueue" in found["threads"]["found"]
    assert found["threads"]["remedy"] == "see libgomp"


def test_a_model_that_is_not_there(coli):
    done = coli("doctor", "nowhere", "--json")
    assert done.status == 1
    assert "nowhere" in done.out
