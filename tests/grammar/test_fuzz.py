"""Damaged grammars and schemas are refused with one line or walked; nothing else ever happens."""

import json
import random
from pathlib import Path

import pytest

from coli.errors import GrammarError
from coli.grammar.load import GRAMMAR_TAG, SCHEMA_TAG, read_grammar
from coli.grammar.matcher import GrammarMatcher

GRAMMARS = Path(__file__).parents[2] / "grammars"
PIECES = (
    *(
        b'"',
        b"[",
        b"]",
        b"(",
        b")",
        b"{",
        b"}",
        b"|",
        b"*",
        b"+",
        b"?",
        b"::=",
        b"\\",
        b"^",
        b"-",
        b"#",
        b"\n",
        b"<",
        b">",
    ),
    *(
        b"!",
        b".",
        b"\x00",
        b"\xff",
        b"{2,3}",
        b"{9999999}",
        b"root",
        b"ws",
        b" ",
        "é".encode(),
        b"\\x",
        b"\\ud800",
        b"//",
    ),
)
VALUES = (
    None,
    True,
    False,
    0,
    -1,
    2.5,
    10**40,
    "",
    "#",
    "#/properties",
    "x",
    [],
    ["null"],
    {},
    {"$ref": "#"},
    [{}],
    "^a$",
)
KEYWORDS = (
    *("type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "$ref", "enum", "const"),
    *("minimum", "maximum", "exclusiveMinimum", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("additionalProperties", "patternProperties", "propertyNames", "nullable", "not", "$defs", "$id", "$anchor"),
)


def walk_or_refuse(source: bytes, tag: str, rng: random.Random) -> None:
    try:
        made = read_grammar(source, "fuzz", tag, tokens_as_text=True).automaton(None)
    except GrammarError as refused:
        said = str(refused)
        made = None
    if made is None:
        assert "fuzz" in said
        assert len(said) < 2000
        assert "\n" not in said
        return
    walk = GrammarMatcher(made)
    for _ in range(20):
        forced = walk.forced_bytes()
        legal = walk.position.byte_set if walk.position is not None else made.start.byte_set
        options = [byte for byte in range(256) if legal >> byte & 1] or [0]
        walk.accept_token(forced or bytes([rng.choice(options)]))


@pytest.mark.parametrize("path", sorted(GRAMMARS.glob("*.gbnf")), ids=lambda path: path.stem)
def test_damaged_grammars(path: Path):
    rng = random.Random(path.stem)
    original = path.read_bytes()
    for _ in range(150):
        damaged = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged) + 1)
            damaged[at : at + rng.choice((0, 0, 1, 3, 20))] = rng.choice(PIECES)
        walk_or_refuse(bytes(damaged), GRAMMAR_TAG, rng)


def random_json(rng: random.Random, depth: int) -> object:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(VALUES)
    if rng.random() < 0.2:
        return [random_json(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    names = rng.sample(KEYWORDS, rng.randint(1, 5))
    return {name: random_json(rng, depth - 1) for name in names}


@pytest.mark.parametrize("chunk", range(4))
def test_schemas_of_random_keywords(chunk: int):
    for seed in range(chunk * 250, chunk * 250 + 250):
        rng = random.Random(seed)
        walk_or_refuse(json.dumps(random_json(rng, 5)).encode(), SCHEMA_TAG, rng)
