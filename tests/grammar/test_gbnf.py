"""The parser reads the seed's notation and today's GBNF, and says where and what when it cannot."""

import pytest

from coli.errors import GrammarError
from coli.grammar.automaton import Automaton
from coli.grammar.compiler import compile_grammar
from coli.grammar.gbnf import MAX_NODES, MAX_REPEAT, parse_gbnf
from coli.grammar.matcher import walk_bytes
from coli.grammar.syntax import CharClass, Literal, Repeat, TokenTerminal


def accepts(text: str | bytes, data: str) -> bool:
    made = Automaton(compile_grammar(parse_gbnf(text)))
    state = walk_bytes(made, made.start, data.encode())
    return state is not None and state.can_end


def only_node(body: str) -> object:
    return parse_gbnf(f"root ::= {body}").nodes[-1]


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::=\n  | "a"\n  | "b"\n', ["a", "b", ""], ["c"]),
        ('root ::= "a" # why\n  "b" # more "\n# end', ["ab"], ["a"]),
        ('# first\nroot ::= x # a ] comment\nx ::= ("a" # in ( group\n "b")', ["ab"], ["a"]),
        ('root ::= x\nx ::= "a" |\n"b"\ny ::= "c"', ["a", "b"], ["c", "ac"]),
        ('root::="a"x x::= "b"', ["ab"], ["a"]),
        ('root ::= under_score with-dash 9 \nunder_score ::= "a"\nwith-dash ::= "b"\n9 ::= "c"', ["abc"], []),
        ('root ::= ("ab")? "cd"* "ef"+', ["ef", "abcdcdefef"], ["a", "abc", "abefe"]),
        ('root ::= "ab"*', ["", "abab"], ["abb", "aab"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{ 1 , 2 }', ["aabd", "aabbbccdd"], ["abd", "aabcccd", "aad", "aabddd"]),
        ("root ::= [a-c] [^a-c] [-+*/] [x-] [\\]\\[\\^\\-]", ["ad-x]", "c+*-^"], ["dd-x]", "aa-x]"]),
        ("root ::= [z-a]", ["m"], ["A"]),
        ('root ::= "" "a" ""', ["a"], [""]),
        ("root ::= ()", [""], ["a"]),
        ('root ::= "\\n\\r\\t\\"\\\\\\x41\\u00e9\\U0001F600\\[\\]\\-\\^"', ['\n\r\t"\\Aé😀[]-^'], []),
        ('root ::= "\\ud83d\\ude00"', ["😀"], []),
        ("root ::= [ぁ-ゟ]+ [\\u4e00-\\u9fff]", ["ひらがな漢"], ["カ漢"]),
        ('root ::= "a"?* "b"+?', ["", "aab", "bb"], ["c"]),
        ('root ::= ("a" | ) "b"', ["b", "ab"], ["a"]),
        ('\ufeffroot ::= "a"\r\n  "b"\r\nx ::= "c"', ["ab"], []),
        ('root ::= "two\nlines"', ["two\nlines"], []),
    ],
)
def test_notation(text: str, good: list[str], bad: list[str]):
    """G11, G17 and the rest of what occurs in the wild."""
    assert all(accepts(text, data) for data in good)
    assert not any(accepts(text, data) for data in bad)


def test_bytes_that_are_not_utf8_stand_for_themselves():
    assert parse_gbnf(b'root ::= "\xe9"').nodes[-1] == Literal(b"\xe9")
    assert parse_gbnf(b"root ::= [\xe9]").nodes[-1] == CharClass(((0xE9, 0xE9),))


def test_class_ranges_are_merged_and_dot_is_everything():
    assert only_node("[a-cb-dx]") == CharClass(((97, 100), (120, 120)))
    assert only_node(".") == CharClass((), negated=True)


def test_tokens_by_text_and_by_id():
    assert only_node("<think>") == TokenTerminal(None, "<think>", False, 1, 10)
    assert only_node("!</think>") == TokenTerminal(None, "</think>", True, 1, 10)
    assert only_node("<[1000]>") == TokenTerminal(1000, None, False, 1, 10)
    assert only_node("!<[1000]>") == TokenTerminal(1000, None, True, 1, 10)


def test_nested_simple_repetitions_become_one():
    for body, low, high in (("(x?)*", 0, None), ("((x+)+)?", 0, None), ("(x+)+", 1, None), ("((x?)?)?", 0, 1)):
        nodes = parse_gbnf(f'root ::= {body}\nx ::= "a"').nodes
        assert [node for node in nodes if isinstance(node, Repeat)][-1] == Repeat(0, low, high)


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ('root ::= "a" missing', "1:14", "expected a rule named 'missing'"),
        ('root ::= "a"\nroot ::= "b"', "2:1", "found 'root' again (first at line 1)"),
        ('start ::= "a"', "1:14", "expected a rule named 'root'"),
        ('root ::= ("a"', "1:14", "expected ')' for the '(' at 1:10, found end of file"),
        ('root ::= ("a"\nx ::= "b")', "2:1", "expected ')' for the '(' at 1:10, found the rule 'x'"),
        ('root ::= "a")', "1:13", "found ')' without '('"),
        ('root ::=\n  "abc', "2:3", "expected '\"' at the end of this literal"),
        ("root ::= [abc", "1:10", "expected ']' at the end of this class"),
        ("root ::= [a-", "1:10", "expected ']' at the end of this class"),
        ("root ::= []", "1:11", "found ']'"),
        ('root ::= "\\d+"', "1:11", r"expected one of \n \r \t"),
        ("root ::= [\\d]", "1:11", r"in this class, found \d"),
        ('root ::= "\\x4"', "1:11", r"expected 2 hexadecimal digits after \x"),
        ('root ::= "\\u12"', "1:11", r"expected 4 hexadecimal digits after \u"),
        ('root ::= "\\UFFFFFFFF"', "1:11", "expected a code point up to 10FFFF"),
        ('root ::= "\\ud800"', "1:11", r"found the lone surrogate \uD800"),
        ('root ::= "a\\', "1:12", "a backslash at the end of the file"),
        ("root ::= * ", "1:10", "expected an item before '*', found none"),
        ('root ::= "a" | ?', "1:16", "expected an item before '?'"),
        ('root ::= "a"{3,2}', "1:13", "expected {m,n} with m <= n, found {3,2}"),
        ('root ::= "a"{x}', "1:14", "expected a number of repetitions, found 'x'"),
        ('root ::= "a"{1,x}', "1:16", "expected a number of repetitions or '}'"),
        ('root ::= "a"{1', "1:15", "expected '}' or ',', found end of file"),
        (f'root ::= "a"{{{MAX_REPEAT + 1}}}', "1:14", f"at most {MAX_REPEAT} repetitions"),
        ('root ::= "a" = "b"', "1:14", "found '='"),
        ("root ::= 'a'", "1:10", 'found "\'"'),
        ('root = "a"', "1:6", "expected '::=' after the rule name 'root', found '='"),
        ('"a"', "1:1", "expected a rule name"),
        ("root ::= <>", "1:10", "expected a token such as <think>"),
        ("root ::= !x", "1:11", "expected a token such as <think>"),
        ("root ::= <[99999999999]>", "1:10", "expected a token id up to"),
        ("", "1:1", "expected a rule named 'root'"),
        ("root ::= é", "1:10", "found 'é'"),
        ('root ::= "\ud800"', "1:11", "expected UTF-8 text"),
    ],
)
def test_errors_name_file_line_column_and_what_was_expected(text: str, place: str, said: str):
    """G13 for the unknown escape."""
    with pytest.raises(GrammarError) as caught:
        parse_gbnf(text, "fit.gbnf")
    message = str(caught.value)
    assert message.startswith(f"fit.gbnf:{place}: ")
    assert said in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["fit.gbnf", "./grammars/fit.gbnf", "/tmp/a/b.json\n", "~/x"])
def test_a_path_in_place_of_a_grammar_is_told_so(text: str):
    """G23."""
    with pytest.raises(GrammarError, match="looks like a path"):
        parse_gbnf(text)


def test_a_large_grammar_loads():
    """G13: 1,994 rules."""
    rules = [f'r{i} ::= "<{i}>" r{i + 1} | [0-9]+ "\\n"' for i in range(1993)]
    text = "root ::= r0\n" + "\n".join(rules) + '\nr1993 ::= "end"'
    assert accepts(text, "<0><1>17\n")


def test_too_many_parts_are_refused():
    with pytest.raises(GrammarError, match=f"more than {MAX_NODES} parts"):
        parse_gbnf("root ::= " + '"" ' * (MAX_NODES + 1))
