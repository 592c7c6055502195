"""Which model is meant: a path, a name under the model home, a hub id that was pulled, or the package's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coli.builtin import DEMO_MODEL
from coli.options import Resolved, model_home
from coli.tools.pulled import named_model

BUILTIN_NOTICE = (
    "no --model: using the built-in demo model, which turns short English texts into JSON; "
    "`coli pull smollm2` gets a bigger one"
)


def model_path(resolved: Resolved, notice: Callable[[str], None], argument: str | None = None) -> Path:
    """Path of the model that `argument`, --model or COLI_MODEL names; without any, the built-in one, which is said.

    Raises OptionError when there is none there. Whether it is a container, and what to type when it is not, is said by
    who opens it.
    """
    named = argument if argument is not None else resolved["model"]
    if not named:
        notice(BUILTIN_NOTICE)
        return DEMO_MODEL
    return named_model(named, model_home(resolved), "--model")
