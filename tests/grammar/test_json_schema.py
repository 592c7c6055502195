"""A schema's grammar is of its structure: white space, references, properties; it names what it leaves out."""

import json
import random
import time
from typing import Any

import pytest
from grammar.schemas import Schema, closed

from coli.errors import GrammarError
from coli.grammar.json_schema import schema_to_gbnf
from coli.grammar.matcher import feed_bytes, walk_bytes


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
