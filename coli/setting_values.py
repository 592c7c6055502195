"""Text of a setting -> checked value: numbers within bounds, sizes, switches, choices, id lists.

Pure functions without the environment; `coli.options` calls them for every flag and variable. A value that is not
allowed raises OptionError naming the setting, the value and what is allowed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from coli.errors import OptionError

Kind = Literal["int", "float", "text", "texts", "name", "path", "bool", "flag", "choice", "size", "size_or_all", "ids"]

NUMERIC = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d{1,30}")
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]i?B)?", re.IGNORECASE)
_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE_WORDS = "a size: a number of GB, or one with MB, GB, MiB or GiB"
_WHAT: dict[Kind, str] = {
    "int": "a whole number",
    "float": "a number",
    "text": "UTF-8 text",
    "texts": "UTF-8 text that is not empty",
    "name": "a name or a path",
    "path": "a path",
    "bool": "1 or 0",
    "flag": "1 or 0",
    "choice": "",
    "size": f"auto or {_SIZE_WORDS}",
    "size_or_all": f"auto, all or {_SIZE_WORDS}",
    "ids": "token ids separated by commas",
}
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
MAX_PROMPT_IDS = 2**24


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is allowed: low..high (`above`: low excluded), or one of `choices`.

    `cap`: a whole number above high becomes high, and one below low becomes `below` where that is set.
    """

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    above: bool = False
    cap: bool = False
    below: int | None = None

    def allowed(self, kind: Kind) -> str:
        """The allowed values in words, for messages and docs."""
        if self.choices:
            return ", ".join(self.choices)
        what = _WHAT[kind]
        if self.low is None or self.high is None:
            return what
        return f"{what} from {_plain(self.low)}{' (excluded)' if self.above else ''} to {_plain(self.high)}"


UNBOUNDED = Bounds()


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def parse_value(kind: Kind, bounds: Bounds, raw: object, origin: str) -> Any:
    """Value of `raw` for a setting of this kind; `origin` (flag or variable name) starts the error message."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, tuple):
        return tuple(part for text in raw for part in parse_value(kind, bounds, str(text), origin))
    text = str(raw)
    try:
        return _PARSERS[kind](text, bounds)
    except ValueError:
        raise _refused(kind, bounds, text, origin) from None


def _refused(kind: Kind, bounds: Bounds, text: str, origin: str) -> OptionError:
    text = text.encode("utf-8", "replace").decode()
    shown = text if len(text) <= 60 else text[:57] + "..."
    return OptionError(f"{origin}: {shown!r} is not allowed; allowed: {bounds.allowed(kind)}")


def parse_size(text: str) -> int:
    """Bytes of '6', '6.5' (GB = 1e9), '800 MB', '6GiB'; ValueError when it is no positive size."""
    match = _SIZE.fullmatch(text.strip())
    size = float(match[1]) * _UNITS[(match[2] or "gb").lower()] if match else 0
    if not 1 <= size < 2**62:
        raise ValueError(text)
    return int(size)


def _integer(text: str, bounds: Bounds) -> int:
    if not _INTEGER.fullmatch(text.strip()):
        raise ValueError(text)
    value = int(text)
    if bounds.cap and bounds.high is not None and value > bounds.high:
        return int(bounds.high)
    if bounds.below is not None and bounds.low is not None and value < bounds.low:
        return bounds.below
    _check_within(value, bounds)
    return value


def _number(text: str, bounds: Bounds) -> float:
    if not NUMERIC.fullmatch(text.strip()) or not math.isfinite(float(text)):
        raise ValueError(text)
    _check_within(float(text), bounds)
    return float(text)


def _check_within(value: float, bounds: Bounds) -> None:
    below = bounds.low is not None and (value < bounds.low or (bounds.above and value == bounds.low))
    if below or (bounds.high is not None and value > bounds.high):
        raise ValueError(value)


def _switch(text: str, bounds: Bounds) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    if not _INTEGER.fullmatch(word):
        raise ValueError(text)
    return int(word) != 0


def _choice(text: str, bounds: Bounds) -> str:
    word = text.strip().lower()
    if word not in bounds.choices:
        raise ValueError(text)
    return word


def _size(text: str, bounds: Bounds) -> int | None:
    return None if text.strip().lower() == "auto" else parse_size(text)


def _size_or_all(text: str, bounds: Bounds) -> float | None:
    return math.inf if text.strip().lower() == "all" else _size(text, bounds)


def _ids(text: str, bounds: Bounds) -> tuple[int, ...]:
    parts = text.replace(",", " ").split()
    if not parts or len(parts) > MAX_PROMPT_IDS or not text.isascii():
        raise ValueError(text)
    if any(not part.isdecimal() or len(part) > 9 for part in parts):
        raise ValueError(text)
    return tuple(int(part) for part in parts)


def utf8(text: str) -> str:
    """Text of an argument or variable, which is UTF-8 whatever the locale says; ValueError when it is not."""
    if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return os.fsencode(text).decode("utf-8")  # bytes that the locale cannot express arrive as lone surrogates


def _not_empty(text: str, bounds: Bounds) -> str:
    if not text:
        raise ValueError(text)
    return text


_PARSERS: dict[Kind, Callable[[str, Bounds], Any]] = {
    "int": _integer,
    "float": _number,
    "bool": _switch,
    "flag": _switch,
    "choice": _choice,
    "size": _size,
    "size_or_all": _size_or_all,
    "ids": _ids,
    "text": lambda text, bounds: utf8(text),
    "texts": lambda text, bounds: (utf8(_not_empty(text, bounds)),),
    "name": lambda text, bounds: text,
    "path": lambda text, bounds: Path(_not_empty(text, bounds)),
}
