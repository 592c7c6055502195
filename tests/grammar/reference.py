"""A slow grammar matcher that shares nothing with coli.grammar: random grammars, their GBNF text, an Earley parser.

Expressions are nested tuples: ("lit", bytes), ("set", frozenset of code points, negated), ("seq", parts),
("alt", parts), ("rep", part, low, high or None), ("ref", name). Repetitions are written out as productions; a set is
matched byte by byte by decoding what has come so far.
"""

from __future__ import annotations

import codecs
import random
from typing import Any

Expression = tuple[Any, ...]
LETTERS = 'ab"\\\n]^-é€😀'
# What is tried as a next byte: the letters, bytes inside and outside of characters, a letter no grammar has.
BYTES = sorted({*LETTERS.encode(), 0x80, 0x82, 0xA9, 0xC3, 0xE2, 0xF0, 0xFF, ord("z")})


class Earley:
    """Recognizer over bytes: `push` scans one, `legal` and `can_end` ask about the state after those pushed."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self.productions: dict[Any, list[tuple[Any, ...]]] = {}
        self._fresh = 0
        for name, body in rules.items():
            self.productions[("rule", name)] = [(self._symbol(body),)]
        start = {(("rule", "root"), production, 0, 0, b"") for production in self.productions["rule", "root"]}
        self.chart = [self._complete([start], 0)]

    def _symbol(self, expression: Expression) -> Any:
        """A terminal or a nonterminal that stands for the expression."""
        kind = expression[0]
        if kind == "ref":
            return ("rule", expression[1])
        if kind == "set":
            return expression
        self._fresh += 1
        symbol = ("made", self._fresh)
        if kind == "lit":
            self.productions[symbol] = [tuple(("byte", value) for value in expression[1])]
        elif kind == "seq":
            self.productions[symbol] = [tuple(self._symbol(part) for part in expression[1])]
        elif kind == "alt":
            self.productions[symbol] = [(self._symbol(part),) for part in expression[1]]
        else:
            _, part, low, high = expression
            inner = self._symbol(part)
            if high is None:
                more = ("more", symbol)
                self.productions[more] = [(), (inner, more)]
                self.productions[symbol] = [(inner,) * low + (more,)]
            else:
                self.productions[symbol] = [(inner,) * times for times in range(low, high + 1)]
        return symbol

    def _complete(self, earlier: list[set[Any]], position: int) -> set[Any]:
        """Close the last set of items under prediction and completion, by running until nothing changes."""
        items = earlier[position]
        changed = True
        while changed:
            changed = False
            for head, production, dot, origin, _ in list(items):
                if dot < len(production):
                    symbol = production[dot]
                    new = {(symbol, body, 0, position, b"") for body in self.productions.get(symbol, ())}
                else:
                    new = {
                        (above, body, at + 1, begun, b"")
                        for above, body, at, begun, _ in list(earlier[origin])
                        if at < len(body) and body[at] == head
                    }
                if not new <= items:
                    items |= new
                    changed = True
        return items

    def _scan(self, byte: int) -> set[Any]:
        reached = set()
        for head, production, dot, origin, partial in self.chart[-1]:
            if dot == len(production):
                continue
            symbol = production[dot]
            if symbol == ("byte", byte):
                reached.add((head, production, dot + 1, origin, b""))
            elif symbol[0] == "set":
                taken = partial + bytes([byte])
                verdict = set_takes(symbol[1], symbol[2], taken)
                if verdict == "whole":
                    reached.add((head, production, dot + 1, origin, b""))
                elif verdict == "part":
                    reached.add((head, production, dot, origin, taken))
        return reached

    def legal(self, byte: int) -> bool:
        return bool(self._scan(byte))

    def push(self, byte: int) -> bool:
        reached = self._scan(byte)
        if not reached:
            return False
        self.chart.append(reached)
        # Items inside a character wait; the rest is closed as usual.
        waiting = {item for item in reached if item[4]}
        closed = self._complete([*self.chart[:-1], reached - waiting], len(self.chart) - 1)
        self.chart[-1] = closed | waiting
        return True

    @property
    def can_end(self) -> bool:
        return any(
            head == ("rule", "root") and dot == len(body) and origin == 0
            for head, body, dot, origin, _ in self.chart[-1]
        )


class SlowWalker:
    """The seed's walk over bytes: lazy arming, desync with a second try of the same byte, forced spans."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self.armed: Earley | None = None

    def feed(self, byte: int) -> None:
        if self.armed is not None and self.armed.push(byte):
            return
        beginning = Earley(self._rules)
        self.armed = beginning if beginning.push(byte) else None

    def forced(self, limit: int) -> bytes:
        if self.armed is None:
            return b""
        forced = bytearray()
        before = len(self.armed.chart)
        while len(forced) < limit and not self.armed.can_end:
            legal = [byte for byte in range(256) if self.armed.legal(byte)]
            if len(legal) != 1:
                break
            self.armed.push(legal[0])
            forced.append(legal[0])
        del self.armed.chart[before:]
        return bytes(forced)


def set_takes(code_points: frozenset[int], negated: bool, taken: bytes) -> str:
    """Whether `taken` is a whole character of the set, the beginning of one, or neither."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(taken)
    except UnicodeDecodeError:
        stray = len(taken) == 1 and negated and taken[0] not in code_points
        return "whole" if stray else "no"
    if text:
        return "whole" if (ord(text) in code_points) != negated else "no"
    if negated:  # far fewer code points are excluded than begin alike
        return "part"
    return "part" if any(chr(point).encode().startswith(taken) for point in code_points) else "no"


def random_rules(rng: random.Random) -> dict[str, Expression]:
    names = ["root", *(f"r{number}" for number in range(rng.randint(0, 4)))]
    return {name: random_expression(rng, names, rng.randint(1, 3)) for name in names}


def random_expression(rng: random.Random, names: list[str], depth: int) -> Expression:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        leaf = rng.random()
        if leaf < 0.4:
            return ("lit", "".join(rng.choices(LETTERS, k=rng.choice((0, 1, 1, 1, 2, 3)))).encode())
        if leaf < 0.65:
            return ("ref", rng.choice(names))
        return ("set", frozenset(map(ord, rng.choices(LETTERS, k=rng.randint(1, 4)))), rng.random() < 0.2)
    if kind < 0.55:
        return ("seq", [random_expression(rng, names, depth - 1) for _ in range(rng.randint(1, 3))])
    if kind < 0.75:
        return ("alt", [random_expression(rng, names, depth - 1) for _ in range(rng.randint(1, 3))])
    low, high = rng.choice(((0, None), (1, None), (0, 1), (2, 3), (0, 3), (2, None), (1, 2), (3, 3), (0, 0)))
    return ("rep", random_expression(rng, names, depth - 1), low, high)


def to_gbnf(rules: dict[str, Expression], rng: random.Random) -> str:
    """The rules as text, with varied spelling, spacing and comments."""
    gap = lambda: rng.choice((" ", "  ", " \n ", ' # note ] " )\n '))  # noqa: E731
    return "".join(f"{name} ::={gap()}{_render(body, rng, gap)}\n" for name, body in rules.items())


def _render(expression: Expression, rng: random.Random, gap: Any) -> str:
    kind = expression[0]
    if kind == "lit":
        return '"' + "".join(_escaped(char, rng, '"') for char in expression[1].decode()) + '"'
    if kind == "set":
        chars = [_escaped(chr(point), rng, "[]-^") for point in sorted(expression[1])]
        rng.shuffle(chars)
        return "[" + "^" * expression[2] + "".join(chars) + "]"
    if kind == "ref":
        return str(expression[1])
    if kind == "rep":
        _, part, low, high = expression
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
        counted = f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"
        postfix = short if short is not None and rng.random() < 0.7 else counted
        return f"({_render(part, rng, gap)}){postfix}"
    parts = [_render(part, rng, gap) for part in expression[1]]
    if kind == "seq":
        return "(" + gap().join(parts) + ")"
    return "(" + (gap() + "|" + gap()).join(parts) + ")"


def _escaped(char: str, rng: random.Random, special: str) -> str:
    if char == "\n":
        return "\\n"
    if char == "\\" or char in special:
        return "\\" + char
    code_point = ord(char)
    if rng.random() < 0.2:
        return f"\\U{code_point:08X}" if code_point > 0xFFFF else f"\\u{code_point:04x}"
    return char
