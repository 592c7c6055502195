"""From a file or text to an automaton: reads GBNF or, where the text begins with `{`, a JSON Schema.

Messages carry the tag of the setting that named the text: `[GRAMMAR]` or `[SCHEMA]`. All errors are GrammarError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coli.errors import GrammarError
from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import MAX_TEXT_BYTES, parse_gbnf
from coli.grammar.json_schema import schema_to_gbnf
from coli.grammar.program import Program
from coli.grammar.syntax import CharClass, Grammar, Literal, TokenTerminal
from coli.impostors import open_input

GRAMMAR_TAG = "[GRAMMAR]"
SCHEMA_TAG = "[SCHEMA]"


@dataclass(frozen=True, slots=True)
class LoadedGrammar:
    """A grammar ready to walk. text: GBNF, of a schema the generated one; unused: schema keywords left out."""

    origin: str
    tag: str
    text: str
    is_schema: bool
    unused: tuple[str, ...]
    grammar: Grammar
    program: Program

    def notices(self) -> list[str]:
        """Lines for the user: what of the schema is not used."""
        if not self.unused:
            return []
        return [f"{self.tag} {self.origin}: not used for drafts, left free: {', '.join(self.unused)}"]

    def automaton(self, token_id: Callable[[str], int | None] | None) -> Automaton:
        """A fresh automaton; token_id as for Automaton. Raises GrammarError."""
        try:
            return Automaton(self.program, origin=self.origin, token_id=token_id)
        except GrammarError as error:
            raise GrammarError(f"{self.tag} {error}") from None


def load_grammar(path: Path, tag: str = GRAMMAR_TAG, *, tokens_as_text: bool = False) -> LoadedGrammar:
    """Read a grammar or schema file. Raises GrammarError naming the file, and line and column where there are any."""
    try:
        with open_input(path, MAX_TEXT_BYTES + 1) as file:
            source = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise GrammarError(
            f"{tag} {path}: cannot open ({error.strerror}); expected a GBNF or JSON Schema file"
        ) from None
    return read_grammar(source, str(path), tag, tokens_as_text=tokens_as_text)


def read_grammar(
    source: str | bytes, origin: str, tag: str = GRAMMAR_TAG, *, tokens_as_text: bool = False
) -> LoadedGrammar:
    """Parse and compile grammar or schema text.

    tokens_as_text: without a vocabulary, let a token terminal stand for its text and a negated one for any character.
    """
    data = source.encode("utf-8", "surrogateescape") if isinstance(source, str) else source
    is_schema = data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    is_schema |= tag == SCHEMA_TAG and b"::=" not in data
    unused: tuple[str, ...] = ()
    try:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise GrammarError(f"{origin}: UTF-16 text; save it as UTF-8")
        if len(data) > MAX_TEXT_BYTES:
            raise GrammarError(f"{origin}: expected at most {MAX_TEXT_BYTES} bytes of grammar, found more")
        if is_schema:
            compiled = schema_to_gbnf(data, origin)
            text, unused = compiled.text, compiled.unused
        else:
            text = data.decode("utf-8", "surrogateescape")
        grammar = parse_gbnf(text, origin)
        if tokens_as_text:
            _spell_tokens(grammar)
        program = compile_grammar(grammar)
    except GrammarError as error:
        raise GrammarError(f"{tag} {error}") from None
    return LoadedGrammar(origin, tag, text, is_schema, unused, grammar, program)


def _spell_tokens(grammar: Grammar) -> None:
    for index, node in enumerate(grammar.nodes):
        if isinstance(node, TokenTerminal):
            text = node.text if node.text is not None else f"<[{node.token_id}]>"
            grammar.nodes[index] = CharClass((), negated=True) if node.negated else Literal(text.encode())
