"""A regular expression of a JSON Schema `pattern` -> GBNF for the JSON string that contains it.

Characters are spelled as JSON spells them inside a string (`"` as `\\"`, a newline as `\\n`). Anything a grammar cannot
say (look-around, back references, word boundaries, anchors in the middle) raises UnusablePattern: the caller then
leaves the string free.
"""

from __future__ import annotations

from coli.grammar.charset import complement
from coli.grammar.json_text import class_char, quoted
from coli.grammar.syntax import MAX_CODE_POINT, merge_ranges

MAX_PATTERN = 4096
MAX_NESTING = 50
MAX_COUNT = 10_000

Ranges = tuple[tuple[int, int], ...]

_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_BLANK: Ranges = ((9, 13), (32, 32), (0xA0, 0xA0), (0x2028, 0x2029), (0xFEFF, 0xFEFF))
_SETS = {"d": _DIGITS, "w": _WORD, "s": _BLANK}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "b": 8}
_ANY: Ranges = complement(((10, 10), (13, 13), (0x2028, 0x2029)))
_SPELLED = {34: '"', 92: "\\", 10: "n", 13: "r", 9: "t", 8: "b", 12: "f"}
_NEVER_RAW: Ranges = ((0, 0x1F), (34, 34), (92, 92))


class UnusablePattern(Exception):
    """The pattern says something a grammar cannot."""


def pattern_to_gbnf(pattern: str) -> str:
    """GBNF for a JSON string, quotes included, some part of which matches; refers to the rule `char`."""
    if len(pattern) > MAX_PATTERN:
        raise UnusablePattern
    return _Converter(pattern).convert()


class _Converter:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0
        self._depth = 0

    def convert(self) -> str:
        choices = []
        while True:
            begins = self._take("^")
            body = self._sequence()
            ends = self._take("$")
            if self._peek() not in ("", "|"):
                raise UnusablePattern
            choices.append(" ".join((["char*"] * (not begins)) + [body] + (["char*"] * (not ends))))
            if not self._take("|"):
                break
        if self._position < len(self._pattern):
            raise UnusablePattern
        return '"\\"" (' + " | ".join(choices) + ') "\\""'

    def _peek(self) -> str:
        return self._pattern[self._position : self._position + 1]

    def _take(self, text: str) -> bool:
        if self._pattern.startswith(text, self._position):
            self._position += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._position >= len(self._pattern):
            raise UnusablePattern
        self._position += 1
        return self._pattern[self._position - 1]

    def _sequence(self) -> str:
        parts = []
        while self._peek() not in ("", "|", ")", "$"):
            parts.append(self._quantified())
        return " ".join(parts) if parts else '""'

    def _quantified(self) -> str:
        atom = self._atom()
        while True:
            char = self._peek()
            if char in ("?", "*", "+") and char:
                self._position += 1
                atom += char
            elif char == "{" and (bounds := self._bounds()) is not None:
                atom += bounds
            else:
                return atom
            self._take("?")  # a lazy quantifier matches the same texts
            atom = f"({atom})"

    def _bounds(self) -> str | None:
        closing = self._pattern.find("}", self._position)
        body = self._pattern[self._position + 1 : closing] if closing > 0 else ""
        low, comma, high = body.partition(",")
        if not (low.isascii() and low.isdigit() and (high == "" or (high.isascii() and high.isdigit()))):
            raise UnusablePattern
        if int(low) > MAX_COUNT or int(high or 0) > MAX_COUNT or (high and int(high) < int(low)):
            raise UnusablePattern
        self._position = closing + 1
        return f"{{{int(low)}{comma}{int(high) if high else ''}}}"

    def _atom(self) -> str:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return characters(self._class())
        if char == ".":
            return characters(_ANY)
        if char == "\\":
            return characters(self._escape(in_class=False))
        if char in "^*+?{":
            raise UnusablePattern
        return characters(((ord(char), ord(char)),))

    def _group(self) -> str:
        if self._take("?:") or not self._take("?"):
            pass
        elif self._take("<") and self._peek() not in ("=", "!"):
            closing = self._pattern.find(">", self._position)
            if closing < 0:
                raise UnusablePattern
            self._position = closing + 1
        else:
            raise UnusablePattern
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise UnusablePattern
        choices = [self._sequence()]
        while self._take("|"):
            choices.append(self._sequence())
        if not self._take(")"):
            raise UnusablePattern
        self._depth -= 1
        return "(" + " | ".join(choices) + ")"

    def _class(self) -> Ranges:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._class_part()
            single = len(low) == 1 and low[0][0] == low[0][1]
            if single and self._peek() == "-" and not self._pattern.startswith("-]", self._position):
                self._position += 1
                high = self._class_part()
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise UnusablePattern
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges.extend(low)
        merged = merge_ranges(ranges)
        return complement(merged) if negated else merged

    def _class_part(self) -> Ranges:
        char = self._next()
        return self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self, in_class: bool) -> Ranges:
        char = self._next()
        if char.lower() in _SETS:
            chosen = _SETS[char.lower()]
            return complement(chosen) if char.isupper() else chosen
        if char in _CONTROLS and (char != "b" or in_class):
            return ((_CONTROLS[char], _CONTROLS[char]),)
        if char in "xu":
            code_point = self._hexadecimal(2 if char == "x" else 4)
            return ((code_point, code_point),)
        if char.isalnum():
            raise UnusablePattern  # \b, \1, \p{..}, \k<..>
        return ((ord(char), ord(char)),)

    def _hexadecimal(self, num_digits: int) -> int:
        if num_digits == 4 and self._take("{"):
            closing = self._pattern.find("}", self._position)
            num_digits = closing - self._position
            digits = self._pattern[self._position : max(closing, 0)]
            self._position = closing + 1
        else:
            digits = self._pattern[self._position : self._position + num_digits]
            self._position += num_digits
        if not digits or len(digits) != num_digits or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise UnusablePattern
        code_point = int(digits, 16)
        if code_point > MAX_CODE_POINT or 0xD800 <= code_point <= 0xDFFF:
            raise UnusablePattern
        return code_point


def characters(ranges: Ranges) -> str:
    """GBNF for one character of the set as JSON spells it inside a string."""
    choices = []
    raw = _intersect(ranges, complement(_NEVER_RAW))
    if len(raw) == 1 and raw[0][0] == raw[0][1]:
        choices.append(quoted(chr(raw[0][0])))
    elif raw:
        choices.append("[" + "".join(_class_range(low, high) for low, high in raw) + "]")
    for low, high in _intersect(ranges, _NEVER_RAW):
        for code_point in range(low, high + 1):
            if code_point in _SPELLED:
                choices.append(quoted("\\" + _SPELLED[code_point]))
            else:
                choices.append(f'"\\\\u00" [{code_point >> 4}] {_hex_digit(code_point & 15)}')
    if not choices:
        raise UnusablePattern
    return choices[0] if len(choices) == 1 and not choices[0].startswith('"\\\\u') else "(" + " | ".join(choices) + ")"


def _hex_digit(value: int) -> str:
    return f"[{value:x}{value:X}]" if value > 9 else f"[{value}]"


def _class_range(low: int, high: int) -> str:
    return class_char(chr(low)) if low == high else f"{class_char(chr(low))}-{class_char(chr(high))}"


def _intersect(one: Ranges, other: Ranges) -> Ranges:
    found = [
        (max(low, start), min(high, stop))
        for low, high in one
        for start, stop in other
        if max(low, start) <= min(high, stop)
    ]
    return tuple(sorted(found))
