"""Patterns become grammars for exactly the JSON strings that match, or are refused."""

import json
import random
import re
from functools import cache

import pytest

from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import parse_gbnf
from coli.grammar.matcher import walk_bytes
from coli.grammar.pattern import UnusablePattern, pattern_to_gbnf

RULES = '\nchar ::= [^"\\\\\\x00-\\x1F] | "\\\\" (["\\\\/bfnrt] | "u" hex hex hex hex)\nhex ::= [0-9a-fA-F]\n'


@cache
def walker(pattern: str) -> Automaton:
    return Automaton(compile_grammar(parse_gbnf(f"root ::= {pattern_to_gbnf(pattern)}{RULES}")))


def matches(pattern: str, text: str) -> bool:
    made = walker(pattern)
    state = walk_bytes(made, made.start, json.dumps(text, ensure_ascii=False).encode())
    return state is not None and state.can_end


ATOMS = [
    *("a", "b", "1", r"\d", r"\w", r"\s", r"\S", r"\D", ".", "[ab]", "[^a]", "[a-c1]", r"\.", r"\"", '"', r"\\"),
    *(r"\/", r"\n", r"[\n\t]", "é", r"\u00e9", '[^\\s"]', r"[\w-]"),
]


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return rng.choice(ATOMS)
    if kind < 0.6:
        return "".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3)))
    if kind < 0.75:
        return "(?:" + "|".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3))) + ")"
    quantifier = rng.choice(("?", "*", "+", "{2}", "{1,2}", "{1,}", "*?"))
    return f"({random_pattern(rng, depth - 1)}){quantifier}"


@pytest.mark.parametrize("chunk", range(5))
def test_equals_a_regular_expression_engine(chunk: int):
    for seed in range(chunk * 60, chunk * 60 + 60):
        rng = random.Random(seed)
        parts = [random_pattern(rng, rng.randint(0, 3)) for _ in range(rng.randint(1, 2))]
        pattern = "|".join(rng.choice(("^", "")) + part + rng.choice(("$", "")) for part in parts)
        compiled = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
        for _ in range(12):
            text = "".join(rng.choices('ab1c ."\\/\né-', k=rng.randint(0, 5)))
            assert matches(pattern, text) == bool(compiled.search(text)), (pattern, text)


def test_escaped_slash():
    """J7."""
    assert matches(r"^\d{3}\/[a-z]+$", "123/abc")
    assert not matches(r"^\d{3}\/[a-z]+$", "12/abc")


def test_anchors_belong_to_one_alternative():
    """J12."""
    for text, expected in (("ax", True), ("xb", True), ("xa", False), ("bx", False)):
        assert matches("^a|b$", text) is expected


def test_control_characters_are_spelled_as_json_spells_them():
    assert matches("^[\\x00-\\x1f]{5}$", "\x00\x01\x1f\n\t")
    assert matches('^"\\\\$', '"\\')
    assert matches(r"^\u{1F600}$", "😀")


REFUSED = [
    *("(?=a)b", "(?!a)b", "(?<=a)b", r"(a)\1", r"\bword\b", r"\p{L}+", "a^b", "a$b", "(^a)", "[b-a]", "a{2,1}", "("),
    *("a)", "[a", "*a", "a{x}", "\\", "[]", "[a-\\d]", r"\x4", r"\ud800", "a" * 5000, "a{99999}"),
    "(" * 60 + "a" + ")" * 60,
]


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_a_grammar_cannot_say_is_refused(pattern: str):
    with pytest.raises(UnusablePattern):
        pattern_to_gbnf(pattern)
