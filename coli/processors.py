"""How many processors this process may keep busy: physical cores, affinity, and the CPU quota of every cgroup above it.

Reads /proc and /sys below a root folder that tests replace. Called where threads are chosen and none were asked for.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

V1_FOLDERS = ("cpu,cpuacct", "cpu", "cpuacct,cpu")


def usable_cores(root: Path = Path("/"), physical: int | None = None, affinity: int | None = None) -> int:
    """Threads that can compute at the same time without sharing a core or waiting for quota, at least 1.

    Args:
        physical, affinity: what the machine says, for tests; None: ask it.
    """
    physical = physical or _physical(root) or os.cpu_count() or 1
    affinity = affinity or _affinity()
    quotas = [max(1, int(quota)) for quota in _quotas(root)]
    return min(physical, affinity, *quotas)


def processor_name(root: Path = Path("/")) -> str:
    """The processor's model name as the system gives it, else its architecture."""
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return os.uname().machine or "unknown"


def _physical(root: Path) -> int | None:
    """Cores, each counted once however many threads it has."""
    topology = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology")
    cores = {_text(core / "core_cpus_list") or _text(core / "thread_siblings_list") for core in topology} - {""}
    if cores:
        return len(cores)
    import psutil  # 20 ms, for systems without /sys

    return psutil.cpu_count(logical=False)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Processors' worth of time per period, of our cgroup and those above it; none where nothing limits."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            tops = [root / "sys/fs/cgroup" / name for name in V1_FOLDERS]
        else:
            continue
        for top in tops:
            # In a container our path may not be visible below the mount: then the mount is our group.
            below = PurePosixPath(path.lstrip("/"))
            for folder in {top / below, *(top / parent for parent in below.parents), top}:
                yield from _quota(folder)


def _quota(folder: Path) -> Iterator[float]:
    words = _text(folder / "cpu.max").split() or [
        *_text(folder / "cpu.cfs_quota_us").split(),
        *_text(folder / "cpu.cfs_period_us").split(),
    ]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        yield int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
