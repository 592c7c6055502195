"""Schemas as tests ask of them: what they accept, force and leave open."""

import json
from typing import Any

from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import parse_gbnf
from coli.grammar.json_schema import schema_to_gbnf
from coli.grammar.matcher import walk_bytes


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
