import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli import fake_llm

from coli.cli import main
from coli.settings_table import OWN_PREFIXES, TABLE


@dataclass
class Outcome:
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """No setting from outside but the kernels' path, which tests/conftest.py has fixed for the whole run."""
    own = {env.name for setting in TABLE for env in setting.env}
    for name in list(os.environ):
        if (name in own or name.startswith(OWN_PREFIXES)) and name != "COLI_SIMD":
            monkeypatch.delenv(name)


@pytest.fixture
def fake(monkeypatch) -> fake_llm.Behaviour:
    monkeypatch.setattr(fake_llm, "behaviour", fake_llm.Behaviour())
    monkeypatch.setitem(sys.modules, "coli.llm", fake_llm)
    return fake_llm.behaviour


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "coli.json").write_text("{}")
    return folder


class Stdin:
    """Standard input with bytes in it, or a terminal."""

    def __init__(self, data: bytes | None) -> None:
        self.buffer = io.BytesIO(data or b"")
        self._terminal = data is None

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def coli(monkeypatch, capfdbinary) -> Callable[..., Outcome]:
    def call(*args: object, stdin: bytes | None = None) -> Outcome:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        capfdbinary.readouterr()
        status = main.run([str(arg) for arg in args])
        sys.stdout.flush()
        captured = capfdbinary.readouterr()
        return Outcome(status, captured.out.decode(), captured.err.decode())

    return call
