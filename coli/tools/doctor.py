"""What is wrong with this machine, this install or a model, and what to do about it.

Every check returns findings and none of them raises for what it looks for. Facts of the machine are gathered once
(`Machine.here`), so that tests can make up others. Called by the command line.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coli import __version__
from coli.builtin import DEMO_MODEL
from coli.errors import ColiError, MemoryBudgetError
from coli.kernels import runtime
from coli.loading import PREFILL_CHUNK, kv_type, working_bytes
from coli.model.kv_cache import kv_bytes
from coli.model.tensors import container_spec
from coli.options import EngineOptions
from coli.processors import processor_name, usable_cores
from coli.store.container import Container
from coli.store.limits import MemoryLevel, filesystem_type, memory_levels
from coli.store.manifest import MANIFEST, Manifest
from coli.store.memory import MemoryNeeds, megabytes, plan_memory
from coli.text.chat import ChatTemplate
from coli.text.tokenizer import Tokenizer
from coli.tools.download import file_sha256
from coli.tools.probe import disk_speed

Level = Literal["ok", "warning", "failure"]
SLOW_DISK = 200e6  # bytes/s; below it even a small model waits for experts most of the time
LARGE_RECORD = 1_000_000  # smaller reads are slow on any disk
CONTEXT = 4096
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([\d.]+)")


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` names the thing looked at, `found` says how it is, `remedy` what to do ("" when nothing)."""

    area: str
    what: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the kernels and the system say of themselves."""

    processor: str
    cores: int
    simd: str
    forced_simd: bool
    layer: str
    openmp: bool  # whether the system's OpenMP library can be loaded
    cache_note: str | None
    cold: bool
    levels: Sequence[MemoryLevel]

    @staticmethod
    def here(options: EngineOptions, root: Path = Path("/")) -> Machine:
        """This machine; `root` holds the /proc and /sys that memory and processor limits are read from."""
        runtime.configure(options.simd, options.kernel_cache, options.threads)
        return Machine(
            processor_name(root),
            usable_cores(root),
            runtime.simd_path(),
            options.simd != "auto",
            runtime.threading_layer(),
            _loads("libgomp.so.1"),
            runtime.cache_note(),
            runtime.cold(),
            memory_levels(root),
        )


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Processor, instruction set, threads, kernel cache, memory."""

    def found(what: str, level: Level, text: str, remedy: str = "") -> Finding:
        return Finding("machine", what, level, text, remedy)

    yield found("processor", "ok", f"{machine.processor}, {machine.cores} cores to compute on")
    if machine.forced_simd:
        remedy = "unset COLI_SIMD to use the best path of this processor"
        yield found("instructions", "warning", f"the {machine.simd} path is forced by COLI_SIMD", remedy)
    elif machine.simd == "generic":
        remedy = "results are the same, only slow; an x86-64 processor with AVX2 is many times faster"
        yield found("instructions", "warning", "no AVX2: the generic path is used", remedy)
    else:
        yield found("instructions", "ok", machine.simd)
    if machine.layer == "omp":
        yield found("threads", "ok", "omp")
    else:
        yield found(
            "threads", "warning", f"the {machine.layer} layer: a kernel launch costs 50 us and more instead of 1 us",
            "see libgomp",
        )  # fmt: skip
    if not machine.openmp and platform.system() == "Linux":
        remedy = "install it: apt-get install libgomp1, dnf install libgomp, apk add libgomp"
        yield found("libgomp", "warning", "the system's OpenMP library, libgomp.so.1, cannot be loaded", remedy)
    if machine.cache_note:
        remedy = "name a folder that you can write with COLI_KERNEL_CACHE, or kernels may be compiled again"
        yield found("kernel cache", "warning", machine.cache_note, remedy)
    else:
        state = (
            "kernels are compiled with the next run, about half a minute" if machine.cold else "kernels are compiled"
        )
        yield found("kernel cache", "ok", state)
    if not machine.levels:
        yield found("memory", "warning", "this system does not say how much there is", "give --ram with each run")
    else:
        tightest = machine.levels[0]
        others = ", ".join(f"{level.source}: {megabytes(level.limit_bytes)}" for level in machine.levels[1:])
        text = f"{megabytes(tightest.room_bytes)} left of {megabytes(tightest.limit_bytes)} ({tightest.source})"
        yield found("memory", "ok", text + (f"; {others}" if others else ""))


def install_findings() -> Iterator[Finding]:
    """Python, the packages coli needs, and the model inside the package."""
    text = f"coli {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    if sys.platform == "linux" and platform.machine() == "x86_64":
        yield Finding("install", "system", "ok", text)
    else:
        remedy = "coli is tested on Linux x86-64; elsewhere it is best effort"
        yield Finding("install", "system", "warning", text, remedy)
    wrong = list(_wrong_packages())
    if wrong:
        yield Finding("install", "packages", "failure", "; ".join(wrong), "install coli again with pip")
    else:
        yield Finding("install", "packages", "ok", "all there")
    try:
        Container.open(DEMO_MODEL)
        Tokenizer.load(DEMO_MODEL)
    except ColiError as error:
        yield Finding("install", "demo model", "failure", str(error), "install coli again with pip")
    else:
        yield Finding("install", "demo model", "ok", "opens")


def model_findings(path: Path, machine: Machine, *, deep: bool = False, probe: bool = True) -> Iterator[Finding]:
    """The container in folder `path`: files, memory, tokenizer, disk; with `deep` every byte of it too."""

    def found(what: str, level: Level, text: str, remedy: str = "") -> Finding:
        return Finding("model", what, level, text, remedy)

    again = "copy the container again, or convert it anew"
    try:
        manifest = Manifest.read(path / MANIFEST) if (path / MANIFEST).is_file() else None
        missing = [name for name in manifest.digests if not (path / name).is_file()] if manifest else []
        if missing:
            yield found("files", "failure", f"{path}: missing: {', '.join(missing)}", again)
            return
        container = Container.open(path)
        spec = container_spec(container)
    except ColiError as error:
        remedy = "convert it with this version of coli" if "format_version" in str(error) else again
        yield found("files", "failure", str(error), remedy if error.exit_code == 1 else "")
        return
    yield found("files", "ok", f"{path}: {spec.model_type}, {len(container.manifest.digests) + 1} files")
    yield from _digest_findings(container, again, deep)
    yield from _memory_findings(container, machine)
    yield from _tokenizer_findings(container, spec.vocab_size)
    if probe:
        yield from _disk_findings(container)


def _digest_findings(container: Container, again: str, deep: bool) -> Iterator[Finding]:
    """Side files are small and looked at always; they are where things get mixed up."""
    damaged = False
    for name, digest in container.manifest.digests.items():
        if name.endswith(".safetensors") and not deep:
            continue
        found = file_sha256(container.path / name)
        if found == digest:
            continue
        damaged = True
        text = f"{container.path / name}: not the file that was converted: sha256 {found}, expected {digest}"
        if name == "tokenizer.json":
            yield Finding("model", "tokenizer", "failure", f"wrong tokenizer: {text}", again)
        else:
            yield Finding("model", "digests", "failure", text, again)
    if deep and not damaged:
        yield Finding("model", "digests", "ok", "every byte is what was converted")


def _memory_findings(container: Container, machine: Machine) -> Iterator[Finding]:
    spec = container_spec(container)
    records = {i: container.expert_layout(i).record_bytes for i in container.moe_layers}
    dense = sum(container.array(name).nbytes for name in container.tensor_names())
    context = min(CONTEXT, spec.max_position_embeddings)
    kv = kv_bytes(spec, kv_type(container, "auto"), context)
    buffers = working_bytes(spec, min(PREFILL_CHUNK, context), context, machine.cores)
    cycle = sum(records.values()) * spec.num_experts_per_tok
    tightest = machine.levels[0] if machine.levels else None
    if tightest is not None and tightest.room_bytes < dense:
        yield Finding(
            "model", "memory", "failure",
            f"the dense weights take {megabytes(dense)}, {tightest.source} leaves {megabytes(tightest.room_bytes)} "
            f"of {megabytes(tightest.limit_bytes)}",
            "raise that limit, free memory, or use a smaller model",
        )  # fmt: skip
        return
    try:
        plan = plan_memory(
            MemoryNeeds(dense, kv, buffers),
            ram=None,
            smallest_experts_bytes=max(records.values(), default=0) * spec.num_experts_per_tok,
            all_experts_bytes=sum(records.values()) * spec.num_experts,
            levels=machine.levels,
        )
    except MemoryBudgetError as error:
        yield Finding("model", "memory", "failure", str(error), "see `coli plan`")
        return
    if plan.experts_bytes < cycle:
        text = f"{megabytes(plan.experts_bytes)} for experts are less than the {megabytes(cycle)} one token uses"
        yield Finding("model", "memory", "warning", text, "more memory helps much here: see `coli plan`")
    else:
        yield Finding("model", "memory", "ok", plan.arithmetic())


def _tokenizer_findings(container: Container, vocab_size: int) -> Iterator[Finding]:
    try:
        tokenizer = Tokenizer.load(container.path)
        template = ChatTemplate.load(container.path)
    except ColiError as error:
        yield Finding(
            "model", "tokenizer", "failure", str(error), "copy the model's tokenizer files into the container"
        )
        return
    if tokenizer.vocab_size > vocab_size:
        text = f"wrong tokenizer: it has {tokenizer.vocab_size} ids, the model {vocab_size}"
        yield Finding("model", "tokenizer", "failure", text, "copy the model's own tokenizer files into the container")
        return
    text = f"{tokenizer.vocab_size} ids, {'a' if template else 'no'} chat template"
    yield Finding("model", "tokenizer", "ok", text)


def _disk_findings(container: Container) -> Iterator[Finding]:
    layouts = [container.expert_layout(i) for i in container.moe_layers]
    if not layouts:
        return
    files = sorted({layout.path for layout in layouts})
    try:
        speed = disk_speed(files, max(layout.record_bytes for layout in layouts), seconds=0.5)
    except ColiError as error:
        yield Finding("model", "disk", "failure", str(error), "check the disk")
        return
    kind = filesystem_type(files[0]) or "unknown file system"
    text = f"{speed.bytes_per_s / 1e6:.0f} MB/s in reads of one expert ({kind})"
    if not speed.direct:
        remedy = "put the model on a local disk (ext4, xfs); --io pread is used meanwhile"
        yield Finding("model", "disk", "warning", f"{text}; direct reads are refused", remedy)
    elif speed.bytes_per_s < SLOW_DISK and layouts[0].record_bytes >= LARGE_RECORD:
        yield Finding("model", "disk", "warning", f"{text}: slow", "put the model on an NVMe disk")
    else:
        yield Finding("model", "disk", "ok", text)


def space_finding(home: Path | None) -> Iterator[Finding]:
    """Room for models."""
    place = next((folder for folder in (home, *home.parents) if folder.is_dir()), None) if home else None
    if home is not None and place is not None:
        text = f"{megabytes(shutil.disk_usage(place).free)} free for models under {home}"
        yield Finding("install", "model home", "ok", text)


def _wrong_packages() -> Iterator[str]:
    try:
        wanted = importlib.metadata.requires("coli") or []
    except importlib.metadata.PackageNotFoundError:
        return  # run from a checkout
    for line in wanted:
        match = _REQUIREMENT.match(line)
        if match is None or "extra" in line:
            continue
        try:
            found = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            yield f"{match[1]} is not installed"
            continue
        if _numbers(found) < _numbers(match[2]):
            yield f"{match[1]} {found} is older than {match[2]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
