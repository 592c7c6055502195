"""How much memory this process may have: the machine, every memory cgroup above it (v1, v2, nested), rlimits.

Reads /proc and the cgroup mounts below a root folder that tests replace. Knows nothing of models or budgets.
"""

import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60  # cgroup v1 writes "none" as 2^63 - 4096


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """One limit that holds for us: `used_bytes` of `limit_bytes` are taken and cannot be reclaimed."""

    source: str
    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of this process: `anonymous_bytes` is its own, swapped out or not, `file_bytes` are mapped file pages."""

    anonymous_bytes: int
    file_bytes: int
    virtual_bytes: int = 0
    data_bytes: int = 0


def process_memory(root: Path = Path("/")) -> ProcessMemory:
    """From /proc/self/status; zeros where there is none."""
    status = _fields(root / "proc/self/status")
    return ProcessMemory(
        status.get("RssAnon:", 0) + status.get("RssShmem:", 0) + status.get("VmSwap:", 0),
        status.get("RssFile:", 0),
        status.get("VmSize:", 0),
        status.get("VmData:", 0),
    )


def memory_levels(root: Path = Path("/"), rlimits: Mapping[str, int] | None = None) -> list[MemoryLevel]:
    """Every limit that holds for this process, the tightest (least room) first.

    Args:
        rlimits: bytes by name (RLIMIT_AS, RLIMIT_DATA), for tests; None: the process's own.
    """
    levels = list(_machine(root))
    for mount, fstype in _cgroup_mounts(root):
        levels.extend(_cgroup_levels(root, mount, fstype))
    process = process_memory(root)
    for name, limit in (_own_rlimits() if rlimits is None else rlimits).items():
        used = process.virtual_bytes if name == "RLIMIT_AS" else process.data_bytes
        levels.append(MemoryLevel(name, limit, used))
    return sorted(levels, key=lambda level: level.room_bytes)


def filesystem_type(path: Path, root: Path = Path("/")) -> str | None:
    """Type of the file system that holds `path` ("ext4", "tmpfs"); None: unknown."""
    device = path.stat().st_dev
    wanted = f"{device >> 8 & 0xFFF}:{device & 0xFF | device >> 12 & 0xFFF00}"
    for entry in _mountinfo(root):
        if entry.device == wanted:
            return entry.fstype
    return None


@dataclass(frozen=True, slots=True)
class _Mount:
    device: str
    top: PurePosixPath  # the folder of the file system that is mounted
    point: PurePosixPath
    fstype: str
    options: tuple[str, ...]


def _machine(root: Path) -> Iterator[MemoryLevel]:
    info = _fields(root / "proc/meminfo")
    total = info.get("MemTotal:")
    if total is not None:
        yield MemoryLevel("the machine", total, total - info.get("MemAvailable:", total))


def _own_rlimits() -> dict[str, int]:
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_AS", "RLIMIT_DATA")}
    return {name: limit for name, limit in soft.items() if limit != resource.RLIM_INFINITY}


def _mountinfo(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        left, separator, right = line.partition(" - ")
        fields, types = left.split(), right.split()
        if separator and len(fields) >= 5 and len(types) >= 3:
            yield _Mount(
                fields[2], PurePosixPath(fields[3]), PurePosixPath(fields[4]), types[0], tuple(types[2].split(","))
            )


def _cgroup_mounts(root: Path) -> Iterator[tuple[_Mount, str]]:
    for mount in _mountinfo(root):
        if mount.fstype == "cgroup2" or (mount.fstype == "cgroup" and "memory" in mount.options):
            yield mount, mount.fstype


def _cgroup_levels(root: Path, mount: _Mount, fstype: str) -> Iterator[MemoryLevel]:
    """Limits of our group and of every group above it that this mount shows."""
    path = _own_group(root, fstype)
    if path is None:
        return
    top = root / mount.point.relative_to("/")
    # In a container the mounted folder is often our own group, or our path is not visible below it.
    try:
        below = path.relative_to(mount.top)
    except ValueError:
        below = PurePosixPath(".")
    group = top / below
    if ".." in below.parts or not group.is_dir():
        group = top
    names = ("memory.max", "memory.high") if fstype == "cgroup2" else ("memory.limit_in_bytes",)
    while True:
        for name in names:
            limit = _number(group / name)
            if limit is not None:
                yield MemoryLevel(f"{name} of cgroup /{group.relative_to(top)}", limit, _group_use(group, fstype))
        if group == top:
            return
        group = group.parent


def _own_group(root: Path, fstype: str) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        ours = controllers == "" if fstype == "cgroup2" else "memory" in controllers.split(",")
        if ours and path:
            return PurePosixPath(path)
    return None


def _group_use(group: Path, fstype: str) -> int:
    """Bytes charged to the group that cannot be reclaimed: all but file pages (shared memory stays in)."""
    stat = _fields(group / "memory.stat")
    if fstype == "cgroup2":
        usage, keys = _number(group / "memory.current"), ("active_file", "inactive_file")
    else:
        usage, keys = _number(group / "memory.usage_in_bytes"), ("total_active_file", "total_inactive_file")
    return max(0, (usage or 0) - sum(stat.get(key, 0) for key in keys))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    """`name number [kB]` lines, in bytes."""
    values = {}
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            values[words[0]] = int(words[1]) << (10 if words[2:3] == ["kB"] else 0)
    return values


def _number(path: Path) -> int | None:
    """The limit or use in a cgroup file; None: missing, "max" or so large that it means no limit."""
    words = " ".join(_lines(path)).split()
    if not words or not words[0].isdigit():
        return None
    value = int(words[0])
    return value if value < _UNLIMITED else None
