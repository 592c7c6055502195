"""The grammars that ship accept their examples, force what they promise, and load from files with good messages."""

import json
from pathlib import Path

import pytest

from coli.errors import GrammarError
from coli.grammar.gbnf import MAX_TEXT_BYTES
from coli.grammar.load import SCHEMA_TAG, load_grammar, read_grammar
from coli.grammar.matcher import GrammarMatcher, walk_bytes

GRAMMARS = Path(__file__).parents[2] / "grammars"
# grammar -> (example, least share of its bytes that is forced)
SHIPPED = {
    "json.gbnf": ("json.txt", 0.15),
    "json-spaced.gbnf": ("json-spaced.txt", 0.0),
    "ndjson-order.gbnf": ("ndjson-order.txt", 0.65),
    "ndjson-order-spaced.gbnf": ("ndjson-order-spaced.txt", 0.4),
    "function-call.gbnf": ("function-call.txt", 0.8),
    "enum-answer.gbnf": ("enum-answer.txt", 0.9),
    "csv.gbnf": ("csv.txt", 0.5),
}


def test_every_shipped_grammar_is_tested():
    assert {path.name for path in GRAMMARS.glob("*.gbnf")} == set(SHIPPED)
    assert {path.name for path in (GRAMMARS / "examples").iterdir()} == {example for example, _ in SHIPPED.values()}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_grammar_accepts_its_example_and_forces_its_share(name: str):
    example, share = SHIPPED[name]
    made = load_grammar(GRAMMARS / name).automaton(None)
    data = (GRAMMARS / "examples" / example).read_bytes()
    state, forced = made.start, 0
    for byte in data:
        forced += state.only_byte is not None
        reached = made.step(state, byte)
        assert reached is not None
        state = reached
    assert state.can_end
    assert forced >= share * len(data)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_spaced_grammars_accept_the_compact_examples_as_well(name: str):
    if "spaced" not in name:
        return
    made = load_grammar(GRAMMARS / name).automaton(None)
    state = walk_bytes(made, made.start, (GRAMMARS / "examples" / SHIPPED[name.replace("-spaced", "")][0]).read_bytes())
    assert state is not None
    assert state.can_end


def test_the_order_schema_accepts_the_records_of_the_order_grammars():
    loaded = load_grammar(GRAMMARS / "ndjson-order.schema.json")
    assert loaded.is_schema
    assert not loaded.unused
    keys = list(json.loads((GRAMMARS / "ndjson-order.schema.json").read_text())["properties"])
    made = loaded.automaton(None)
    for example in ("ndjson-order.txt", "ndjson-order-spaced.txt"):
        for line in (GRAMMARS / "examples" / example).read_text().splitlines():
            state = walk_bytes(made, made.start, line.encode())
            assert state is not None
            assert state.must_end
            assert list(json.loads(line)) == keys


def test_the_compact_order_grammar_forces_keys_and_enum_tails():
    walk = GrammarMatcher(load_grammar(GRAMMARS / "ndjson-order.gbnf").automaton(None))
    for emitted, forced in (
        ('Records:\n{"id', '":'),
        ('":17,', '"customer":"'),
        ('"customer":"Ada","', 'status":"'),
        ('status":"c', 'ancelled","priority":"'),
        ('ancelled","priority":"n', 'ormal","total":'),
        ('ormal","total":9.5,', '"notes":"'),
        ('"notes":"ok"', "}\n"),
    ):
        walk.accept_token(emitted.encode())
        assert walk.forced_bytes().decode() == forced


def test_text_that_begins_with_a_brace_is_a_schema_under_either_setting(tmp_path: Path):
    path = tmp_path / "fit"
    path.write_text('\ufeff \n{"enum": ["a"]}')
    assert load_grammar(path).is_schema
    assert load_grammar(path, SCHEMA_TAG).is_schema
    assert read_grammar("true", "fit", SCHEMA_TAG).is_schema
    assert not read_grammar('root ::= "a"', "fit", SCHEMA_TAG).is_schema


def test_unused_keywords_are_one_line_with_the_tag():
    loaded = read_grammar('{"type": "array", "uniqueItems": true, "not": {}}', "fit.json", SCHEMA_TAG)
    assert loaded.notices() == ["[SCHEMA] fit.json: not used for drafts, left free: uniqueItems (#), not (#)"]


def test_errors_carry_tag_file_line_and_column(tmp_path: Path):
    bad = tmp_path / "bad.gbnf"
    bad.write_text('root ::= "a"\n  | (')
    with pytest.raises(GrammarError, match=r"^\[GRAMMAR\] .*bad\.gbnf:2:6: expected '\)'"):
        load_grammar(bad)
    with pytest.raises(GrammarError, match=r"^\[GRAMMAR\] .*none\.gbnf: cannot open \(No such file"):
        load_grammar(tmp_path / "none.gbnf")
    with pytest.raises(GrammarError, match=r"cannot open \(Is a directory"):
        load_grammar(tmp_path)
    with pytest.raises(GrammarError, match=r"^\[SCHEMA\] x:1:2: "):
        read_grammar("{", "x", SCHEMA_TAG)
    with pytest.raises(GrammarError, match="can never match"):
        read_grammar("root ::= root", "x").automaton(None)
    bad.write_bytes(b"#" * (MAX_TEXT_BYTES + 1))
    with pytest.raises(GrammarError, match="at most"):
        load_grammar(bad)


def test_english_text_is_walked_in_three_states():
    """G24."""
    made = read_grammar("root ::= en-char+ ([ \\t\\n] en-char+)*\nen-char ::= [a-zA-Z0-9.,!?'\"-]", "x").automaton(None)
    walk = GrammarMatcher(made)
    for _ in range(50):
        walk.accept_token(b"Some plain text, nothing special.\n")
        assert walk.forced_bytes() == b""
    assert made.num_states <= 4
    assert made.steps < 300
