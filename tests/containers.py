"""Containers converted once per test process from the reference checkpoints in tests/oracle."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from coli.convert import ConvertOptions, convert

ORACLE = Path(__file__).parent / "oracle"
MTP_FIXTURE = "deepseek_v3-mtp"  # beside its head a deepseek_v3 like the other one
FIXTURES = tuple(sorted({path.parent.name for path in ORACLE.glob("*/expected.json")} - {MTP_FIXTURE}))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="coli-tests-", ignore_cleanup_errors=True)


@functools.cache
def container(name: str, quant: str | None) -> Path:
    """The container of oracle checkpoint `name` with every matrix stored as `quant`; None: convert's defaults."""
    target = Path(_folder().name) / f"{name}-{quant}"
    convert(ORACLE / name, target, ConvertOptions(quant=quant), lambda line: None)
    return target


@functools.cache
def expected(name: str) -> dict[str, Any]:
    """What the reference class computed for `name`."""
    result: dict[str, Any] = json.loads((ORACLE / name / "expected.json").read_text())
    return result
