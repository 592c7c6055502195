"""Compiling a cold cache in several processes: numba compiles one function at a time, but keeps a file for each in the
cache. Helpers go through the catalog from other places than the caller does; who comes second only loads. Whatever a
helper fails to do, the caller compiles itself."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator

MOST_HELPERS = 7  # each takes 150 MB and 0.6 s to start
CODE = """
import json, sys
path, simd, cache_dir, number, count = json.loads(sys.argv[1])
sys.path[:] = path
from coli.kernels import runtime
runtime.configure(simd, cache_dir, 1)
from coli.kernels.catalog import RUN
start = number * len(RUN) // count
for stage in (RUN[start:] + RUN[:start])[:: -1 if number % 2 == 0 else 1]:
    stage.address
"""


@contextlib.contextmanager
def helpers(simd: str, cache_dir: str | None, count: int) -> Iterator[None]:
    """While the block runs, `count` processes at most compile stages of the catalog into the cache, the first from its
    end backwards."""
    count = min(count, MOST_HELPERS) if sys.executable else 0
    running: list[subprocess.Popen[bytes]] = []
    try:
        with contextlib.suppress(OSError):
            for number in range(count):
                task = json.dumps([sys.path, simd, cache_dir, number, count])
                command = [sys.executable, "-c", CODE, task]
                running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        yield
    finally:
        for helper in running:
            helper.kill()
            helper.wait()
