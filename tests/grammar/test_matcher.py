"""Arming, desync and re-arming are the seed's, token by token; rollback and fork restore a position exactly."""

import random

import pytest
from grammar.reference import BYTES, SlowWalker, random_rules, to_gbnf

from coli.errors import GrammarError
from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import parse_gbnf
from coli.grammar.matcher import MAX_ROLLBACK, GrammarMatcher

RECORD = 'root ::= "{" "\\"id\\":" [0-9]+ ",\\"ok\\":" ("true" | "false") "}"'


def matcher(text: str, token_bytes=None, **options) -> GrammarMatcher:
    return GrammarMatcher(Automaton(compile_grammar(parse_gbnf(text)), **options), token_bytes)


@pytest.mark.parametrize("chunk", range(6))
def test_walk_and_forced_bytes_equal_the_slow_walker_on_any_text(chunk: int):
    for seed in range(chunk * 50, chunk * 50 + 50):
        rng = random.Random(seed)
        rules = random_rules(rng)
        text = to_gbnf(rules, rng)
        try:
            fast = matcher(text)
        except GrammarError:
            continue
        slow = SlowWalker(rules)
        for _ in range(12):
            if rng.random() < 0.7 and slow.armed is not None:
                legal = [byte for byte in BYTES if slow.armed.legal(byte)]
                byte = rng.choice(legal or BYTES)
            else:
                byte = rng.choice(BYTES)
            slow.feed(byte)
            fast.accept_token(bytes([byte]))
            assert fast.armed == (slow.armed is not None), text
            assert fast.can_end == (slow.armed is not None and slow.armed.can_end), text
            assert fast.forced_bytes(6) == slow.forced(6), text


def test_nothing_is_forced_before_the_first_byte_arms():
    walk = matcher(RECORD)
    assert not walk.armed
    assert walk.forced_bytes() == b""
    assert not walk.accept_token(b"Sure, here it is:\n\n")
    assert walk.forced_bytes() == b""
    assert walk.accept_token(b"{")
    assert walk.forced_bytes() == b'"id":'


def test_a_root_of_letters_arms_on_any_prose():
    walk = matcher('root ::= [a-z]+ " = " [0-9]+')
    assert walk.accept_token(b"Sure")


def test_an_illegal_byte_disarms_and_is_tried_as_a_beginning():
    walk = matcher(RECORD)
    assert walk.accept_token(b'{"id":1,"ok":true')
    assert not walk.accept_token(b"X")
    assert walk.forced_bytes() == b""
    assert walk.accept_token(b'{"id":')
    assert walk.accept_token(b"{")  # illegal here, and a new beginning
    assert walk.forced_bytes() == b'"id":'


def test_a_finished_parse_rejects_everything_and_the_next_object_arms_again():
    walk = matcher(RECORD)
    walk.accept_token(b'{"id":1,"ok":true}')
    assert walk.is_terminated
    assert walk.forced_bytes() == b""
    assert not walk.accept_token(b"\n")
    assert walk.accept_token(b"{")
    assert walk.forced_bytes() == b'"id":'


def test_a_root_with_plus_keeps_its_state():
    walk = matcher('root ::= ("{" [0-9] "}" "\\n")+')
    walk.accept_token(b"{1}\n")
    assert walk.can_end
    assert not walk.is_terminated
    assert walk.forced_bytes() == b""
    walk.accept_token(b"{1}")
    assert walk.forced_bytes() == b"\n"


def test_text_and_tokens_outside_the_grammar_only_disarm():
    """G22."""
    walk = matcher(RECORD, {1: b"{", 2: b"<|im_end|>", 3: b"", 4: b"\xff\xfe"}.__getitem__)
    for token_id in (2, 3, 4):
        walk.accept_token(1)
        walk.accept_token(token_id)
    assert not walk.armed
    assert walk.accept_token(1)


def test_a_token_may_arm_in_its_middle():
    walk = matcher(RECORD)
    assert walk.accept_token(b'Here: {"i')
    assert walk.forced_bytes() == b'd":'


def test_rollback_and_fork_restore_positions():
    walk = matcher(RECORD)
    walk.accept_token(b"{")
    at_brace = walk.forced_bytes()
    walk.accept_token(b'"id')
    twin = walk.fork()
    walk.accept_token(b"!!!")
    walk.accept_token(b"{")
    assert twin.forced_bytes() == b'":'
    twin.accept_token(b'":7')
    walk.rollback(2)
    assert walk.forced_bytes() == b'":'
    walk.rollback(1)
    assert walk.forced_bytes() == at_brace
    twin.rollback(3)
    assert not twin.armed
    with pytest.raises(ValueError, match="cannot take back 1"):
        twin.rollback(1)
    walk.reset()
    assert not walk.armed


def test_rollback_reaches_as_far_as_it_says():
    walk = matcher('root ::= "a"*')
    for _ in range(MAX_ROLLBACK + 10):
        walk.accept_token(b"a")
    walk.rollback(MAX_ROLLBACK)
    with pytest.raises(ValueError, match="cannot take back"):
        walk.rollback(1)


def test_token_terminals_arm_and_are_forced():
    names = {"<think>": 3, "</think>": 4}
    spelled = {3: b"<think>", 4: b"</think>", 5: b"hm", 6: b'{"a":', 7: b"1}"}
    text = 'root ::= <think> !</think>* </think> "{" "\\"a\\":" [0-9] "}"'
    walk = matcher(text, spelled.__getitem__, token_id=names.get)
    assert not walk.accept_token(5)
    assert walk.accept_token(3)
    assert walk.accept_token(5)
    assert walk.forced_bytes() == b""
    assert walk.accept_token(4)
    assert walk.forced_bytes() == b'{"a":'
    assert walk.accept_token(6)
    assert walk.accept_token(7)
    assert walk.is_terminated
    assert walk.accept_token(3)  # a new beginning
    forced = matcher('root ::= "x" </think>', spelled.__getitem__, token_id=names.get)
    assert forced.forced_token() is None
    forced.accept_token(b"x")
    assert forced.forced_token() == 4


def test_a_token_legal_by_terminal_and_by_bytes_keeps_both_ways():
    walk = matcher('root ::= <hi> "a" | "<hi>" "b"', {1: b"<hi>"}.__getitem__, token_id={"<hi>": 1}.get)
    walk.accept_token(1)
    assert walk.position is not None
    assert walk.position.byte_set == 1 << ord("a") | 1 << ord("b")


def test_ids_need_a_tokenizer():
    with pytest.raises(TypeError):
        matcher(RECORD).accept_token(1)
