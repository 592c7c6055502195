"""GBNF fragments for JSON values: literals, numbers within bounds, formats. Pure text in, text out.

Everything is over-approximated where JSON Schema is finer than a grammar should be: a fragment may allow too much,
never too little of what a model would plausibly write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

MAX_DIGITS = 30
MAX_KEY = 64  # characters of a key that is told from others
MAX_KEYS = 4000  # characters of all such keys of one object
# A run of white space has a limit so that no grammar invites endless newlines.
PRIMITIVES = {
    "ws": r"[ \t\n\r]{0,128}",
    "char": r'[^"\\\x00-\x1F] | escape',
    "escape": r'"\\" (["\\/bfnrt] | "u" hex hex hex hex)',
    "hex": "[0-9a-fA-F]",
    "string": r'"\"" char* "\""',
    "integer": r'"-"? natural',
    "natural": r'"0" | [1-9] [0-9]*',
    "fraction": r'("." [0-9]+)? ([eE] [-+]? [0-9]+)?',
    "number": "integer fraction",
    "value": 'object | array | string | number | "true" | "false" | "null"',
    "object": r'"{" ws (string ws ":" ws value ws ("," ws string ws ":" ws value ws)*)? "}"',
    "array": '"[" ws (value ws ("," ws value ws)*)? "]"',
}
PRIMITIVE_USES = {
    "char": ("escape",),
    "escape": ("hex",),
    "string": ("char",),
    "integer": ("natural",),
    "number": ("integer", "fraction"),
    "value": ("object", "array", "string", "number"),
    "object": ("ws", "string", "value"),
    "array": ("ws", "value"),
}
_D = "[0-9]"
_DATE = f'{_D} {_D} {_D} {_D} "-" [01] {_D} "-" [0-3] {_D}'
_TIME = f'[0-2] {_D} ":" [0-5] {_D} ":" [0-6] {_D} ("." {_D}+)? ([zZ] | [-+] [0-2] {_D} ":" [0-5] {_D})?'
_BYTE = f'({_D} | [1-9] {_D} | "1" {_D} {_D} | "2" [0-4] {_D} | "25" [0-5])'
_HEX4 = "[0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE} [tT ] {_TIME}",
    "uuid": f'{_HEX4} {_HEX4} "-" {_HEX4} "-" {_HEX4} "-" {_HEX4} "-" {_HEX4} {_HEX4} {_HEX4}',
    "ipv4": f'{_BYTE} "." {_BYTE} "." {_BYTE} "." {_BYTE}',
}


class Number(float):
    """A JSON number that remembers how it was written."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> Number:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def quoted(text: str) -> str:
    """A GBNF literal for exactly this text."""
    parts = []
    for char in text:
        if char in '"\\':
            parts.append("\\" + char)
        elif char == "\n":
            parts.append("\\n")
        elif char < " " or char == "\x7f":
            parts.append(f"\\x{ord(char):02X}")
        else:
            parts.append(char)
    return '"' + "".join(parts) + '"'


def json_string(text: str) -> str:
    """The JSON spelling of a string, characters beyond ASCII as they are."""
    spelled = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char for char in spelled)


def literal(value: Any) -> str:
    """GBNF for one JSON value, with free white space inside objects and arrays."""
    if isinstance(value, dict):
        members = [f'{quoted(json_string(key))} ws ":" ws {literal(item)} ws' for key, item in value.items()]
        return '"{" ws ' + ' "," ws '.join(members) + ' "}"'
    if isinstance(value, list):
        return '"[" ws ' + ' "," ws '.join(f"{literal(item)} ws" for item in value) + ' "]"'
    if isinstance(value, str):
        return quoted(json_string(value))
    return quoted(value.text if isinstance(value, Number) else json.dumps(value))


def key_other_than(names: Iterable[str]) -> str:
    """GBNF for a JSON string that is none of `names`; of names that are long or need escapes it may be one."""
    root: dict[str, Any] = {}
    told = [name for name in names if len(name) <= MAX_KEY and json_string(name) == f'"{name}"']
    if not told or sum(map(len, told)) > MAX_KEYS:
        return "string"
    for name in told:
        node = root
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}  # a name ends here
    return f'"\\"" {_key_rest(root)} "\\""'


def _key_rest(node: dict[str, Any]) -> str:
    """What may follow the characters that led to a node of the names' tree, the closing quote excluded."""
    begun = [char for char in node if char]
    choices = [f"{quoted(char)} {_key_rest(node[char])}" for char in begun]
    excluded = "".join(map(class_char, begun))
    choices.append(f'([^"\\\\\\x00-\\x1F{excluded}] | escape) char*')
    return f"({' | '.join(choices)})" + ("" if "" in node else "?")


def class_char(char: str) -> str:
    """A character as it stands in a GBNF class."""
    return char if char.isascii() and char.isalnum() else f"\\U{ord(char):08X}"


def integer_between(low: int | None, high: int | None) -> str | None:
    """GBNF for the integers low..high (None: open); None if there are none or the bounds are beyond MAX_DIGITS."""
    if any(bound is not None and len(str(abs(bound))) > MAX_DIGITS for bound in (low, high)):
        return None
    if low is not None and high is not None and low > high:
        return None
    choices = []
    if low is None or low < 0:
        smallest = 1 if high is None or high >= 0 else -high
        choices.append('"-" ' + _group(_natural_between(smallest, None if low is None else -low)))
    if high is None or high >= 0:
        choices.append(_natural_between(max(low or 0, 0), high))
    return _group(" | ".join(choices))


def _group(choices: str) -> str:
    return f"({choices})"


def _natural_between(low: int, high: int | None) -> str:
    """Alternatives for the natural numbers low..high, one or more for each number of digits."""
    choices = []
    length = len(str(low))
    last_length = length if high is None else len(str(high))
    while length <= last_length:
        first = max(low, 10 ** (length - 1) if length > 1 else 0)
        last = 10**length - 1 if high is None else min(high, 10**length - 1)
        choices.append(_same_length(str(first), str(last)))
        length += 1
    if high is None:
        choices.append(f"[1-9] {_D}{{{last_length},}}")
    return " | ".join(choices)


def _same_length(low: str, high: str) -> str:
    """Digit strings low..high of one length, as alternatives."""
    if low == high:
        return quoted(low)
    if low[0] == high[0]:
        return f"{quoted(low[0])} {_group(_same_length(low[1:], high[1:]))}"
    rest = len(low) - 1
    if not rest:
        return f"[{low}-{high}]"
    first, last = int(low[0]), int(high[0])
    choices = []
    if low[1:] != "0" * rest:
        choices.append(f"{quoted(low[0])} {_group(_same_length(low[1:], '9' * rest))}")
        first += 1
    upper = None
    if high[1:] != "9" * rest:
        upper = f"{quoted(high[0])} {_group(_same_length('0' * rest, high[1:]))}"
        last -= 1
    if first <= last:
        choices.append(f"[{first}-{last}] " + " ".join([_D] * rest))
    if upper is not None:
        choices.append(upper)
    return " | ".join(choices)
