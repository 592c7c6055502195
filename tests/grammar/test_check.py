"""`coli grammar check` explains a grammar, marks a text and shows drafts; bad input is one line and exit 2."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from grammar.toy_tokenizers import bpe_tokenizer

from coli.cli import main
from coli.drafts.grammar import GrammarLibrary
from coli.tools.grammar_check import check_facts, check_grammar, check_lines, replay_tokens

GRAMMARS = Path(__file__).parents[2] / "grammars"
TOKENS = bpe_tokenizer()


@pytest.fixture
def coli(monkeypatch, capfdbinary) -> Callable[..., tuple[int, str, str]]:
    def call(*args: object, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.delenv("COLI_MODEL", raising=False)
        monkeypatch.delenv("SNAP", raising=False)
        capfdbinary.readouterr()
        status = main.run(["grammar", "check", *map(str, args)])
        captured = capfdbinary.readouterr()
        return status, captured.out.decode(), captured.err.decode()

    return call


def test_marks_tell_forced_free_illegal_and_passed_over(tmp_path: Path):
    path = tmp_path / "fit.gbnf"
    path.write_text('root ::= "{" "key" [0-9] "é" "}"')
    found = check_grammar(path, text="ab {key1é} {kex{key")
    assert found.marks == "   .===.== .==!.==="
    assert found.complete is False
    assert check_grammar(path, text="{key1é}").complete
    assert check_grammar(path).complete is None


def test_lines_show_marks_and_drafts():
    found = check_grammar(
        GRAMMARS / "ndjson-order.gbnf",
        text=(GRAMMARS / "examples" / "ndjson-order.txt").read_text(),
        tokenizer=TOKENS,
    )
    lines = check_lines(found)
    assert any(line.startswith('  {"id":1001,') for line in lines)
    assert lines[-1].endswith("forwards)")
    assert "% acceptance (" in lines[-2]
    assert lines[-2].endswith("forced drafts)")
    assert found.replay is not None
    assert found.replay.num_tokens == len(TOKENS.encode(found.text or ""))
    assert found.replay.accepted <= found.replay.proposed


def test_replay_counts_every_token_once():
    source = GrammarLibrary(TOKENS, lambda line: None).open(GRAMMARS / "ndjson-order.gbnf", gate="always")
    ids = TOKENS.encode((GRAMMARS / "examples" / "ndjson-order.txt").read_text())
    found = replay_tokens(source, ids, TOKENS)
    assert found.forwards + found.accepted == len(ids) - 1
    assert source.counters.accepted == found.accepted
    assert source.counters.proposed == found.proposed
    assert replay_tokens(source, ids[:1], TOKENS).forwards == 0


def test_facts_are_json():
    found = check_grammar(GRAMMARS / "ndjson-order.schema.json", text='{"id": 1', tokenizer=TOKENS)
    facts = json.loads(json.dumps(check_facts(found)))
    assert facts["kind"] == "schema"
    assert "root ::=" in facts["gbnf"]
    assert facts["marks"] == "..===..."
    assert facts["drafts"]["forwards"] >= 1


def test_token_terminals_need_no_model(tmp_path: Path):
    path = tmp_path / "think.gbnf"
    path.write_text('root ::= <think> !</think>* </think> "ok"')
    assert check_grammar(path, text="<think>x</think>ok").complete


def test_the_command_explains(coli):
    status, out, err = coli(GRAMMARS / "enum-answer.gbnf", "--text", "Sentiment: mixed.")
    assert (status, err) == (0, "")
    assert "arms at: S" in out
    assert "may end here" in out
    status, out, _ = coli(GRAMMARS / "enum-answer.gbnf", "--json", "--text", "-", stdin=b"Sentiment: positive.")
    assert status == 0
    assert json.loads(out)["complete"] is True


def test_bad_input_is_one_line_and_exit_2(coli, tmp_path: Path):
    bad = tmp_path / "bad.gbnf"
    bad.write_text('root ::= "a" (')
    status, out, err = coli(bad)
    assert (status, out) == (2, "")
    assert err.startswith(f"coli: [GRAMMAR] {bad}:1:15: expected ')'")
    assert err.count("\n") == 1
    assert coli(tmp_path / "none.gbnf")[0] == 2
    status, _, err = coli(bad, "--schema")
    assert status == 2
    assert "[SCHEMA]" in err or "[GRAMMAR]" in err


def test_what_the_walker_s_limits_end_is_not_called_a_mismatch(tmp_path):
    path = tmp_path / "deep.gbnf"
    path.write_text('root ::= a? root "b" | "c"\na ::= "x"')
    shallow = check_grammar(path, text="x" * 20 + "c" + "b" * 20)
    deep = check_grammar(path, text="x" * 800 + "c" + "b" * 800)
    assert shallow.overflows == 0
    assert deep.overflows > 0
    assert any("too deep or too ambiguous for the walker" in line for line in check_lines(deep))
    assert not any("too deep" in line for line in check_lines(shallow))
