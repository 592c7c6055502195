"""A schema's grammar accepts the values that conform, in any layout: bounds, lengths, formats, random schemas."""

import json
import random
import time
from typing import Any

import pytest
from grammar.schemas import Schema, closed

BOUNDS = [(0, 1000), (10, 1000), (10, 100), (0, 0), (1, 1), (0, None), (2, None), (3, 3)]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_array_bounds(low: int, high: int | None):
    """G8 as a schema."""
    bounds: dict[str, Any] = {"minItems": low} if high is None else {"minItems": low, "maxItems": high}
    begin = time.process_time()
    schema = Schema({"type": "array", "items": {"type": "number"}, **bounds})
    assert time.process_time() - begin < 10  # milliseconds; expanded it would be minutes
    for length in {0, 1, 2, 3, 9, 10, 11, 99, 100, 101, 1000, 1001}:
        assert schema.accepts([1.5] * length) == (low <= length and (high is None or length <= high))


def test_tuples():
    schema = Schema({"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": {"type": "null"}})
    for value, expected in (([], True), ([1], True), ([1, "b", None, None], True), (["b"], False), ([1, None], False)):
        assert schema.accepts(value) is expected
    exact = Schema({"type": "array", "items": [{"const": 1}, {"const": 2}], "additionalItems": False, "minItems": 2})
    for value, expected in (([1, 2], True), ([1], False), ([1, 2, 3], False)):
        assert exact.accepts(value) is expected


@pytest.mark.parametrize(
    "bounds",
    [(0, 9), (5, 123), (-5, 5), (-120, -3), (1000, 1999), (None, 7), (None, -7), (3, None), (-30, None), (0, None),
     (10, 10), (99, 1001), (-1, 0), (0, 255)],
)  # fmt: skip
def test_integer_bounds_are_exact(bounds: tuple[int | None, int | None]):
    low, high = bounds
    named = {"minimum": low, "maximum": high}
    schema = Schema({"type": "integer", **{key: value for key, value in named.items() if value is not None}})
    for number in range(-1300, 2100):
        expected = (low is None or number >= low) and (high is None or number <= high)
        assert schema.accepts(str(number)) is expected, number
    assert not schema.accepts("007")


def test_exclusive_bounds_in_both_spellings():
    for bounds in (
        {"exclusiveMinimum": 2, "exclusiveMaximum": 6},
        {"minimum": 2, "exclusiveMinimum": True, "maximum": 6, "exclusiveMaximum": True},
        {"minimum": 2.5, "maximum": 5.5},
        {"minimum": 1, "exclusiveMinimum": 2, "maximum": 5, "exclusiveMaximum": 9},
    ):
        schema = Schema({"type": "integer", **bounds})
        assert [number for number in range(10) if schema.accepts(number)] == [3, 4, 5]


def test_number_bounds_use_the_whole_part():
    schema = Schema({"type": "number", "minimum": 0, "maximum": 100})
    assert schema.accepts(99.5)
    assert schema.accepts(0)
    assert not schema.accepts(-1)
    assert not schema.accepts(250)
    assert Schema({"type": "number", "minimum": -1}).unused == ("minimum (#)",)


def test_string_lengths_force_the_closing_quote():
    schema = Schema({"type": "string", "minLength": 2, "maxLength": 3})
    accepted = [length for length in range(6) if schema.accepts(json.dumps("é" * length, ensure_ascii=False))]
    assert accepted == [2, 3]
    assert schema.forced('"abc') == '"'


@pytest.mark.parametrize(
    ("name", "good", "bad", "head", "forced"),
    [
        ("date", "2024-02-29", "2024/02/29", "2024", "-"),
        ("time", "23:59:59.5+01:00", "7:00", "23", ":"),
        ("date-time", "2024-02-29T12:00:00Z", "2024-02-29", "2024-02-29T12", ":"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123", "123e4567", "-"),
        ("ipv4", "192.168.0.1", "300.1.1.1", "192", "."),
    ],
)
def test_formats_force_their_separators(name: str, good: str, bad: str, head: str, forced: str):
    schema = Schema({"type": "string", "format": name})
    assert schema.accepts(json.dumps(good))
    assert not schema.accepts(json.dumps(bad))
    assert schema.forced(f'"{head}') == forced


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, [{"a": [1, "x", None, True, -1.5e3]}, "3"], ["nope"]),
        ({}, [[], '"x"'], ["{"]),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
        ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, ["true", "null"], ["1"]),
        ('{"const": {"a": [1, 2.50]}}', ['{"a":[1,2.50]}', '{ "a" : [ 1 , 2.50 ] }'], ['{"a":[1,2.5]}']),
        ({"enum": ["a", 1, None, [], {}]}, ['"a"', "1", "null", "[]", "{ }"], ["2"]),
        ({"allOf": [closed({"a": {"const": 1}}), {"properties": {"a": {"type": "integer"}}}]}, [{"a": 1}], [{"a": 2}]),
        ({"allOf": [{"minimum": 3}, {"type": "integer", "minimum": 5}]}, ["5"], ["4"]),
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, [{"a": 1}], ["1", {}]),
        ({"type": "object", "required": ["z"]}, [{"z": [1]}], [{}]),
        ({"type": "object", "properties": {"a": False}, "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"items": {"const": 1}}, [[1, 1]], [[2]]),
    ],
)  # fmt: skip
def test_values(schema: Any, good: list[Any], bad: list[Any]):
    made = Schema(schema)
    assert all(made.accepts(value) for value in good)
    assert not any(made.accepts(value) for value in bad)


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (3 if depth else 0))
    if kind == "object":
        names = rng.sample(["id", "a b", 'q"', "é", "x", "y"], rng.randint(0, 5))
        required = [name for name in names if rng.random() < 0.6]
        extra = rng.choice((False, True, {"type": "integer"}))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": extra}
    if kind == "array":
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth - 1),
            "minItems": low,
            "maxItems": low + rng.randint(0, 3),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b\n", 1, 2.5, None, True, [1], {"k": "v"}], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["c", 0, {"a": []}])}
    if kind == "format":
        return {"type": "string", "format": "date"}
    if kind == "integer" and rng.random() < 0.5:
        low = rng.randint(-300, 300)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if kind == "string" and rng.random() < 0.5:
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    return {"type": kind}


def random_value(schema: dict[str, Any], rng: random.Random) -> Any:
    if "anyOf" in schema:
        return random_value(rng.choice(schema["anyOf"]), rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema["type"]
    if kind == "object":
        value = {
            name: random_value(part, rng)
            for name, part in schema["properties"].items()
            if name in schema["required"] or rng.random() < 0.5
        }
        return value | ({"further": 3} if schema["additionalProperties"] is not False and rng.random() < 0.5 else {})
    if kind == "array":
        return [random_value(schema["items"], rng) for _ in range(rng.randint(schema["minItems"], schema["maxItems"]))]
    if kind == "string":
        if "format" in schema:
            return "2024-03-09"
        size = rng.randint(schema.get("minLength", 0), schema.get("maxLength", 8))
        return "".join(rng.choices('ab"\\\n é😀/', k=size))
    if kind == "integer":
        return rng.randint(schema.get("minimum", -(10**6)), schema.get("maximum", 10**6))
    return {"number": rng.choice((0, -1.5, 1e300, 2.5e-7)), "boolean": rng.random() < 0.5, "null": None}[kind]


@pytest.mark.parametrize("chunk", range(5))
def test_every_conforming_value_is_accepted_in_any_layout(chunk: int):
    for seed in range(chunk * 80, chunk * 80 + 80):
        rng = random.Random(seed)
        schema = random_schema(rng, 3)
        made = Schema(schema)
        for _ in range(4):
            value = random_value(schema, rng)
            for layout in ({}, {"indent": 2}, {"separators": (",", ":")}):
                text = json.dumps(value, ensure_ascii=False, **layout)
                assert made.accepts(text), (schema, text)
