"""Which model is meant: a path, or a name under the model home."""

from __future__ import annotations

from pathlib import Path

from coli.errors import OptionError
from coli.options import Resolved, model_home


def model_path(resolved: Resolved, argument: str | None = None) -> Path:
    """Path of the model that `argument`, --model or COLI_MODEL names. Raises OptionError when there is none there.

    Whether it is a container, and what to type when it is not, is said by who opens it.
    """
    named = argument if argument is not None else resolved["model"]
    if not named:
        raise OptionError("no model: give --model PATH or set COLI_MODEL (`coli convert SRC DST` makes one)")
    path = Path(named)
    if path.exists():
        return path
    home = model_home(resolved)
    if home is not None and not path.is_absolute() and (home / path).exists():
        return home / path
    where = f", and no model of that name under {home}" if home is not None and not path.is_absolute() else ""
    raise OptionError(f"--model: {named}: no such file or folder{where}")
