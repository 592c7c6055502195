"""A parsed JSON Schema as a tree of places: references resolved within the file, schemas merged.

Places are JSON pointers from the root, `#/properties/id`. Nothing is fetched: a reference out of the file is unknown.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

MAX_NESTING = 64
MAX_HOPS = 32

# Keywords that allow and forbid nothing.
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "$dynamicAnchor", "$vocabulary"),
        *("contentMediaType", "contentEncoding", "externalDocs", "xml", "discriminator"),
    )
)

Schema = dict[str, Any]


class SchemaTree:
    """The document and the places its references can mean. origin: file name for messages."""

    def __init__(self, document: Any, origin: str) -> None:
        self.origin = origin
        self._document = document
        self._named: dict[str, str] = {}
        pending: list[tuple[str, Any]] = [("#", document)]
        while pending:
            place, part = pending.pop()
            if isinstance(part, dict):
                for keyword, prefix in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                    if isinstance(part.get(keyword), str):
                        self._named.setdefault(prefix + part[keyword], place)
                inner = ((key.replace("~", "~0").replace("/", "~1"), value) for key, value in part.items())
                pending.extend((f"{place}/{key}", value) for key, value in inner if isinstance(value, dict | list))
            elif isinstance(part, list):
                pending.extend(
                    (f"{place}/{i}", value) for i, value in enumerate(part) if isinstance(value, dict | list)
                )

    def resolve(self, reference: Any) -> str | None:
        """The place a reference means, None if it is not in this file."""
        if not isinstance(reference, str):
            return None
        if reference in self._named:
            return self._named[reference]
        base, _, fragment = reference.partition("#")
        root = self._named.get(base) if base else "#"
        if root is None:
            return None
        if fragment and not fragment.startswith("/"):
            return self._named.get("#" + fragment)
        place = root + unquote(fragment)
        return place if self._find(place) is not _ABSENT else None

    def at(self, place: str) -> Any:
        """What stands at a place that `resolve` gave."""
        return self._find(place)

    def followed(self, schema: Any) -> Any:
        """The schema with a `$ref` replaced by what it means, as far as that can be merged; unchanged otherwise."""
        for _ in range(MAX_HOPS):
            place = self.resolve(schema.get("$ref")) if isinstance(schema, dict) and "$ref" in schema else None
            if place is None:
                return schema
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            merged = merge_schemas(self.at(place), beside) if beside else self.at(place)
            if merged is None:
                return schema
            schema = merged
        return schema

    def _find(self, place: str) -> Any:
        here = self._document
        for key in place.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(here, dict) and key in here:
                here = here[key]
            elif isinstance(here, list) and key.isdecimal() and key.isascii() and int(key) < len(here):
                here = here[int(key)]
            else:
                return _ABSENT
        return here


class _Absent:
    """What is found at a place that does not exist."""


_ABSENT = _Absent()


def merge_schemas(one: Any, other: Any, depth: int = 0) -> Any:
    """A schema for what both allow, None if they contradict each other or the result cannot be written down."""
    if isinstance(one, bool) or isinstance(other, bool):
        if one is False or other is False:
            return None
        return other if one is True else one
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_HOPS:
        return None
    merged = dict(one)
    for key, value in other.items():
        if key not in merged or merged[key] == value:
            merged[key] = value
            continue
        together = _merge_keyword(key, merged[key], value, depth)
        if together is None:
            return None
        merged[key] = together
    return merged


def _merge_keyword(key: str, one: Any, other: Any, depth: int) -> Any:
    if key in ANNOTATIONS or key.startswith("x-"):
        return other
    try:
        if key in ("properties", "patternProperties"):
            joined = {**one}
            for name, schema in other.items():
                joined[name] = merge_schemas(joined[name], schema, depth + 1) if name in joined else schema
                if joined[name] is None:
                    return None
            return joined
        if key == "required":
            return [*one, *(name for name in other if name not in one)]
        if key == "enum":
            return [item for item in one if item in other] or None
        if key == "type":
            return _common_types(one, other)
        if key in ("minimum", "exclusiveMinimum", "minLength", "minItems"):
            return max(one, other)
        if key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems"):
            return min(one, other)
        if key in ("items", "additionalProperties", "propertyNames"):
            return False if False in (one, other) else merge_schemas(one, other, depth + 1)
        if key == "allOf":
            return [*one, *other]
    except (TypeError, AttributeError):
        return None
    return None


def _common_types(one: Any, other: Any) -> Any:
    first = one if isinstance(one, list) else [one]
    second = other if isinstance(other, list) else [other]
    common = [kind for kind in first if kind in second]
    if "integer" not in common and {"integer", "number"} <= {*first, *second}:
        common.append("integer")
    return common or None
