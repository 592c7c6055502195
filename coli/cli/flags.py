"""Click options from the settings table, and the settings each command uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from coli.settings_table import BY_NAME, TABLE, Setting

F = TypeVar("F", bound=Callable[..., Any])

OUTPUT = ("quiet", "verbose", "color", "debug")
MODEL = ("model", "home")
GENERATE = tuple(s.name for s in TABLE if s.group in ("model", "prompt", "generate", "engine", "drafts", "output"))

_METAVARS = {"int": "N", "float": "X", "size": "SIZE", "size_or_all": "SIZE", "ids": "IDS", "path": "FILE"}


def settings_options(*names: str, defaults: Mapping[str, str] | None = None) -> Callable[[F], F]:
    """Decorator that adds the flags of these settings; the command gets the raw values under the settings' names.

    defaults: in words, of settings that the command treats otherwise than the table says.
    """
    special = defaults or {}

    def decorate(function: F) -> F:
        for name in reversed(names):
            if BY_NAME[name].flag:
                function = _option(BY_NAME[name], special.get(name))(function)
        return function

    return decorate


def _option(setting: Setting, default: str | None) -> Callable[[F], F]:
    switch = setting.kind == "flag" or (setting.kind == "bool")
    common: dict[str, Any] = {"default": None, "help": help_text(setting, default), "hidden": bool(setting.later)}
    if switch:
        common["is_flag"] = True
    else:
        common["type"] = str
        common["multiple"] = setting.kind == "texts"
        common["metavar"] = "|".join(setting.bounds.choices) or _METAVARS.get(setting.kind, "TEXT")
    return click.option(setting.name, setting.flag, **common)


def help_text(setting: Setting, default: str | None = None) -> str:
    """The effect, the variables and the default (`default`: in other words than the table's), for --help."""
    notes = []
    if setting.env:
        notes.append(", ".join(env.name for env in setting.env))
    if setting.kind != "flag":
        notes.append(f"default: {default or default_text(setting)}")
    return setting.effect + (f"  [{'; '.join(notes)}]" if notes else "")


def default_text(setting: Setting) -> str:
    """The default in words."""
    if setting.default_text:
        return setting.default_text
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
