"""A schema's grammar accepts what conforms, forces what must come, and names what it leaves out."""

import json
import random
import time
from typing import Any

import pytest

from coli.errors import GrammarError
from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import parse_gbnf
from coli.grammar.json_schema import schema_to_gbnf
from coli.grammar.matcher import feed_bytes, walk_bytes


class Schema:
    def __init__(self, schema: Any) -> None:
        compiled = schema_to_gbnf(schema if isinstance(schema, str) else json.dumps(schema))
        self.text, self.unused = compiled.text, compiled.unused
        self.automaton = Automaton(compile_grammar(parse_gbnf(self.text)))

    def accepts(self, value: Any) -> bool:
        """A str is JSON text, anything else a value."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        state = walk_bytes(self.automaton, self.automaton.start, text.encode())
        return state is not None and state.can_end

    def forced(self, text: str) -> str:
        state = walk_bytes(self.automaton, self.automaton.start, text.encode())
        assert state is not None, text
        return self.automaton.forced(state)[0].decode()

    def choices(self, text: str) -> set[str]:
        state = walk_bytes(self.automaton, self.automaton.start, text.encode())
        assert state is not None, text
        return {chr(byte) for byte in range(128) if state.byte_set >> byte & 1}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


SPACES = set(" \t\n\r")


def test_white_space_is_optional_at_every_separator():
    schema = Schema(closed({"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "null"}}}))
    value = {"a": 1, "b": [None, None]}
    for text in (
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, indent=4),
        '{ "a" : 1 ,\n"b" : [ null , null ] }',
    ):
        assert schema.accepts(text)
    assert not schema.unused


def test_white_space_is_bounded():
    """J17."""
    schema = Schema({"oneOf": [closed({"tool": {"const": "a"}}), closed({"tool": {"const": "b"}, "x": {}})]})
    assert schema.accepts('{\n  "tool": "a"\n}')
    assert schema.accepts('{"tool":"b","x":[1]}')
    assert walk_bytes(schema.automaton, schema.automaton.start, b"{" + b"\n" * 200) is None


def test_keys_and_enum_tails_are_forced():
    schema = Schema(closed({"status": {"enum": ["open", "paid", "shipped"]}, "n": {"type": "integer"}}))
    assert schema.forced('{"') == 'status"'
    assert schema.forced('{"status":"o') == 'pen"'
    assert schema.choices('{"status":"') == set("ops")
    assert schema.forced('{"status":"open","') == 'n"'


def test_properties_stay_beside_one_of():
    """J1."""
    schema = Schema(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}},
            "required": ["kind"],
            "oneOf": [
                {"properties": {"x": {"type": "integer"}}, "required": ["x"]},
                {"properties": {"y": {"type": "string"}}, "required": ["y"]},
            ],
        }
    )
    assert schema.accepts({"kind": "a", "x": 1})
    assert schema.accepts({"kind": "b", "y": "text", "more": 1})
    assert not schema.accepts({"x": 1})
    assert schema.forced('{"') == 'kind"'


def test_contradicting_branches_are_named():
    schema = Schema({"type": "object", "properties": {"a": {}}, "oneOf": [{"type": "string"}, {"required": ["a"]}]})
    assert schema.accepts({"a": 1})
    assert schema.unused == ("oneOf (#/oneOf/0)",)


def test_an_enum_behind_a_reference_is_drafted():
    """J2, J4."""
    schema = Schema(
        closed({"color": {"$ref": "#/$defs/Color"}, "size": {"$ref": "#/$defs/Size"}})
        | {"$defs": {"Color": {"enum": ["red", "green"]}, "Size": {"enum": ["small", "large"]}}}
    )
    assert schema.forced('{"color":"r') == 'ed"'
    assert schema.forced('{"color":"red","size":"l') == 'arge"'
    assert not schema.unused


def test_recursive_references_work():
    """J3."""
    node = closed({"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}})
    schema = Schema({"$ref": "#/$defs/Node", "$defs": {"Node": node}})
    leaf = {"value": 1, "children": []}
    assert schema.accepts({"value": 2, "children": [leaf, {"value": 3, "children": [leaf]}]})
    assert not schema.accepts({"value": 2, "children": [1]})
    tree = Schema({"type": ["object", "null"], "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}})
    assert tree.accepts({"left": {"left": None}, "right": {"right": {}}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#"}]},
        {"type": "object", "oneOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {"$ref": "#"}}},
        {"anyOf": [{"$ref": "#"}, {"type": "object"}]},
    ],
)
def test_references_that_lead_back_to_themselves_do_no_harm(schema: dict[str, Any]):
    assert Schema(schema).accepts({"a": {}})


def test_references_by_anchor_id_and_escaped_pointer():
    schema = Schema(
        closed({"a": {"$ref": "#here"}, "b": {"$ref": "other.json"}, "c": {"$ref": "#/$defs/x~1y%20z"}})
        | {
            "$defs": {
                "one": {"$anchor": "here", "const": 1},
                "two": {"$id": "other.json", "const": 2},
                "x/y z": {"const": 3},
            }
        }
    )
    assert schema.accepts({"a": 1, "b": 2, "c": 3})
    assert not schema.unused


def test_an_unknown_reference_is_free_and_named():
    schema = Schema({"$ref": "https://example.com/schema.json"})
    assert schema.accepts({"anything": [1]})
    assert schema.unused == ("$ref https://example.com/schema.json (#)",)


@pytest.mark.parametrize("extra", [None, True, {}])
def test_further_properties_never_force_the_closing_brace(extra: Any):
    """J9."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    if extra is not None:
        schema["additionalProperties"] = extra
    made = Schema(schema)
    assert made.forced('{"a":1') == ""
    assert {",", "}"} <= made.choices('{"a":1')
    assert made.accepts({"a": 1, "b": [{}], "c": "x"})


def test_a_declared_key_is_never_read_as_a_further_one():
    names = {"status": {"enum": ["open", "paid"]}, "st": {"const": 1}, "a  b": {}, 'q"': {}, "": {"const": 2}}
    made = Schema({"type": "object", "properties": names})
    assert made.forced('{"status":"o') == 'pen"'
    assert made.accepts({"statu": 1, "statusx": 2, "x": 3, "stat": None, "é": 4, "a b": 5})
    assert made.accepts({"a  b": 1, "": 2, "s": 1})
    for broken in ({"status": "x"}, {"st": 2}, {"": 1}, {"status": "open", "st": 2}):
        assert not made.accepts(broken)


def test_further_properties_by_schema_names_and_patterns():
    """J12."""
    schema = Schema({"type": "object", "propertyNames": {"pattern": "^x|y$"}, "additionalProperties": {"const": 1}})
    assert schema.accepts({"xa": 1, "by": 1})
    assert not schema.accepts({"a": 1})
    names = Schema({"type": "object", "propertyNames": {"enum": ["k", "l"]}})
    assert names.accepts({"l": 1, "k": 2})
    assert not names.accepts({"m": 1})
    patterns = Schema(
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False}
    )
    assert patterns.accepts({"n_a": 1, "n_b": 2})
    assert not patterns.accepts({"m": 1})
    assert not patterns.accepts({"n_a": "x"})


def test_commas_stand_between_the_properties_that_are_there():
    """J13."""
    names = [f"p{number}" for number in range(12)]
    rng = random.Random(2)
    for needed in ([], ["p0"], ["p5"], ["p3", "p11"]):
        for extra in (False, True):
            schema = Schema(
                {
                    "type": "object",
                    "properties": {name: {"type": "integer"} for name in names},
                    "required": needed,
                    "additionalProperties": extra,
                }
            )
            for _ in range(40):
                chosen = [name for name in names if name in needed or rng.random() < rng.choice((0.1, 0.5, 0.9))]
                value: dict[str, Any] = dict.fromkeys(chosen, 1)
                assert schema.accepts(value)
                assert schema.accepts(value | {"other": {}}) is extra
                if needed:
                    assert not schema.accepts({name: 1 for name in chosen if name != needed[-1]}) or extra
            for broken in ("{,}", '{,"p0":1}', '{"p0":1,}', '{"p0":1 "p1":1}', '{"p0":1,,"p1":1}'):
                assert not schema.accepts(broken)


def test_empty_type_lists_and_difficult_keys():
    """J16."""
    key = 'new\nline "quoted"\ttab\\ é \x7f'
    schema = Schema(closed({key: {"type": []}, "\ud800": {"const": "\x00"}}))
    assert schema.accepts('{"new\\nline \\"quoted\\"\\ttab\\\\ é \x7f":[1],"\\ud800":"\\u0000"}')
    assert schema.unused == ('type [] (#/properties/new\\nline "quoted"\\ttab\\ é \\x7f)',)


def test_enum_integers_and_request_id():
    """J18, the grammar's half."""
    schema = Schema(
        closed(
            {
                "status": {"enum": ["ok"]},
                **{name: {"type": "integer"} for name in "abc"},
                "request_id": {"type": "string", "format": "uuid"},
            }
        )
    )
    value = {"status": "ok", "a": 1, "b": -2, "c": 30, "request_id": "123e4567-e89b-12d3-a456-426614174000"}
    assert schema.accepts(value)
    assert schema.forced('{"status":"') == 'ok"'
    assert schema.forced(json.dumps(value)[:-30]) == "-"


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


def test_unused_keywords_are_named_once_with_their_place():
    schema = Schema(
        {
            "type": "object",
            "properties": {
                "a": {"type": "array", "items": {"type": "string", "pattern": "(?=x)y"}, "uniqueItems": True},
                "b": {"type": "string", "format": "email"},
                "c": {"type": "integer", "multipleOf": 5},
                "d": {"type": "array", "uniqueItems": True},
                "e": {"not": {"type": "string"}, "title": "t", "description": "d", "default": 1, "x-order": 3},
            },
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
            "minProperties": 1,
        }
    )
    assert sorted(schema.unused) == [
        "format email (#/properties/b)",
        "if (#)",
        "minProperties (#)",
        "multipleOf (#/properties/c)",
        "not (#/properties/e)",
        "pattern (#/properties/a/items)",
        "then (#)",
        "uniqueItems (#/properties/a)",
    ]
    assert schema.accepts({"a": ["z", "z"], "b": "nobody", "c": 7, "d": [], "e": "s"})


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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('{"type": "object",\n  "properties": {,}}', r"s\.json:2:18: .*not JSON"),
        ("[1]", r"s\.json: #: expected a schema .* found \[1\]"),
        ('{"properties": {"a": 3}}', r"s\.json: #/properties/a: expected a schema"),
        ('{"a": NaN}', r"NaN is not JSON"),
        ("[" * 100_000, r"nested too deep"),
        (b'{"a": "\xff"}', r"expected UTF-8"),
        ("fit.json", r"s\.json:1:1"),
    ],
)
def test_what_is_no_schema_is_an_error_with_its_place(source: str | bytes, said: str):
    with pytest.raises(GrammarError, match=said):
        schema_to_gbnf(source, "s.json")


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


def test_records_one_after_another_arm_again():
    schema = Schema(closed({"id": {"type": "integer"}}))
    position = feed_bytes(schema.automaton, None, b'Here:\n{"id": 1}\n{"id": 2}\n{"')
    assert position is not None
    assert schema.automaton.forced(position)[0] == b'id"'


def test_a_large_schema_compiles_within_a_second():
    properties = {f"field_{number}": {"type": "string", "description": "d"} for number in range(1500)}
    optional = {f"option_{number}": {"enum": ["on", "off"]} for number in range(150)}
    begin = time.process_time()
    schema = Schema(closed(properties) | {"properties": properties | optional})
    assert time.process_time() - begin < 20  # under 1 s on an idle machine; the point is that it ends
    value = dict.fromkeys(properties, "x")
    assert schema.accepts(value | {f"option_{number}": "on" for number in range(0, 150, 2)})
