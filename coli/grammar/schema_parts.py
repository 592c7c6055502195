"""The GBNF bodies of a schema's objects, arrays and numbers, whose parts are GBNF already. Text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coli.grammar.json_text import integer_between
from coli.grammar.schema_tree import Schema

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def times(low: int, high: int | None) -> str:
    """The postfix for low..high repetitions."""
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{{{low},{high}}}"


def choice(items: Sequence[str]) -> str:
    """One item for any of `items`, duplicates dropped."""
    distinct = list(dict.fromkeys(items))
    return distinct[0] if len(distinct) == 1 and " " not in distinct[0] else "(" + " | ".join(distinct) + ")"


def members_body(members: Sequence[tuple[str, bool]], extra: str | None, share: Callable[[str], str]) -> str:
    """The inside of an object's braces: (member, required) in order, optional ones left out at will, then any `extra`.

    Commas stand only between members that are present. share: makes a rule of a body that is used twice.
    """

    def shared(body: str) -> str:
        return share(body) if " " in body else body

    # Built from the end: `rest` is what may follow once a member is there, `head` while none is.
    rest = f'("," ws {extra})*' if extra is not None else ""
    head = f"({extra} {rest})?" if extra is not None else ""
    first_required = next((index for index, (_, required) in enumerate(members) if required), len(members))
    for index in range(len(members) - 1, -1, -1):
        member, required = members[index]
        if 0 < index <= first_required or not required:
            rest = shared(rest)
        if index <= first_required:
            begin = f"{member} {rest}"
            head = begin if required else f"({begin} | {head})" if head else f"({begin})?"
        if required:
            rest = f'"," ws {member} {rest}'
        else:
            rest = f'("," ws {member} {rest} | {rest})' if rest else f'("," ws {member})?'
    return head


def items_body(fixed: Sequence[str], more: str, low: int, high: int | None) -> str:
    """The inside of an array's brackets: `fixed` items, each left out only together with all behind it, then `more`.

    low, high: how many items there are in all.
    """
    tail = ""
    if more:
        least = max(low - max(len(fixed), 1), 0)
        most = None if high is None else high - max(len(fixed), 1)
        if most is None or most > 0:
            tail = f'("," ws {more}){times(least, most)}'
    if not fixed:
        if not more or high == 0:
            return ""
        return f"{more} {tail}" if low > 0 else f"({more} {tail})?"
    for index in range(len(fixed) - 1, 0, -1):
        tail = f'"," ws {fixed[index]} {tail}'
        if index >= low:
            tail = f"({tail})?"
    return f"{fixed[0]} {tail}" if low > 0 else f"({fixed[0]} {tail})?"


def bounded_integer(schema: Schema) -> str | None:
    """GBNF for the integers within the bounds, `integer` without bounds, None if the bounds cannot be used."""
    try:
        low, above = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, below = _bound(schema, "maximum", "exclusiveMaximum", min)
        first = None if low is None else _ceiling(low) + (above and _ceiling(low) == low)
        last = None if high is None else -_ceiling(-high) - (below and _ceiling(high) == high)
    except (TypeError, ValueError, OverflowError):
        return None
    return "integer" if first is None and last is None else integer_between(first, last)


def bounded_number(schema: Schema) -> str | None:
    """The same for numbers, by their whole part: only bounds from 0 on can be used."""
    if not any(bound in schema for bound in BOUNDS):
        return "number"
    try:
        low, _ = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, _ = _bound(schema, "maximum", "exclusiveMaximum", min)
        if low is None or low < 0:
            return None
        whole = integer_between(-_ceiling(-low), None if high is None else -_ceiling(-high))
    except (TypeError, ValueError, OverflowError):
        return None
    return None if whole is None else f"{whole} fraction"


def _bound(
    schema: Schema, plain: str, exclusive: str, tighter: Callable[[float, float], float]
) -> tuple[float | None, bool]:
    """(bound, whether it is excluded) of one side; `exclusive` may be a number or, as of old, a flag."""
    bound, strict = schema.get(plain), schema.get(exclusive)
    if isinstance(strict, bool) or strict is None:
        return bound, bool(strict)
    if bound is None or tighter(bound, strict) == strict:
        return strict, True
    return bound, False


def _ceiling(number: float) -> int:
    whole = int(number)
    return whole + (number > whole)
