"""Loads a file of scripts/ as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
