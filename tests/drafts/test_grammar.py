"""The grammar source drafts what is forced, learns spelling and choices from the target, and knows when to stop."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from grammar.reference import random_rules, to_gbnf
from grammar.toy_tokenizers import GreedyTokenizer, bpe_tokenizer, record

from coli.drafts.base import Draft
from coli.drafts.grammar import MAX_OVERFLOWS, GrammarLibrary, GrammarSource
from coli.errors import GrammarError
from coli.grammar.habits import END, MAX_SITES, Habits
from coli.grammar.load import read_grammar
from coli.grammar.spans import ends_inside_character
from coli.tools.grammar_check import Replay, replay_tokens

GRAMMARS = Path(__file__).parents[2] / "grammars"
TOKENS = bpe_tokenizer()
END_ID = next(iter(TOKENS.special_ids))
RECORD = 'root ::= "{" "\\"id\\":" [0-9]+ ",\\"ok\\":" ("true" | "false") "}"'


def source(
    text: str, tokenizer=TOKENS, *, gate: str = "always", end_id: int | None = END_ID, **options
) -> GrammarSource:
    library = GrammarLibrary(tokenizer, options.pop("notice", lambda line: None), end_id=end_id)
    return library.source(read_grammar(text, "fit.gbnf"), gate=gate, **options)


def drafted(made: GrammarSource, limit: int = 24, extension: Sequence[int] = ()) -> str:
    draft = made.propose(limit, extension)
    return "" if draft is None else TOKENS.decode(draft.token_ids)


def run(made: GrammarSource, text: str) -> None:
    made.commit(TOKENS.encode(text))


def records(style: str, count: int = 25) -> str:
    rng = random.Random(7)
    spacing = {"compact": (",", ":"), "spaced": (", ", ": ")}
    chosen = [spacing[style] if style in spacing else rng.choice(list(spacing.values())) for _ in range(count)]
    return "".join(record(rng, number, *chosen[number]) + "\n" for number in range(count))


def replay(name: str, text: str, gate: str = "always") -> Replay:
    library = GrammarLibrary(TOKENS, lambda line: None, end_id=END_ID)
    return replay_tokens(library.open(GRAMMARS / name, gate=gate), TOKENS.encode(text), TOKENS)


def test_nothing_is_drafted_before_arming():
    made = source(RECORD)
    made.begin(TOKENS.encode("{"))  # the prompt does not count
    assert made.propose(24) is None
    run(made, "Here: ")
    assert made.propose(24) is None
    assert made.report_lines() == []


def test_the_forced_span_is_drafted_behind_what_armed():
    made = source(RECORD)
    made.begin(())
    run(made, "{")
    assert drafted(made) == '"id":'
    run(made, '"id":1')
    assert drafted(made) == ""
    run(made, ",")
    assert drafted(made) == '"ok":'


def test_proposing_changes_nothing():
    made = source(RECORD)
    made.begin(())
    run(made, '{"id":1')
    for _ in range(3):
        assert drafted(made, extension=TOKENS.encode(",")) == '"ok":'
        assert drafted(made) == ""


def test_an_extension_is_walked_first():
    made = source(RECORD)
    made.begin(())
    assert drafted(made, extension=TOKENS.encode("Sure: {")) == '"id":'
    run(made, "{")
    assert drafted(made, extension=TOKENS.encode("nonsense")) == ""


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_the_limit_and_the_depth_bound_a_proposal(limit: int):
    made = source(RECORD, depth=2)
    made.begin(())
    run(made, "{")
    draft = made.propose(limit)
    assert (0 if draft is None else len(draft)) == limit
    assert made.counters.proposed == limit  # counted after trimming
    whole = made.propose(24)
    assert whole is not None
    assert len(whole) == 2


def test_depth_must_be_within_the_verify_batch():
    for depth in (0, 49):
        with pytest.raises(ValueError, match=r"expected 1\.\.48"):
            source(RECORD, depth=depth)


def test_the_end_is_proposed_where_the_grammar_must_end():
    made = source(RECORD)
    made.begin(())
    run(made, '{"id":1,"ok":t')
    draft = made.propose(24)
    assert draft is not None
    assert draft.token_ids[-1] == END_ID
    assert TOKENS.decode(draft.token_ids[:-1]) == "rue}"
    without = source(RECORD, end_id=None)
    without.begin(())
    run(without, '{"id":1,"ok":t')
    assert drafted(without) == "rue}"


def test_the_end_is_not_proposed_where_the_target_went_on():
    made = source(RECORD)
    made.begin(())
    for _ in range(2):
        run(made, '{"id":1,"ok":true}')
        run(made, "\n")
    run(made, '{"id":1,"ok":true}')
    assert made.propose(24) is None


def test_an_end_seen_before_is_proposed_where_the_grammar_may_go_on():
    made = source('root ::= ("{" [0-9] "}" "\\n"?)+')
    for _ in range(4):
        made.begin(())
        run(made, "{1}")
    made.begin(())
    run(made, "{1}")
    draft = made.propose(24)
    assert draft is not None
    assert draft.token_ids == (END_ID,)


def test_spelling_follows_what_the_target_did():
    """A tail held back at first is drafted once the target has shown how it spells it."""
    tokenizer = GreedyTokenizer([b'"id', b'":', b'":1'])
    made = source(RECORD, tokenizer, end_id=None)
    made.begin(())
    colon, one = tokenizer.id_of(b'":'), ord("1")
    ids = [ord("{"), tokenizer.id_of(b'"id')]
    made.commit(ids[:1])
    draft = made.propose(24)
    assert draft is not None
    assert draft.token_ids == (ids[1],)  # ": might become ":1
    made.commit([ids[1], colon, one, *tokenizer.encode(',"ok":true}\n{')])
    draft = made.propose(24)
    assert draft is not None
    assert draft.token_ids[:2] == (ids[1], colon)


def test_spacing_habits_are_learnt_on_a_tolerant_grammar():
    made = source('root ::= "{" ws "\\"id\\"" ws ":" ws [0-9]+ ws "}"\nws ::= [ \\n]{0,9}')
    made.begin(())
    run(made, "{")
    assert drafted(made) == ""
    for number in range(4):
        run(made, f'"id": {number}}}\n{{')
    assert drafted(made) == '"id":'  # the space belongs to the digit's choice or is drafted with it
    run(made, '"id": 5}\n{')
    assert drafted(made).startswith('"id":')


def test_a_favourite_alternative_is_drafted_once_it_pays_and_dropped_when_it_does_not():
    made = source('root ::= ("<" ("alpha" | "beta") ">" "\\n")+', end_id=None)
    made.begin(())
    run(made, "<")
    assert drafted(made) == ""
    for _ in range(6):
        run(made, "alpha>\n<")
    assert drafted(made).startswith("alpha>\n")
    for _ in range(5):
        run(made, "beta>\n<alpha>\n<")
    assert drafted(made) == ""


def test_a_draft_never_ends_inside_a_character():
    tokenizer = GreedyTokenizer([])
    made = source('root ::= "a" [éè] "b😀" [é😀]', tokenizer, end_id=None, depth=5)
    made.begin(())
    made.commit([ord("a")])
    assert made.propose(24) is None  # the first byte of é and è is forced, the second is not
    made.commit(list("é".encode()))
    draft = made.propose(24)
    assert draft is not None
    assert bytes(draft.token_ids) == "b😀".encode()
    cut = made.propose(3)
    assert cut is not None
    assert bytes(cut.token_ids) == b"b"


@pytest.mark.parametrize("chunk", range(8))
def test_drafts_are_legal_and_whole_for_any_grammar_vocabulary_and_text(chunk: int):
    for seed in range(chunk * 40, chunk * 40 + 40):
        rng = random.Random(seed)
        text = to_gbnf(random_rules(rng), rng)
        tokenizer = GreedyTokenizer(
            [bytes(rng.choices(b'ab"\\]^-', k=rng.randint(2, 4))) for _ in range(20)], ["<end>"]
        )
        end_id = tokenizer.vocab_size - 1
        try:
            made = source(text, tokenizer, end_id=end_id)
        except GrammarError:
            continue
        made.begin(())
        walk = made.automaton.start
        context = b""
        for _ in range(25):
            draft = made.propose(rng.choice((1, 5, 48)))
            if draft is not None:
                assert draft.is_chain
                spelled = b"".join(map(tokenizer.token_bytes, (one for one in draft.token_ids if one != end_id)))
                assert end_id not in draft.token_ids[:-1]
                assert draft.token_ids[-1] == end_id or not ends_inside_character(context + spelled)
            emitted = list(draft.token_ids[:2]) if draft is not None and rng.random() < 0.5 else []
            emitted = [one for one in emitted if one != end_id]
            emitted.append(rng.randrange(end_id))
            made.commit(emitted)
            context = (context + b"".join(map(tokenizer.token_bytes, emitted)))[-8:]
        assert walk is made.automaton.start


@pytest.mark.parametrize("chunk", range(4))
def test_without_habits_a_draft_spells_a_beginning_of_the_forced_bytes(chunk: int):
    for seed in range(chunk * 50, chunk * 50 + 50):
        rng = random.Random(seed)
        text = to_gbnf(random_rules(rng), rng)
        pieces = ["".join(rng.choices('ab"\\]^-é€😀', k=rng.randint(1, 3))).encode() for _ in range(30)]
        tokenizer = GreedyTokenizer(pieces)
        try:
            made = source(text, tokenizer, end_id=None)
        except GrammarError:
            continue
        automaton, state = made.automaton, made.automaton.start
        for _ in range(8):
            made.begin(())
            legal = [byte for byte in range(256) if state.byte_set >> byte & 1]
            if not legal:
                break
            byte = rng.choice(legal)
            reached = automaton.step(state, byte)
            assert reached is not None
            state = reached
            made._position = state
            made._context[-1] = byte
            draft = made.propose(48)
            if draft is not None:
                spelled = b"".join(map(tokenizer.token_bytes, draft.token_ids))
                assert automaton.forced(state)[0].startswith(spelled)


def test_token_terminals_are_drafted():
    tokenizer = GreedyTokenizer([], ["<think>", "</think>"])
    first, last = sorted(tokenizer.special_ids)
    made = source('root ::= <think> [a-z]+ "." </think> "ok"', tokenizer, end_id=None)
    made.begin(())
    made.commit([first, *b"hm."])
    draft = made.propose(24)
    assert draft is not None
    assert draft.token_ids == (last, *b"ok")
    with pytest.raises(GrammarError, match=r"fit\.gbnf:1:10: .*<nope>"):
        source("root ::= <nope>", tokenizer)


def test_compact_records_reach_two_tokens_a_forward():
    found = replay("ndjson-order.gbnf", records("compact"))
    assert found.tokens_per_forward >= 2.0
    assert found.accepted >= 0.9 * found.proposed


def test_the_tolerant_grammar_serves_sloppy_spacing_where_the_compact_one_loses_it():
    tolerant, compact = (replay(f"ndjson-order{kind}.gbnf", records("mixed")) for kind in ("-spaced", ""))
    assert tolerant.tokens_per_forward > 1.1 * compact.tokens_per_forward
    assert replay("ndjson-order.gbnf", records("spaced")).tokens_per_forward < 1.2
    spaced = replay("ndjson-order-spaced.gbnf", records("spaced"))
    assert spaced.tokens_per_forward >= 2.0
    assert spaced.accepted >= 0.9 * spaced.proposed


def test_the_schema_does_as_well_as_the_tolerant_grammar():
    found = replay("ndjson-order.schema.json", records("spaced"))
    assert found.tokens_per_forward >= 1.8
    assert found.accepted >= 0.9 * found.proposed


def test_prose_is_left_alone():
    found = replay("ndjson-order.gbnf", "The order was shipped on Monday and paid by card. Leave it at the door. " * 5)
    assert (found.proposed, found.forwards) == (0, found.num_tokens - 1)


def feed_rejections(made: GrammarSource, times: int) -> None:
    for _ in range(times):
        made.begin(())
        run(made, "{")
        draft = made.propose(4)
        if draft is not None:
            made.judged(1, 0)


def test_the_seeds_guard_switches_off_for_good_at_32_tokens_below_half():
    lines: list[str] = []
    made = source('root ::= "{" "abcdefghijklmnop"', gate="seed", notice=lines.append)
    feed_rejections(made, 8)
    assert made.counters.proposed == 32
    assert not lines
    run(made, "x")
    feed_rejections(made, 3)
    assert made.counters.proposed == 32
    assert len(lines) == 1
    assert "0% acceptance (0/32)" in lines[0]
    made.commit(TOKENS.encode("x" * 2000))
    feed_rejections(made, 1)
    assert made.counters.proposed == 32
    assert made.report_lines()[0] == "grammar: 0% acceptance (0/32 forced drafts)"


def test_the_sliding_guard_pauses_and_arms_again():
    lines: list[str] = []
    made = source('root ::= "{" "abcdefghijklmnop"', gate="auto", notice=lines.append)
    feed_rejections(made, 60)
    assert "paused" in lines[0]
    proposed = made.counters.proposed
    feed_rejections(made, 5)
    assert made.counters.proposed == proposed
    made.commit([1] * 300)
    feed_rejections(made, 1)
    assert made.counters.proposed > proposed


def test_the_end_line_is_the_seeds():
    made = source(RECORD)
    made.begin(())
    run(made, "{")
    draft = made.propose(24)
    assert draft is not None
    made.judged(len(draft), len(draft))
    count = len(draft)
    assert made.report_lines() == [f"grammar: 100% acceptance ({count}/{count} forced drafts)"]
    assert (made.counters.proposed, made.counters.judged, made.counters.accepted) == (count, count, count)


def test_too_ambiguous_a_grammar_is_switched_off_with_a_line():
    lines: list[str] = []
    made = source('root ::= s\ns ::= s s s | s s | "a" | "b" | "c" | ', notice=lines.append)
    made.begin(())
    rng = random.Random(1)
    for _ in range(400):
        made.commit(TOKENS.encode("".join(rng.choices("abc", k=30))))
        if made.automaton.overflows >= MAX_OVERFLOWS:
            break
    assert made.propose(24) is None
    assert len(lines) == 1
    assert "switched off" in lines[0]
    assert made.report_lines() == lines


def test_any_id_may_be_committed():
    made = source(RECORD)
    made.begin(())
    made.commit([END_ID, 10**6, 0, *TOKENS.encode("{"), 10**6])
    assert drafted(made) == '"id":'


def test_a_library_keeps_what_was_learnt_until_the_file_changes(tmp_path: Path):
    path = tmp_path / "fit.gbnf"
    path.write_text('root ::= "<" ("alpha" | "beta") ">"')
    library = GrammarLibrary(TOKENS, lambda line: None)
    first = library.open(path, gate="always")
    first.begin(())
    for _ in range(4):
        run(first, "<alpha>")
    second = library.open(path, gate="always")
    assert second.counters.proposed == 0
    second.begin(())
    run(second, "<")
    assert drafted(second) == "alpha>"
    path.write_text('root ::= "<" ("alpha" | "gamma") ">"')
    third = library.open(path, gate="always")
    third.begin(())
    run(third, "<")
    assert drafted(third) == ""


def test_a_schema_says_what_it_leaves_out_once(tmp_path: Path):
    path = tmp_path / "fit.json"
    path.write_text('{"type": "array", "uniqueItems": true}')
    lines: list[str] = []
    library = GrammarLibrary(TOKENS, lines.append)
    library.open(path, tag="[SCHEMA]")
    library.open(path, tag="[SCHEMA]")
    assert lines == [f"[SCHEMA] {path}: not used for drafts, left free: uniqueItems (#)"]


def test_the_feature_tells_forced_from_habit():
    made = source('root ::= ("<" ("alpha" | "beta") ">" "\\n")+', end_id=None)
    made.begin(())
    run(made, "<a")
    draft = made.propose(24)
    assert draft == Draft.chain(draft.token_ids if draft else (), "grammar", 2)
    for _ in range(6):
        run(made, "lpha>\n<a")
    run(made, "lpha>\n<")
    draft = made.propose(24)
    assert draft is not None
    assert draft.match_length == 1


def test_habits_forget_rare_places_first_and_fade():
    habits = Habits()
    for _ in range(6):
        habits.observe(-1, (1, 2), 7)
    for site in range(MAX_SITES):
        habits.observe(site, (site, site + 1), 5)
    assert len(habits) <= MAX_SITES + 3
    assert habits.favourite(-1, (1, 2), forced=False) is not None
    for _ in range(200):
        habits.observe(-1, (1, 2), 9)
    found = habits.favourite(-1, (1, 2), forced=False)
    assert found is not None
    assert found[0] == 9
    assert found[1] > 0.9
    for token_id in range(100):
        habits.observe(-2, (1, 2), token_id)
    assert habits.favourite(-3, (1, 2), forced=True) is None
    assert END < 0
