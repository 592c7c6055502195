"""What this process has used of the machine so far: peak memory and page faults. Knows nothing of models."""

import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """Page faults that had to read, and the largest resident size so far (bytes)."""

    major_faults: int
    peak_memory_bytes: int

    @classmethod
    def now(cls) -> "ProcessUse":
        return cls(resource.getrusage(resource.RUSAGE_SELF).ru_majflt, peak_memory_bytes())


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far.

    Linux: VmHWM, because ru_maxrss starts from what the parent had at the fork, whatever was executed since.
    """
    try:
        found = re.search(rb"^VmHWM:\s+(\d+) kB", _STATUS.read_bytes(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
