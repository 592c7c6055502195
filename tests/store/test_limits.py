"""The tightest memory limit is found on machines, in nested cgroups of both versions and in containers."""

import os
from pathlib import Path

import pytest

from coli.store.limits import filesystem_type, memory_levels, process_memory

GB = 10**9
MEMINFO = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n"
STATUS = "RssAnon:  1000 kB\nRssFile: 500 kB\nRssShmem: 8 kB\nVmSize: 9000 kB\nVmData: 7000 kB\n"


class Machine:
    """A made-up /proc and /sys below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/self/status", STATUS)
        self.write("proc/self/mountinfo", "")
        self.write("proc/self/cgroup", "")

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def mounts(self, *lines: str) -> None:
        self.write("proc/self/mountinfo", "\n".join(lines))

    def tightest(self) -> tuple[str, int]:
        level = memory_levels(self.root, rlimits={})[0]
        return level.source, level.room_bytes


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


V2 = "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def test_without_cgroups_the_machine_is_the_limit(machine: Machine) -> None:
    assert machine.tightest() == ("the machine", 20000000 * 1024)


def test_v2_max_means_no_limit(machine: Machine) -> None:
    machine.mounts(V2)
    machine.write("proc/self/cgroup", "0::/a")
    machine.write("sys/fs/cgroup/a/memory.max", "max")
    assert machine.tightest()[0] == "the machine"


def test_v2_nested_takes_the_tightest_ancestor(machine: Machine) -> None:
    machine.mounts(V2)
    machine.write("proc/self/cgroup", "0::/a/b/c")
    machine.write("sys/fs/cgroup/a/memory.max", 6 * GB)
    machine.write("sys/fs/cgroup/a/memory.current", 3 * GB)
    machine.write("sys/fs/cgroup/a/memory.stat", f"anon {GB}\nactive_file {GB}\ninactive_file {GB // 2}")
    machine.write("sys/fs/cgroup/a/b/memory.max", 8 * GB)
    machine.write("sys/fs/cgroup/a/b/memory.high", 7 * GB)
    machine.write("sys/fs/cgroup/a/b/c/memory.max", "max")
    assert machine.tightest() == ("memory.max of cgroup /a", 4_500_000_000)


def test_v2_high_counts_as_a_limit(machine: Machine) -> None:
    machine.mounts(V2)
    machine.write("proc/self/cgroup", "0::/a")
    machine.write("sys/fs/cgroup/a/memory.max", 6 * GB)
    machine.write("sys/fs/cgroup/a/memory.high", 2 * GB)
    assert machine.tightest() == ("memory.high of cgroup /a", 2 * GB)


def test_v1_nested(machine: Machine) -> None:
    machine.mounts(V1)
    machine.write("proc/self/cgroup", "9:cpu:/x\n4:memory:/a/b\n0::/")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    machine.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", 3 * GB)
    machine.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", GB)
    machine.write("sys/fs/cgroup/memory/a/memory.stat", f"active_file 5\ntotal_active_file {GB // 2}")
    machine.write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", 5 * GB)
    assert machine.tightest() == ("memory.limit_in_bytes of cgroup /a", 2_500_000_000)


def test_v1_beside_an_empty_v2(machine: Machine) -> None:
    machine.mounts("29 20 0:25 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw", V1)
    machine.write("proc/self/cgroup", "4:memory:/a\n0::/")
    machine.write("sys/fs/cgroup/unified/cgroup.procs", "")
    machine.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", GB)
    assert machine.tightest() == ("memory.limit_in_bytes of cgroup /a", GB)


@pytest.mark.parametrize("path", ["/docker/0123", "/../../other", "/"])
def test_in_a_container_the_mount_itself_is_our_group(machine: Machine, path: str) -> None:
    machine.mounts("30 20 0:26 /docker/0123 /sys/fs/cgroup ro - cgroup2 cgroup rw")
    machine.write("proc/self/cgroup", f"0::{path}")
    machine.write("sys/fs/cgroup/memory.max", GB)
    machine.write("sys/fs/cgroup/memory.current", GB // 4)
    assert machine.tightest() == ("memory.max of cgroup /.", GB * 3 // 4)


def test_swap_is_no_room(machine: Machine) -> None:
    """Experts in swap would be slower than on the disk they came from: it does not raise the budget."""
    machine.mounts(V2)
    machine.write("proc/self/cgroup", "0::/a")
    machine.write("sys/fs/cgroup/a/memory.max", 6 * GB)
    machine.write("sys/fs/cgroup/a/memory.current", 2 * GB)
    before = memory_levels(machine.root, rlimits={})
    machine.write("proc/meminfo", f"{MEMINFO}SwapTotal: 8000000 kB\nSwapFree: 8000000 kB\n")
    machine.write("sys/fs/cgroup/a/memory.swap.max", "max")
    machine.write("sys/fs/cgroup/a/memory.swap.current", GB)
    assert memory_levels(machine.root, rlimits={}) == before


def test_what_is_swapped_out_still_counts_as_the_process_s(machine: Machine) -> None:
    machine.write("proc/self/status", f"{STATUS}VmSwap: 300 kB\n")
    assert process_memory(machine.root).anonymous_bytes == 1308 * 1024


def test_rlimits_count(machine: Machine) -> None:
    levels = memory_levels(machine.root, rlimits={"RLIMIT_AS": 9_500 * 1024, "RLIMIT_DATA": 7_200 * 1024})
    assert [(level.source, level.room_bytes) for level in levels[:2]] == [
        ("RLIMIT_DATA", 200 * 1024),
        ("RLIMIT_AS", 500 * 1024),
    ]


def test_own_memory_is_split_by_kind(machine: Machine) -> None:
    process = process_memory(machine.root)
    assert (process.anonymous_bytes, process.file_bytes) == (1008 * 1024, 500 * 1024)


def test_a_system_without_proc_has_no_levels(tmp_path: Path) -> None:
    assert memory_levels(tmp_path, rlimits={}) == []
    assert process_memory(tmp_path).anonymous_bytes == 0


def test_file_system_of_a_path(machine: Machine) -> None:
    device = os.stat(machine.root).st_dev
    machine.mounts(f"40 20 {os.major(device)}:{os.minor(device)} / / rw - tmpfs tmpfs rw")
    assert filesystem_type(machine.root, machine.root) == "tmpfs"
    machine.mounts()
    assert filesystem_type(machine.root, machine.root) is None
