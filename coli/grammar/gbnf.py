r"""GBNF text -> Grammar: the seed's byte-level subset and all of today's llama.cpp notation.

A new rule begins where a name is followed by `::=` outside parentheses, so a rule may span lines and `|` may lead one.
`\xHH` from 80 on is that byte in a literal (the seed's contract) and that code point in a class (what grammars in the
wild mean). One loop with an explicit stack; every error is a GrammarError `file:line:column: expected ..., found ...`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NoReturn

from coli.errors import GrammarError
from coli.grammar.syntax import (
    MAX_CODE_POINT,
    SURROGATES,
    CharClass,
    Choice,
    Grammar,
    Literal,
    Node,
    Reference,
    Repeat,
    Rule,
    Sequence,
    TokenTerminal,
    merge_ranges,
)

MAX_TEXT_BYTES = 4 * 2**20
MAX_NODES = 80_000
MAX_REPEAT = 1_000_000
MAX_CLASS_PARTS = 20_000
MAX_TOKEN_ID = 2**31 - 1
MAX_NAME = 256

# Possessive where the text can be long: nothing backtracks, whatever the text.
_SPACE = re.compile(r"(?:[ \t\r\n\f\v]++|#[^\r\n]*+)*+")
_NAME = re.compile(r"[A-Za-z0-9_-]++")
_LITERAL_TEXT = re.compile(r'[^"\\]*+')
_NUMBER = re.compile(r"[0-9]++")
_TOKEN_ID = re.compile(r"<\[([0-9]++)\]>")
_TOKEN_TEXT = re.compile(r"<[^<>\[\]\r\n][^<>\r\n]*+>")
_HEX = {"x": re.compile(r"[0-9A-Fa-f]{2}"), "u": re.compile(r"[0-9A-Fa-f]{4}"), "U": re.compile(r"[0-9A-Fa-f]{8}")}
_PLAIN_ESCAPES = {"n": 10, "r": 13, "t": 9, '"': 34, "\\": 92, "[": 91, "]": 93, "-": 45, "^": 94}
_ALLOWED_ESCAPES = r"\n \r \t \" \\ \[ \] \- \^ \xHH \uHHHH \UHHHHHHHH"
_LOOKS_LIKE_PATH = re.compile(r"[./~][^\s\"|]*|[^\s\"|]+\.(?:gbnf|json|txt|ebnf|lark)")
_LONGEST_PATH = 4096
_POSTFIX = {"?": (0, 1), "*": (0, None), "+": (1, None)}


def parse_gbnf(source: str | bytes, origin: str = "grammar") -> Grammar:
    """Parse a grammar whose start rule is `root`.

    source: the text; in bytes that are not UTF-8 a stray byte stands for itself. origin: file name for messages.
    Raises GrammarError with file, line and column (from 1, columns in characters).
    """
    if len(source) > MAX_TEXT_BYTES:
        raise GrammarError(f"{origin}: grammar of {len(source)} bytes, at most {MAX_TEXT_BYTES} are read")
    text = source.decode("utf-8", "surrogateescape") if isinstance(source, bytes) else source
    if "::=" not in text and len(text) <= _LONGEST_PATH and _LOOKS_LIKE_PATH.fullmatch(text.strip()):
        raise GrammarError(
            f"{origin}: expected grammar text, found what looks like a path: {text.strip()[:200]!r}; "
            "give the file's contents (on the command line: --grammar FILE)"
        )
    return _Parser(text, origin).parse()


class _Group:
    """An open parenthesis, or the body of a rule (opened_at None): its finished alternatives and the current one."""

    __slots__ = ("choices", "opened_at", "parts")

    def __init__(self, opened_at: int | None) -> None:
        self.opened_at = opened_at
        self.choices: list[list[int]] = []
        self.parts: list[int] = []


class _Parser:
    def __init__(self, text: str, origin: str) -> None:
        self._text = text
        self._position = 1 if text.startswith("\ufeff") else 0
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._grammar = Grammar(origin)

    def parse(self) -> Grammar:
        grammar, text = self._grammar, self._text
        self._skip_space()
        while self._position < len(text):
            self._parse_rule()
        if grammar.root not in grammar.rules:
            self._fail(len(text), f"expected a rule named {grammar.root!r}, found none; generation starts there")
        for node in grammar.nodes:
            if isinstance(node, Reference) and node.name not in grammar.rules:
                place = grammar.place(node.line, node.column)
                raise GrammarError(f"{place}: expected a rule named {node.name!r}, found no such rule in the file")
        return grammar

    def _fail(self, position: int, message: str) -> NoReturn:
        raise GrammarError(f"{self._grammar.place(*self._line_column(position))}: {message}")

    def _expected(self, position: int, what: str) -> NoReturn:
        found = repr(self._text[position]) if position < len(self._text) else "end of file"
        self._fail(position, f"expected {what}, found {found}")

    def _line_column(self, position: int) -> tuple[int, int]:
        line = bisect_right(self._line_starts, position)
        return line, position - self._line_starts[line - 1] + 1

    def _where(self, position: int) -> str:
        return "{}:{}".format(*self._line_column(position))

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._position)
        if match is not None:
            self._position = match.end()

    def _match_name(self) -> re.Match[str] | None:
        match = _NAME.match(self._text, self._position)
        if match is not None and match.end() - match.start() > MAX_NAME:
            self._fail(self._position, f"expected a rule name of at most {MAX_NAME} characters, found a longer one")
        return match

    def _add(self, node: Node) -> int:
        nodes = self._grammar.nodes
        if len(nodes) >= MAX_NODES:
            self._fail(self._position, f"grammar has more than {MAX_NODES} parts")
        nodes.append(node)
        return len(nodes) - 1

    def _parse_rule(self) -> None:
        start = self._position
        match = self._match_name()
        if match is None:
            self._expected(start, "a rule name")
        self._position = match.end()
        self._skip_space()
        if not self._text.startswith("::=", self._position):
            self._expected(self._position, f"'::=' after the rule name {match[0]!r}")
        self._position += 3
        line, column = self._line_column(start)
        earlier = self._grammar.rules.get(match[0])
        if earlier is not None:
            self._fail(start, f"expected a new rule name, found {match[0]!r} again (first at line {earlier.line})")
        self._grammar.rules[match[0]] = Rule(match[0], self._parse_body(), line, column)

    def _parse_body(self) -> int:
        """Everything up to the next rule or the end of the text."""
        text = self._text
        group = _Group(None)
        outer: list[_Group] = []
        while True:
            self._skip_space()
            position = self._position
            if position >= len(text):
                if group.opened_at is not None:
                    self._fail(
                        position, f"expected ')' for the '(' at {self._where(group.opened_at)}, found end of file"
                    )
                return self._close(group)
            char = text[position]
            name = self._match_name()
            if name is not None:
                self._position = name.end()
                self._skip_space()
                if text.startswith("::=", self._position):
                    self._position = position
                    if group.opened_at is not None:
                        opened = self._where(group.opened_at)
                        self._fail(position, f"expected ')' for the '(' at {opened}, found the rule {name[0]!r}")
                    return self._close(group)
                group.parts.append(self._add(Reference(name[0], *self._line_column(position))))
            elif char == '"':
                group.parts.append(self._parse_literal())
            elif char == "[":
                group.parts.append(self._parse_class())
            elif char == ".":
                self._position += 1
                group.parts.append(self._add(CharClass((), negated=True)))
            elif char in "<!":
                group.parts.append(self._parse_token())
            elif char == "(":
                self._position += 1
                outer.append(group)
                group = _Group(position)
            elif char == ")":
                if group.opened_at is None:
                    self._fail(position, "expected an item or a new rule, found ')' without '('")
                self._position += 1
                closed = self._close(group)
                group = outer.pop()
                group.parts.append(closed)
            elif char == "|":
                self._position += 1
                group.choices.append(group.parts)
                group.parts = []
            elif char in "?*+{":
                low, high = self._parse_postfix(char)
                if not group.parts:
                    self._fail(position, f"expected an item before {char!r}, found none")
                group.parts[-1] = self._repeat(group.parts[-1], low, high)
            else:
                self._expected(position, "a literal, class, rule name, token, group or '|'")

    def _close(self, group: _Group) -> int:
        choices = [self._sequence(parts) for parts in (*group.choices, group.parts)]
        return choices[0] if len(choices) == 1 else self._add(Choice(tuple(choices)))

    def _sequence(self, parts: list[int]) -> int:
        if len(parts) == 1:
            return parts[0]
        return self._add(Sequence(tuple(parts)) if parts else Literal(b""))

    def _repeat(self, part: int, low: int, high: int | None) -> int:
        inner = self._grammar.nodes[part]
        simple = high in (1, None) and low in (0, 1)
        if simple and isinstance(inner, Repeat) and inner.high in (1, None) and inner.low in (0, 1):
            # (x?)* and its like are one repetition; nested thousands deep they would be walked at every byte.
            low = min(low, inner.low)
            high = None if None in (high, inner.high) else 1
            part = inner.part
        return part if (low, high) == (1, 1) else self._add(Repeat(part, low, high))

    def _parse_postfix(self, char: str) -> tuple[int, int | None]:
        self._position += 1
        if char != "{":
            return _POSTFIX[char]
        opened_at = self._position - 1
        low = self._parse_count("a number of repetitions")
        high: int | None = low
        if self._text.startswith(",", self._position):
            self._position += 1
            self._skip_space()
            closing = self._text.startswith("}", self._position)
            high = None if closing else self._parse_count("a number of repetitions or '}'")
        if not self._text.startswith("}", self._position):
            self._expected(self._position, "'}' or ','" if high == low else "'}'")
        self._position += 1
        if high is not None and high < low:
            self._fail(opened_at, f"expected {{m,n}} with m <= n, found {{{low},{high}}}")
        return low, high

    def _parse_count(self, what: str) -> int:
        self._skip_space()
        match = _NUMBER.match(self._text, self._position)
        if match is None:
            self._expected(self._position, what)
        if len(match[0]) > 9 or int(match[0]) > MAX_REPEAT:
            self._fail(self._position, f"expected at most {MAX_REPEAT} repetitions, found {match[0][:40]}")
        self._position = match.end()
        self._skip_space()
        return int(match[0])

    def _parse_literal(self) -> int:
        text, opened_at = self._text, self._position
        self._position += 1
        data = bytearray()
        while True:
            match = _LITERAL_TEXT.match(text, self._position)
            if match is not None and match[0]:
                data += self._encode(match[0], self._position)
                self._position = match.end()
            if self._position >= len(text):
                self._fail(opened_at, "expected '\"' at the end of this literal, found end of file")
            if text[self._position] == '"':
                self._position += 1
                return self._add(Literal(bytes(data)))
            position = self._position
            kind, value = self._parse_escape("literal")
            if kind == "x":
                data.append(value)
                continue
            if kind == "u" and SURROGATES[0] <= value <= SURROGATES[1]:
                value = self._join_surrogates(position, value)
            data += chr(value).encode()

    def _join_surrogates(self, position: int, high: int) -> int:
        low = 0
        if high < 0xDC00 and self._text.startswith("\\u", self._position):
            _, low = self._parse_escape("literal")
        if not 0xDC00 <= low <= 0xDFFF:
            self._fail(position, f"expected a surrogate pair or a code point, found the lone surrogate \\u{high:04X}")
        return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)

    def _encode(self, chunk: str, position: int) -> bytes:
        try:
            return chunk.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            self._expected(position + error.start, "UTF-8 text")

    def _parse_escape(self, where: str) -> tuple[str, int]:
        """(letter, value) of the escape at the position, which is that of a backslash."""
        text, position = self._text, self._position
        letter = text[position + 1 : position + 2]
        if letter in _HEX:
            match = _HEX[letter].match(text, position + 2)
            digits = {"x": 2, "u": 4, "U": 8}[letter]
            if match is None:
                self._fail(position, f"expected {digits} hexadecimal digits after \\{letter} in this {where}")
            value = int(match[0], 16)
            if value > MAX_CODE_POINT:
                self._fail(position, f"expected a code point up to 10FFFF, found {match[0]}")
            self._position = match.end()
            return letter, value
        if letter not in _PLAIN_ESCAPES or not letter:
            shown = f"\\{letter}" if letter.isprintable() else f"a backslash before {letter!r}"
            shown = shown if letter else "a backslash at the end of the file"
            self._fail(position, f"expected one of {_ALLOWED_ESCAPES} in this {where}, found {shown}")
        self._position += 2
        return letter, _PLAIN_ESCAPES[letter]

    def _parse_class(self) -> int:
        text, opened_at = self._text, self._position
        self._position += 1
        negated = text.startswith("^", self._position)
        self._position += negated
        ranges: list[tuple[int, int]] = []
        while True:
            if self._position >= len(text):
                self._fail(opened_at, "expected ']' at the end of this class, found end of file")
            if text[self._position] == "]":
                break
            low = high = self._parse_class_char()
            if text.startswith("-", self._position) and not text.startswith("-]", self._position):
                self._position += 1
                if self._position >= len(text):
                    self._fail(opened_at, "expected ']' at the end of this class, found end of file")
                high = self._parse_class_char()
            ranges.append((low, high))
            if len(ranges) > MAX_CLASS_PARTS:
                self._fail(
                    opened_at, f"expected at most {MAX_CLASS_PARTS} characters and ranges in a class, found more"
                )
        if not ranges and not negated:
            self._fail(self._position, "expected a character in this class, found ']' (\\] is the bracket itself)")
        self._position += 1
        return self._add(CharClass(merge_ranges(ranges), negated))

    def _parse_class_char(self) -> int:
        char = self._text[self._position]
        if char == "\\":
            return self._parse_escape("class")[1]
        self._position += 1
        code_point = ord(char)
        # A byte of the file that is no UTF-8 stands for the code point of its value, as \xHH does in a class.
        return code_point - 0xDC00 if 0xDC80 <= code_point <= 0xDCFF else code_point

    def _parse_token(self) -> int:
        text, position = self._text, self._position
        line, column = self._line_column(position)
        negated = text[position] == "!"
        start = position + negated
        by_id = _TOKEN_ID.match(text, start)
        by_text = _TOKEN_TEXT.match(text, start)
        found = by_id or by_text
        if found is None:
            self._expected(start, "a token such as <think> or <[1000]>" if negated or start < len(text) else "a token")
        self._position = found.end()
        if by_id is None:
            return self._add(TokenTerminal(None, found[0], negated, line, column))
        if len(by_id[1]) > 10 or int(by_id[1]) > MAX_TOKEN_ID:
            self._fail(start, f"expected a token id up to {MAX_TOKEN_ID}, found {by_id[1][:40]}")
        return self._add(TokenTerminal(int(by_id[1]), None, negated, line, column))
