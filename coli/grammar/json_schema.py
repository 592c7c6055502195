"""JSON Schema -> GBNF text: declared properties in their order, everything that can force bytes, the rest left free.

Only drafts depend on the result, so a keyword that no grammar can say is not an error: it is left out and listed in
`unused`, and what it talks about is free JSON. A schema that is no schema at all (not JSON, not an object or boolean)
raises GrammarError with the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coli.errors import GrammarError
from coli.grammar.json_text import (
    FORMATS,
    PRIMITIVE_USES,
    PRIMITIVES,
    Number,
    json_string,
    key_other_than,
    literal,
    quoted,
)
from coli.grammar.pattern import UnusablePattern, pattern_to_gbnf
from coli.grammar.schema_parts import BOUNDS, bounded_integer, bounded_number, choice, items_body, members_body, times
from coli.grammar.schema_tree import ANNOTATIONS, MAX_NESTING, Schema, SchemaTree, merge_schemas

MAX_PLACES = 20_000  # subschemas compiled, merged ones included
MAX_LENGTH = 1_000_000

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_GENERAL = frozenset(("type", "nullable"))
_KEYWORDS: dict[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties", "patternProperties", "propertyNames")),
    "array": frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format")),
    "boolean": frozenset(),
    "null": frozenset(),
}


@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """The GBNF text and the keywords it leaves out, each as `keyword (place)` with the first place it occurs at."""

    text: str
    unused: tuple[str, ...]


def schema_to_gbnf(source: str | bytes, origin: str = "schema") -> SchemaGrammar:
    """Compile a JSON Schema. Raises GrammarError with file, line and column if it is not JSON or not a schema."""
    tree = SchemaTree(_parse(source, origin), origin)
    return _Compiler(tree).compile()


def _parse(source: str | bytes, origin: str) -> Any:
    try:
        text = source.decode() if isinstance(source, bytes) else source
        return json.loads(text.removeprefix("\ufeff"), parse_float=Number, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise GrammarError(
            f"{origin}: byte {error.start}: expected UTF-8, found byte {error.object[error.start]:#x}"
        ) from None
    except json.JSONDecodeError as error:
        place = f"{origin}:{error.lineno}:{error.colno}"
        raise GrammarError(f"{place}: expected a JSON Schema, found text that is not JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise GrammarError(f"{origin}: expected a JSON Schema, found JSON that cannot be read ({reason})") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


class _Compiler:
    def __init__(self, tree: SchemaTree) -> None:
        self._tree = tree
        self._rules: dict[str, str] = {}
        self._names: set[str] = {"root", *PRIMITIVES}
        self._reference_rules: dict[str, str] = {}
        self._waiting: list[tuple[str, str]] = []  # (rule, pointer) of references still to be compiled
        self._unused: dict[str, str] = {}
        self._places = 0
        self._merging: list[str] = []  # places whose schemas are being merged into others
        self._makers: dict[str, Callable[[Schema, str, int], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "boolean": lambda schema, place, depth: '("true" | "false")',
            "null": lambda schema, place, depth: '"null"',
        }

    def compile(self) -> SchemaGrammar:
        self._reference_rules["#"] = "root"
        self._waiting.append(("root", "#"))
        while self._waiting:
            rule, pointer = self._waiting.pop()
            self._merging = [pointer]
            self._rules[rule] = self._value(self._tree.at(pointer), pointer, 0)
        self._cut_aliases()
        text = "\n".join(f"{name} ::= {self._rules[name]}" for name in ("root", *sorted(self._rules.keys() - {"root"})))
        return SchemaGrammar(text + "\n" + self._primitives(text), tuple(f"{k} ({p})" for k, p in self._unused.items()))

    def _cut_aliases(self) -> None:
        """References that only lead to each other in a circle allow anything."""
        for name in list(self._rules):
            path = {name}
            here = self._rules[name]
            while here in self._rules and here not in path:
                path.add(here)
                here = self._rules[here]
            if here in path:
                self._leave_out("$ref", f"#: {here} leads back to itself")
                self._rules[here] = "value"

    def _primitives(self, text: str) -> str:
        """The primitive rules that are used, directly or by one another."""
        # Quoted text may contain a name as well; a rule too many does no harm.
        wanted = [name for name in PRIMITIVES if re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
        needed: dict[str, None] = {}
        while wanted:
            name = wanted.pop()
            if name not in needed:
                needed[name] = None
                wanted.extend(PRIMITIVE_USES.get(name, ()))
        return "".join(f"{name} ::= {PRIMITIVES[name]}\n" for name in PRIMITIVES if name in needed)

    def _leave_out(self, keyword: str, place: str) -> None:
        self._unused.setdefault(_printable(keyword), _printable(place))

    def _new_name(self, place: str) -> str:
        """A rule name that reminds of the place in the schema."""
        words = [word for word in re.split(r"[^A-Za-z0-9]+", place) if word]
        hint = "-".join(words[-2:]).lower()[:40] or "part"
        name, number = hint, 1
        while name in self._names:
            number += 1
            name = f"{hint}-{number}"
        self._names.add(name)
        return name

    def _rule(self, place: str, body: str) -> str:
        name = self._new_name(place)
        self._rules[name] = body
        return name

    def _value(self, schema: Any, place: str, depth: int) -> str:
        """A GBNF item (name, literal or group) for what the schema allows; `value` where it cannot be told."""
        self._places += 1
        if depth > MAX_NESTING or self._places > MAX_PLACES:
            self._leave_out("schemas beyond the size limit", place)
            return "value"
        if isinstance(schema, bool):
            if not schema:
                self._leave_out("false", place)
            return "value"
        if not isinstance(schema, dict):
            found = json.dumps(schema)[:40]
            raise GrammarError(
                f"{self._tree.origin}: {_printable(place)}: expected a schema (object or boolean), found {found}"
            )
        if "$ref" in schema or "$dynamicRef" in schema:
            return self._reference(schema, place, depth)
        if "const" in schema:
            return literal(schema["const"])
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return choice([literal(item) for item in schema["enum"]])
        if "allOf" in schema:
            return self._all_of(schema, place, depth)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._any_of(schema, keyword, place, depth)
        return self._typed(schema, place, depth)

    def _check_keywords(self, schema: Schema, place: str, handled: Any) -> None:
        for keyword in schema:
            if keyword not in handled and keyword not in ANNOTATIONS and not keyword.startswith("x-"):
                self._leave_out(keyword, place)

    def _reference(self, schema: Schema, place: str, depth: int) -> str:
        keyword = "$ref" if "$ref" in schema else "$dynamicRef"
        pointer = self._tree.resolve(schema[keyword])
        if pointer is None:
            self._leave_out(f"{keyword} {str(schema[keyword])[:60]}", place)
            return "value"
        beside = {key: value for key, value in schema.items() if key != keyword and key not in ANNOTATIONS}
        if beside and pointer not in self._merging:
            merged = merge_schemas(self._tree.followed(self._tree.at(pointer)), beside)
            if merged is not None:
                return self._merged_value(merged, [pointer], place, depth)
        self._check_keywords(beside, place, ())
        rule = self._reference_rules.get(pointer)
        if rule is None:
            rule = self._reference_rules[pointer] = self._new_name(pointer)
            self._waiting.append((rule, pointer))
        return rule

    def _branches(self, schema: Schema, keyword: str, place: str) -> list[tuple[Any, str]]:
        found = schema[keyword]
        if not isinstance(found, list) or not found:
            self._leave_out(keyword, place)
            return []
        return [(branch, f"{place}/{keyword}/{index}") for index, branch in enumerate(found)]

    def _pointer(self, branch: Any) -> str | None:
        return self._tree.resolve(branch["$ref"]) if isinstance(branch, dict) and "$ref" in branch else None

    def _merged_value(self, merged: Any, pointers: list[Any], place: str, depth: int) -> str:
        """A schema into which the ones at `pointers` went; inside of it they are not merged again."""
        self._merging.extend(pointers)
        item = self._value(merged, place, depth + 1)
        del self._merging[len(self._merging) - len(pointers) :]
        return item

    def _all_of(self, schema: Schema, place: str, depth: int) -> str:
        merged: Any = {key: value for key, value in schema.items() if key != "allOf"}
        pointers = []
        for branch, where in self._branches(schema, "allOf", place):
            pointer = self._pointer(branch)
            together = None if pointer in self._merging else merge_schemas(merged, self._tree.followed(branch))
            if together is None:
                self._leave_out("allOf", where)
            else:
                merged = together
                pointers += [pointer] * (pointer is not None)
        return self._merged_value(merged, pointers, place, depth)

    def _any_of(self, schema: Schema, keyword: str, place: str, depth: int) -> str:
        base = {key: value for key, value in schema.items() if key != keyword}
        bare = all(key in ANNOTATIONS for key in base)
        choices: list[str] = []
        for branch, where in self._branches(schema, keyword, place):
            if bare:
                choices.append(self._value(branch, where, depth + 1))
                continue
            pointer = self._pointer(branch)
            merged = None if pointer in self._merging else merge_schemas(base, self._tree.followed(branch))
            if merged is None:
                self._leave_out(keyword, where)
            else:
                choices.append(self._merged_value(merged, [pointer] * (pointer is not None), where, depth))
        return choice(choices) if choices else self._value(base, place, depth + 1)

    def _typed(self, schema: Schema, place: str, depth: int) -> str:
        named = schema.get("type")
        listed = named if isinstance(named, list) else [named] if named is not None else []
        known = [kind for kind in listed if kind in _TYPES]
        if named is not None and (len(known) < len(listed) or not listed):
            self._leave_out(f"type {json.dumps(named)[:60]}", place)
        known = known or _implied_types(schema)
        if schema.get("nullable") is True and known and "null" not in known:
            known.append("null")
        if "number" in known and "integer" in known:
            known.remove("integer")
        self._check_keywords(schema, place, _GENERAL.union(*(_KEYWORDS[kind] for kind in known)))
        if not known or set(known) >= set(_TYPES) - {"integer"}:
            return "value"
        return choice([self._makers[kind](schema, place, depth) for kind in known])

    # Objects

    def _object(self, schema: Schema, place: str, depth: int) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, dict):
            self._leave_out("properties", place)
            properties = {}
        if not isinstance(required, list):
            self._leave_out("required", place)
            required = []
        declared = {**properties, **{key: True for key in required if isinstance(key, str) and key not in properties}}
        members = [
            (self._member(key, value, f"{place}/properties/{_escape(key)}", depth), key in required)
            for key, value in declared.items()
            if value is not False
        ]
        extra = self._extra_member(schema, declared, place, depth)
        if not members and extra == 'string ws ":" ws value ws':
            return "object"
        body = members_body(members, extra, lambda shared: self._rule(place + "/rest", shared))
        return self._rule(place, " ".join(filter(None, ('"{" ws', body, '"}"'))))

    def _member(self, key: str, schema: Any, place: str, depth: int) -> str:
        return f'{quoted(json_string(key))} ws ":" ws {self._value(schema, place, depth + 1)} ws'

    def _extra_member(self, schema: Schema, declared: Schema, place: str, depth: int) -> str | None:
        """A member whose key is not declared; None if there may be none."""
        choices = []
        patterns = schema.get("patternProperties", {})
        for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
            where = f"{place}/patternProperties/{_escape(pattern)}"
            key = self._pattern(pattern, "patternProperties", where)
            choices.append(f'{key} ws ":" ws {self._value(value, where, depth + 1)} ws')
        extra = schema.get("additionalProperties", True)
        if extra is not False:
            key = self._extra_key(schema, declared, place, depth)
            if isinstance(extra, dict) and not extra:
                extra = True
            value = "value" if extra is True else self._value(extra, f"{place}/additionalProperties", depth + 1)
            choices.append(f'{key} ws ":" ws {value} ws')
        return choice(choices) if choices else None

    def _extra_key(self, schema: Schema, declared: Schema, place: str, depth: int) -> str:
        names = self._tree.followed(schema.get("propertyNames", True))
        where = f"{place}/propertyNames"
        if isinstance(names, dict) and any(key not in ANNOTATIONS and key != "type" for key in names):
            return self._value({**names, "type": "string"}, where, depth + 1)
        # Else a declared key would read as a further one as well, and its value would be free.
        key = key_other_than(declared)
        return key if key == "string" else self._rule(f"{place}/other-key", key)

    # Arrays

    def _array(self, schema: Schema, place: str, depth: int) -> str:
        prefix = schema.get("prefixItems")
        items = schema.get("items", True)
        if prefix is None and isinstance(items, list):  # the older spelling
            prefix, items = items, schema.get("additionalItems", True)
        if prefix is not None and not isinstance(prefix, list):
            self._leave_out("prefixItems", place)
            prefix = None
        fixed = [
            self._value(item, f"{place}/prefixItems/{index}", depth + 1) + " ws"
            for index, item in enumerate(prefix or ())
        ]
        low = self._size(schema, "minItems", place) or 0
        high = self._size(schema, "maxItems", place)
        if high is not None and high < low:
            self._leave_out("maxItems", place)
            high = None
        if high is not None:
            fixed = fixed[:high]
        more = "" if items is False else self._value(items, f"{place}/items", depth + 1) + " ws"
        if not fixed and more == "value ws" and (low, high) == (0, None):
            return "array"
        return self._rule(place, " ".join(filter(None, ('"[" ws', items_body(fixed, more, low, high), '"]"'))))

    def _size(self, schema: Schema, keyword: str, place: str) -> int | None:
        size = schema.get(keyword)
        if size is None:
            return None
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= MAX_LENGTH:
            self._leave_out(keyword, place)
            return None
        return int(size)

    # Strings and numbers

    def _pattern(self, pattern: Any, keyword: str, place: str) -> str:
        """A rule for a JSON string that matches, `string` if the pattern cannot be used."""
        try:
            return self._rule(place, pattern_to_gbnf(pattern if isinstance(pattern, str) else ""))
        except UnusablePattern:
            self._leave_out(keyword, place)
            return "string"

    def _string(self, schema: Schema, place: str, depth: int) -> str:
        low = self._size(schema, "minLength", place)
        high = self._size(schema, "maxLength", place)
        if low is not None and high is not None and high < low:
            self._leave_out("maxLength", place)
            high = None
        bounds = [key for key in ("minLength", "maxLength") if key in schema]
        if isinstance(schema.get("pattern"), str):
            for keyword in (*bounds, *(("format",) if "format" in schema else ())):
                self._leave_out(keyword, place)
            return self._pattern(schema["pattern"], "pattern", place)
        spelled = FORMATS.get(str(schema.get("format")))
        if spelled is not None:
            for keyword in bounds:
                self._leave_out(keyword, place)
            return self._rule(place, f'"\\"" {spelled} "\\""')
        if "format" in schema:
            self._leave_out(f"format {str(schema['format'])[:40]}", place)
        if low or high is not None:
            return self._rule(place, f'"\\"" char{times(low or 0, high)} "\\""')
        return "string"

    def _integer(self, schema: Schema, place: str, depth: int) -> str:
        return self._bounded("integer", bounded_integer(schema), schema, place)

    def _number(self, schema: Schema, place: str, depth: int) -> str:
        return self._bounded("number", bounded_number(schema), schema, place)

    def _bounded(self, kind: str, body: str | None, schema: Schema, place: str) -> str:
        if body is None:
            self._leave_out(next(bound for bound in BOUNDS if bound in schema), place)
        return kind if body in (None, kind) else self._rule(place, str(body))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _implied_types(schema: Schema) -> list[str]:
    """The types whose keywords occur in a schema that names none."""
    return [kind for kind in ("object", "array", "string", "number") if not _KEYWORDS[kind].isdisjoint(schema)]
