"""The jinja2 environment of chat templates: downloaded code in a sandbox that does not run for ever or fill the memory.

Turns of loops and calls of macros are counted; what makes one text or list of several, or widens one, looks at sizes
first. Knows nothing of conversations; chat.py renders, from any thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

TEMPLATE_CAP = 2**20  # bytes; the longest in the wild are about 40 kB
RENDERED_CAP = 64 * 2**20  # characters
STEPS_CAP = 1_000_000  # turns of loops and calls of macros in one rendering, some seconds; conversations need thousands
WIDTH_CAP = 1000  # of fields, indents, batches
_WIDE_FILTERS = frozenset(("batch", "center", "indent", "join", "round", "slice", "tojson", "wordwrap"))
_WIDE_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
_WIDE_PERCENT = re.compile(r"%[-+ #0-9.]*(\*|\d{4})")
_WIDE_BRACES = re.compile(r"\{[^{}]*(\{|\d{4})")

_steps = threading.local()  # .left: of the rendering that runs on this thread


def start_counting() -> None:
    """Begin a rendering on this thread: it has all its steps before it."""
    _steps.left = STEPS_CAP


# The filters that templates get without asking take the context, so that nothing computes them at compile time.
@jinja2.pass_context
def _step(context: object, value: object) -> object:
    """Counts one turn."""
    _steps.left -= 1
    if _steps.left < 0:
        raise jinja2.exceptions.SecurityError(f"more than {STEPS_CAP} loop turns and macro calls")
    return value


@jinja2.pass_context
def _kept(context: object, value: object) -> object:
    """The value, which is so no constant."""
    return value


@jinja2.pass_context
def _narrow(context: object, value: object) -> object:
    """An argument that is a width or stands between parts."""
    _refuse_wide(value)
    return value


@jinja2.pass_context
def _joined(context: object, parts: Sequence[object]) -> str:
    """What `~` makes of its operands."""
    return _concat([str(part) for part in parts])


@jinja2.pass_context
def _replace(context: object, value: object, old: object, new: object, count: int | None = None) -> str:
    """jinja2's filter without its escaping."""
    return _replaced(str(value), str(old), str(new), -1 if count is None else count)


@jinja2.pass_context
def _format(context: jinja2.runtime.Context, value: object, *args: object, **kwargs: object) -> object:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    environment = context.environment
    assert isinstance(environment, LimitedEnvironment)
    return environment.call_binop(context, "%", str(value), kwargs or args)


def _concat(parts: Sequence[str]) -> str:
    parts = list(parts)
    _refuse_long(sum(map(len, parts)))
    return "".join(parts)


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old)
    _refuse_long(len(text) + (found if count < 0 else min(found, count)) * len(new))
    return text.replace(old, new, count)


def _refuse_long(length: int) -> None:
    if length > RENDERED_CAP:
        raise jinja2.exceptions.SecurityError("text too long")


def _refuse_wide(value: object) -> None:
    if isinstance(value, int | float) and abs(value) > WIDTH_CAP:
        raise jinja2.exceptions.SecurityError("field too wide")
    if isinstance(value, str) and len(value) > WIDTH_CAP:
        raise jinja2.exceptions.SecurityError("argument too long")
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_wide(item)


class _Watched(jinja2.visitor.NodeTransformer):
    """Puts the filters above where loops turn, macros begin, parts are joined and filters take widths."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._counted(node, node.body)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._counted(node, node.body)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:
        return self._counted(node, node.body)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filter(jinja2.nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Filter(self, node: jinja2.nodes.Filter) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if node.name in _WIDE_FILTERS:
            node.args = [_filter(argument, "_narrow") for argument in node.args]
            for pair in node.kwargs:
                pair.value = _filter(pair.value, "_narrow")
            if node.dyn_args is not None:
                node.dyn_args = _filter(node.dyn_args, "_narrow")
            if node.dyn_kwargs is not None:
                raise jinja2.TemplateAssertionError(f"** in the filter {node.name} is not supported", node.lineno)
        if node.node is not None:
            node.node = _filter(node.node, "_kept")
        return node

    def _counted(self, node: Any, body: list[jinja2.nodes.Node]) -> jinja2.nodes.Node:
        self.generic_visit(node)
        counted = _filter(jinja2.nodes.Const(0, lineno=node.lineno), "_step")
        body.insert(0, jinja2.nodes.ExprStmt(counted, lineno=node.lineno))
        assert isinstance(node, jinja2.nodes.Node)
        return node


def _filter(value: jinja2.nodes.Expr, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which what could fill the memory or run for ever is refused as well."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    concat = staticmethod(_concat)  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters.update(_step=_step, _kept=_kept, _narrow=_narrow, _joined=_joined)
        self.filters.update(replace=_replace, format=_format)
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = _Watched().visit(super()._parse(source, name, filename))
        assert isinstance(tree, jinja2.nodes.Template)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and (not numbers or abs(left) > 2**32 or abs(right) > 64):
            raise jinja2.exceptions.SecurityError("power too large")
        if operator == "*" and not numbers:
            parts, count = (left, right) if isinstance(right, int) else (right, left)
            if len(parts) * count > TEMPLATE_CAP:
                raise jinja2.exceptions.SecurityError("repetition too long")
        if operator == "%" and isinstance(left, str) and _WIDE_PERCENT.search(left):
            raise jinja2.exceptions.SecurityError("field too wide")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _refuse_long(len(left) + len(right))
        lists = isinstance(left, list | tuple) and isinstance(right, list | tuple)
        if operator == "+" and lists and len(left) + len(right) > TEMPLATE_CAP:
            raise jinja2.exceptions.SecurityError("list too long")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            name = function.__name__
            if name in _WIDE_METHODS:
                _refuse_wide([*args, *kwargs.values()])
            if name == "join":
                _refuse_wide(text)
            if name == "replace" and len(args) in (2, 3) and all(isinstance(part, str) for part in args[:2]):
                return _replaced(text, *args)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_BRACES.search(value.__self__.replace("{{", "").replace("}}", "")):
            raise jinja2.exceptions.SecurityError("field too wide")
        return wrapped
