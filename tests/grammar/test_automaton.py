"""The automaton allows exactly what an independent parser allows, and stays small and quick on hostile grammars."""

import random
import subprocess
import sys
import time

import pytest
from grammar.reference import BYTES, Earley, random_rules, to_gbnf

from coli.errors import GrammarError
from coli.grammar.automaton import MAX_FORCED, MAX_HELD, Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import parse_gbnf
from coli.grammar.matcher import walk_bytes


def automaton(text: str, **options) -> Automaton:
    return Automaton(compile_grammar(parse_gbnf(text)), **options)


def accepts(text: str, data: str | bytes) -> bool:
    """Whether the whole of `data` is in the language."""
    made = automaton(text)
    state = walk_bytes(made, made.start, data.encode() if isinstance(data, str) else data)
    return state is not None and state.can_end


@pytest.mark.parametrize("chunk", range(20))
def test_equals_the_reference_on_random_grammars_and_texts(chunk: int):
    for seed in range(chunk * 100, chunk * 100 + 100):
        rng = random.Random(seed)
        rules = random_rules(rng)
        text = to_gbnf(rules, rng)
        try:
            made = automaton(text)
        except GrammarError:
            reference = Earley(rules)
            assert not reference.can_end, text
            assert not any(map(reference.legal, range(256))), text
            continue
        for _ in range(2):
            reference, state = Earley(rules), made.start
            for _ in range(10):
                legal = [byte for byte in BYTES if reference.legal(byte)]
                assert [byte for byte in BYTES if state.byte_set >> byte & 1] == legal, text
                assert state.can_end == reference.can_end, text
                if not legal:
                    break
                byte = rng.choice(legal)
                reference.push(byte)
                state = made.step(state, byte)
                assert state is not None, text


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= root "a" | "b"', ["b", "baa"], ["", "a", "ab"]),
        ('root ::= a\na ::= b "x" | "1"\nb ::= a "y" | "2"', ["1", "2x", "1yx", "2xyx"], ["1x", "y"]),
        ('root ::= e\ne ::= b | [0-9]+ | "(" e ")"\nb ::= e op e\nop ::= [-+*]', ["1", "1+2*(3-4)"], ["1+", "+1"]),
        ('root ::= e? root "a" | "b"\ne ::= "e"', ["b", "eba", "ba", "eebaa"], ["a", "e"]),
    ],
    ids=["direct", "mutual", "binary operators", "behind an empty prefix"],
)
def test_left_recursion_is_matched_like_any_rule(text: str, good: list[str], bad: list[str]):
    """G1, G2."""
    assert all(accepts(text, data) for data in good)
    assert not any(accepts(text, data) for data in bad)
    assert compile_grammar(parse_gbnf(text)).left_recursive


def test_nullable_loop_of_alternatives_accepts_its_sample():
    """G5."""
    text = """
root ::= module
module ::= "MODULE" sp name nl (sp | nl)* body (sp | nl)* "===="
body ::= (definition (sp | nl)*)*
definition ::= name (sp | nl)* "==" (sp | nl)* expression
expression ::= name | [0-9]+ | "\\\\A" sp name sp "\\\\in" sp name
name ::= [A-Za-z] [A-Za-z0-9_]*
sp ::= [ \\t]*
nl ::= "\\n"*
"""
    assert accepts(text, "MODULE Clock\n\n  Init == 0\n\nNext ==\n  \\A h \\in Hours\n\n====")


def test_optional_runs_reuse_their_states():
    """G7."""
    made = automaton('root ::= [0-9] (a? a? a? a? a? [0-9])*\na ::= "a"')
    state = walk_bytes(made, made.start, b"1a2a3a4a5" * 20)
    assert state is not None
    assert state.can_end
    assert made.num_states <= 8


def test_bounded_list_of_numbers_compiles_at_once():
    """G8."""
    begin = time.process_time()
    for limit in (1000, 100):
        text = f'root ::= "[" number ("," number){{9,{limit - 1}}} "]"\nnumber ::= [0-9]+ ("." [0-9]+)?'
        made = automaton(text)
        assert accepts(text, "[" + ",".join(["1.5"] * limit) + "]")
        assert walk_bytes(made, made.start, ("[" + ",".join(["1"] * (limit + 1))).encode()) is None
        assert walk_bytes(made, made.start, ("[" + ",".join(["1"] * 9) + "]").encode()) is None
        assert len(made.program.code) < 30
    assert time.process_time() - begin < 20  # half a second; expanded or walked badly it would be minutes


def test_multi_byte_literals_are_forced_whole():
    """G16."""
    made = automaton('root ::= "<" ("｜begin｜" | "！！！" | "！") ">"')
    state = walk_bytes(made, made.start, b"<")
    assert state is not None
    assert made.forced(state)[0] == "｜".encode()[:1]  # U+FF5C and U+FF01 share one byte
    for text, rest in (("<｜", "begin｜>"), ("<！！", "！>")):
        state = walk_bytes(made, made.start, text.encode())
        assert state is not None
        assert made.forced(state)[0] == rest.encode()
    one = walk_bytes(made, made.start, "<！".encode())
    assert one is not None
    assert made.forced(one)[0] == b""


def test_negated_class_of_line_breaks_passes_their_bytes_in_other_characters():
    """G18: U+0085 is excluded, its byte inside of U+00C5 is not."""
    text = 'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ "\\n"'
    assert accepts(text, "- Ångström … ok\n- zweiter\n")
    assert not accepts(text, "- a\x85b\n")
    assert not accepts(text, "- a\u2028b\n")
    assert accepts(text, b"- stray \xff\xfe byte\n")


def test_class_semantics_are_exact():
    """G19."""
    text = 'root ::= "\'" ([^\'\\\\\\n] | "\\\\" [\\\\\'n])* "\'"'
    assert accepts(text, "'it\\'s \\n fine \"so\"'")
    assert not accepts(text, "'a\nb'")
    assert accepts('root ::= "[" ([^\\]]) "]"', "[\n]")


def test_exponent_without_zero_breaks_off_there():
    """G20."""
    text = 'root ::= "[" number ("," number)* "]"\nnumber ::= [0-9] ([eE] [-+]? [0-9] [1-9]{0,15})?'
    made = automaton(text)
    assert walk_bytes(made, made.start, b"[1e1") is not None
    assert walk_bytes(made, made.start, b"[1e10") is None


def test_hexadecimal_escape_is_a_byte_in_a_literal_and_a_code_point_in_a_class():
    assert accepts('root ::= "\\xC3\\xA9" [\\xE9]', "éé")
    assert accepts('root ::= "\\x85"', b"\x85")
    assert accepts("root ::= [\\x80-\\xFF]+", "\u0080ÿé")
    assert not accepts("root ::= [\\x80-\\xFF]", b"\x85")
    assert accepts("root ::= [^a]", b"\x85")
    assert not accepts("root ::= [^\\x85]", b"\x85")


def test_dot_is_one_character():
    assert accepts("root ::= ...", "a€😀")
    assert not accepts("root ::= ..", "€"[0:1] + "ab")
    assert accepts("root ::= .", "\n")


def test_counted_repetition_counts_characters_not_bytes():
    for text in ("root ::= [é-ü]{2,3}", 'root ::= ("é" | "ü"){2,3}', "root ::= c{2,3}\nc ::= [é-ü]"):
        assert [accepts(text, "é" * times) for times in range(5)] == [False, False, True, True, False]


@pytest.mark.parametrize("low", [0, 1, 7])
def test_a_large_count_costs_one_small_state_per_character_seen(low: int):
    made = automaton(f'root ::= "\\"" [a-z]{{{low},2000}} "\\""')
    assert len(made.program.code) < 10
    state = walk_bytes(made, made.start, b'"' + b"a" * 2000)
    assert state is not None
    assert made.forced(state)[0] == b'"'
    assert walk_bytes(made, state, b"a") is None
    assert made.num_states <= 2010
    assert all(len(other.threads) <= 3 for other in made._states.values())


def test_forced_bytes_stop_at_a_choice_an_end_and_the_limit():
    made = automaton('root ::= "abc" ("d" | "e") "fg" "h"?')
    bytes_, state = made.forced(made.start)
    assert bytes_ == b"abc"
    state = walk_bytes(made, state, b"d")
    assert state is not None
    assert made.forced(state)[0] == b"fg"
    endless = automaton('root ::= "ab" root')
    assert made.forced(made.start)[0] == b"abc"
    assert endless.forced(endless.start)[0] == (b"ab" * MAX_FORCED)[:MAX_FORCED]


def test_the_same_language_place_is_the_same_state():
    made = automaton('root ::= (record "\\n")+\nrecord ::= "{" [0-9]+ "}"')
    first = walk_bytes(made, made.start, b"{1}\n{22")
    later = walk_bytes(made, made.start, b"{1}\n{2}\n{345}\n{6")
    assert first is later
    right = automaton('root ::= list\nlist ::= "a" list | "b"')
    assert walk_bytes(right, right.start, b"a") is walk_bytes(right, right.start, b"aaaa")


def test_site_ignores_counts_and_depth():
    made = automaton('root ::= "[" item ("," item){0,50} "]"\nitem ::= "{" "x" [0-9] "}" | root')
    first = walk_bytes(made, made.start, b"[{x1},{x")
    later = walk_bytes(made, made.start, b"[{x1},{x2},{x3},{x")
    assert first is not None
    assert later is not None
    assert first is not later
    assert first.site == later.site


@pytest.mark.parametrize(
    "text",
    ["root ::= root", 'root ::= a\na ::= a "x"', "root ::= [\\uD800]", 'root ::= a\na ::= b "x"\nb ::= a'],
)
def test_a_root_that_can_never_begin_is_refused(text: str):
    with pytest.raises(GrammarError, match="'root' can never match"):
        automaton(text)


def test_tables_are_emptied_and_the_walk_goes_on():
    deep = automaton('root ::= "(" root ")" | "x"')
    state = deep.start
    for _ in range(2):
        state = walk_bytes(deep, deep.start, b"(" * 9000 + b"x" + b")" * 9000)
        assert state is not None
        assert state.can_end
        assert deep._held <= MAX_HELD
    assert deep.num_flushes > 0


def test_beyond_the_depth_the_byte_is_refused():
    made = automaton('root ::= "(" root ")" | "x"')
    assert walk_bytes(made, made.start, b"(" * 20_000) is None
    assert made.overflows > 0
    assert accepts('root ::= "(" root ")" | "x"', "((x))")


def test_token_terminals_take_whole_tokens():
    made = automaton("root ::= <think> !</think>* </think> [a-z]+ <[7]>", token_id={"<think>": 3, "</think>": 4}.get)
    state = made.step_token(made.start, 3)
    assert state is not None
    assert made.step_token(made.start, 4) is None
    assert made.only_token(made.start) == 3
    assert made.only_token(state) is None
    state = made.step_token(state, 99)
    assert state is not None
    state = made.step_token(state, 4)
    assert state is not None
    state = walk_bytes(made, state, b"ab")
    assert state is not None
    assert made.step_token(state, 7) is not None


def test_token_terminal_outside_the_vocabulary_is_refused_with_its_place():
    with pytest.raises(GrammarError, match=r"g\.gbnf:2:3: .*<nope>"):
        Automaton(compile_grammar(parse_gbnf('root ::= "a"\n  <nope>', "g.gbnf")), origin="g.gbnf", token_id={}.get)


HOSTILE = r"""
import sys, time
from coli.process_use import peak_memory_bytes
from coli.errors import GrammarError
from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import parse_gbnf
from coli.grammar.matcher import feed_bytes

def nest(inner, count, postfix):
    return "root ::= " + "(" * count + inner + (")" + postfix) * count

big = "root ::= " + " | ".join(f"r{i}" for i in range(2000)) + "\n" + "".join(
    f'r{i} ::= "key{i}" ":" [a-z]+ ("," r{i * 7 % 2000})? [0-9]{{1,5}} # rule\n' for i in range(2000))
chain = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} TAIL\n" for i in range(12000)) + 'r12000 ::= "e"'
CASES = {
    "2,000 rules": (big, b"key55:abc,key385:xyz123"),
    "nullable stars": ('root ::= (((("a"?)*)*)* ("b"*)*)*', b"ab" * 500),
    "60,000 groups": (nest('"a"', 60000, ""), b"a"),
    "60,000 optional groups": (nest('"a"', 60000, "?"), b"a"),
    "60,000 starred groups": (nest('"a"', 60000, "*"), b"aaa"),
    "60,000 groups of two": (nest('"a" "b"?', 60000, "*"), b"ab"),
    "20,000 nested optionals": ("root ::= " + '("a" ' * 20000 + ")?" * 20000, b"a" * 3000),
    "chain of rules": (chain.replace("TAIL", ""), b"e"),
    "chain of rules with tails": (chain.replace("TAIL", '"x"'), b"exxx"),
    "count to 2,000": ('root ::= "a"{0,2000}', b"a" * 2000),
    "six nested counts from 0": (nest('"a"', 6, "{0,2000}"), b"a" * 1500),
    "six nested counts from 5": (nest('"a"', 6, "{5,2000}"), b"a" * 3000),
    "ambiguous count": ('root ::= ("a" | "aa"){1000}', b"a" * 3000),
    "count to a million": (nest('"a"', 1, "{1000000}"), b"a" * 3000),
    "ambiguous recursion": ('root ::= s\ns ::= "a" s s | ', b"a" * 3000),
    "ambiguous left recursion": ('root ::= s\ns ::= s s s | s s | "a" | ', b"a" * 3000),
    "deep text": ('root ::= "(" root ")" | "x"', b"(" * 30000),
    "many alternatives": ("root ::= (" + " | ".join(f'"x{i:05}"' for i in range(9000)) + ")+", b"x00001x08999" * 50),
    "many ranges": ("root ::= [" + "".join(f"\\U{c:08x}" for c in range(0x3000, 0xd000, 3)) + "]+", "\u3000".encode()),
    "unclosed": ("root ::= " + "(" * 200000, b""),
    "comments": ("# x\n" * 500000 + 'root ::= "a"', b"a"),
    "names": ("root ::= " + "a" * 3000000, b""),
}
text, data = CASES[sys.argv[1]]
begin = time.process_time()
try:
    automaton = Automaton(compile_grammar(parse_gbnf(text)))
    position = feed_bytes(automaton, None, data)
except GrammarError as error:
    assert len(str(error)) < 500
print(time.process_time() - begin, peak_memory_bytes() // 1024)
"""
NAMES = [line.split('"')[1] for line in HOSTILE.splitlines() if line.startswith('    "')]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_grammars_are_done_or_refused_in_bounded_time_and_memory(name: str):
    done = subprocess.run([sys.executable, "-c", HOSTILE, name], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-500:]
    seconds, kilobytes = done.stdout.split()
    assert float(seconds) < 30  # of processor time; under 1 s on an idle machine
    assert int(kilobytes) < 300_000
