"""`coli serve` as a process of its own, for tests of what only a process has: flags, signals, memory."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from server.faults import PATIENCE

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "USAGE_SAVE": "0"}


@contextmanager
def serving(*args: object, more: Sequence[str] = ()) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address and the process; SIGTERM at the end, and nothing but the lines `more` may have been said."""
    command = [sys.executable, "-m", "coli", "serve", "--port", "0", "--ctx", "512", *map(str, args)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stderr is not None
        try:
            said = [""]
            for line in process.stderr:
                said.append(line)
                if "serving" in line:
                    break
            assert "serving" in said[-1], "".join(said)
            yield said[-1].split()[-1], process
            process.terminate()
            assert process.wait(PATIENCE) == 143
            rest = process.stderr.read().splitlines()
            assert [line for line in rest if not line.startswith("coli: graph drafts")] == [*more]
        finally:
            process.kill()
