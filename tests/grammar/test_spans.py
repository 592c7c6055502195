"""Tokens of a span always spell a beginning of it, stop before what a longer token could take, and whole characters."""

import random

import pytest
from grammar.reference import LETTERS
from grammar.toy_tokenizers import GreedyTokenizer, bpe_tokenizer

from coli.grammar.spans import SpanEncoder, Vocabulary, ends_inside_character

ANYTHING = (1 << 256) - 1


def spell(tokenizer, ids) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


def random_tokenizer(rng: random.Random) -> GreedyTokenizer:
    pieces = ["".join(rng.choices(LETTERS, k=rng.randint(1, 4))).encode() for _ in range(rng.randint(0, 40))]
    cut = [piece[: rng.randint(1, len(piece))] for piece in pieces]
    return GreedyTokenizer([*pieces, *cut], ["<end>"])


@pytest.mark.parametrize("chunk", range(10))
def test_tokens_spell_a_beginning_of_the_span_whatever_the_vocabulary(chunk: int):
    for seed in range(chunk * 100, chunk * 100 + 100):
        rng = random.Random(seed)
        tokenizer = random_tokenizer(rng)
        encoder = SpanEncoder(tokenizer)
        text = "".join(rng.choices(LETTERS, k=rng.randint(1, 12))).encode()
        cut = rng.randint(0, len(text) - 1)
        context = tokenizer.encode(text.decode())[: rng.randint(0, 5)] if rng.random() < 0.3 else []
        if not context and cut:
            context = list(text[:cut])  # single bytes, possibly ending inside a character
        span = text[cut:] if rng.random() < 0.9 else text[cut:-1] or text[cut:]
        follow = rng.choice((0, ANYTHING, 1 << ord("a"), rng.getrandbits(256)))
        ids = encoder.encode(context, span, follow)
        spelled = spell(tokenizer, ids)
        assert span.startswith(spelled)
        assert not ids or not ends_inside_character(spell(tokenizer, context) + spelled)
        assert not tokenizer.special_ids.intersection(ids)
        tails = [spell(tokenizer, ids[start:]) for start in range(len(ids))]
        if spelled == span:
            entries = [tokenizer.token_bytes(token_id) for token_id in range(256, tokenizer.vocab_size - 1)]
            absorbing = [
                entry
                for entry in entries
                for tail in tails[-8:]
                if entry.startswith(tail) and len(entry) > len(tail) and follow >> entry[len(tail)] & 1
            ]
            assert not absorbing


def test_the_tail_a_longer_token_could_absorb_is_held_back():
    tokenizer = GreedyTokenizer([b'"id', b'":', b'": ', b'":1'])
    encoder = SpanEncoder(tokenizer)
    span = b'"id":'
    assert spell(tokenizer, encoder.encode([], span, 1 << ord("x"))) == b'"id":'
    assert spell(tokenizer, encoder.encode([], span, 1 << ord(" "))) == b'"id'
    assert spell(tokenizer, encoder.encode([], span, 1 << ord("1"))) == b'"id'
    assert spell(tokenizer, encoder.encode([], span, 0)) == b'"id":'


def test_special_tokens_absorb_nothing():
    tokenizer = GreedyTokenizer([], ["<end>"])
    assert spell(tokenizer, SpanEncoder(tokenizer).encode([], b"a<", 1 << ord("e"))) == b"a<"


def test_left_context_decides_the_spelling():
    tokenizer = bpe_tokenizer()
    encoder = SpanEncoder(tokenizer)
    whole = tokenizer.encode('{"id":1,"customer":"')
    for cut in range(1, len(whole)):
        rest = spell(tokenizer, whole[cut:])
        assert list(encoder.encode(whole[:cut], rest, 0)) == whole[cut:]


def test_a_context_token_that_would_swallow_the_span_is_not_respelled():
    tokenizer = GreedyTokenizer([b'{"', b'"id'])
    ids = SpanEncoder(tokenizer).encode([ord("{")], b'"id', 0)
    assert spell(tokenizer, ids) == b'"id'


def test_a_prefix_space_added_by_the_tokenizer_is_seen_through():
    class Spaced(GreedyTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(" " + text)

    tokenizer = Spaced([b" {", b"ab"])
    assert spell(tokenizer, SpanEncoder(tokenizer).encode([ord("{")], b"ab", 0)) == b"ab"


def test_a_tokenizer_that_changes_text_drafts_nothing():
    class Lower(GreedyTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.lower())

    assert SpanEncoder(Lower([])).encode([], b"ABC", 0) == ()


def test_special_context_is_left_out():
    tokenizer = GreedyTokenizer([], ["<|user|>"])
    seen = []
    original = tokenizer.encode
    tokenizer.encode = lambda text: seen.append(text) or original(text)
    SpanEncoder(tokenizer).encode([next(iter(tokenizer.special_ids)), ord("{")], b"ab", 0)
    assert seen == ["{ab"]


def test_bytes_that_are_no_text_end_the_span():
    tokenizer = GreedyTokenizer([])
    assert spell(tokenizer, SpanEncoder(tokenizer).encode([], b"ab\xff\xfe", 0)) == b"ab"
    assert SpanEncoder(tokenizer).encode([], b"\xff", 0) == ()
    assert spell(tokenizer, SpanEncoder(tokenizer).encode([], "aé".encode()[:-1], 0)) == b"a"


def test_characters_begun_in_the_context_are_finished():
    tokenizer = GreedyTokenizer([])
    smile = "😀".encode()
    assert spell(tokenizer, SpanEncoder(tokenizer).encode(list(smile[:2]), smile[2:] + b"a", 0)) == smile[2:] + b"a"


def test_next_bytes_equal_a_scan_of_the_vocabulary():
    rng = random.Random(3)
    for _ in range(30):
        tokenizer = random_tokenizer(rng)
        vocabulary = Vocabulary(tokenizer)
        entries = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size - 1)]
        for prefix in {entry[: rng.randint(0, len(entry))] for entry in entries}:
            expected = 0
            for entry in entries:
                if entry.startswith(prefix) and len(entry) > len(prefix):
                    expected |= 1 << entry[len(prefix)]
            assert vocabulary.next_bytes(prefix) == expected


@pytest.mark.parametrize("text", ["a", "é", "€", "😀", "aé€😀"])
def test_ends_inside_character(text: str):
    data = text.encode()
    assert not ends_inside_character(data)
    last = len(text[-1].encode())
    for missing in range(1, last):
        assert ends_inside_character(data[:-missing])
    assert not ends_inside_character(b"")
