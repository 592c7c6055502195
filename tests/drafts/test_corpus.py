"""The indexed corpus equals the literal backward scan of semantics 3; its file is checked or politely absent."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from drafts.slow_drafts import SlowCorpus, corpus_lookup

from coli.drafts.base import Draft, PausingGuard
from coli.drafts.corpus import CorpusSource
from coli.drafts.frozen_index import MAX_VOCAB_SIZE, FrozenIndex
from coli.drafts.graph import GraphOptions
from coli.drafts.index_file import Source
from coli.drafts.opening import SourceLibrary, open_sources
from coli.errors import CorpusError
from coli.tools.corpus_shards import Tokens
from coli.tools.index_writer import IndexOptions, write_index


def random_corpus(rng: random.Random, length: int) -> list[int]:
    """Ids with repeats, loops and separators (also doubled, at the ends, and other negative numbers)."""
    vocab_size = rng.choice([1, 2, 4, 40])
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.1:
            ids.extend([-1] * rng.randrange(1, 3))
        elif kind < 0.6 or not ids:
            ids.extend(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 15)))
        else:
            start = rng.randrange(len(ids))
            ids.extend(ids[start : start + rng.randrange(1, 25)])
    return ids[:length]


def random_context(rng: random.Random, corpus: list[int]) -> list[int]:
    """Mostly a piece of the corpus, sometimes changed in one place, sometimes with a longer past."""
    known = [token_id for token_id in corpus if token_id >= 0] or [0]
    start = rng.randrange(len(corpus))
    context = [token_id for token_id in corpus[start : start + rng.randrange(12)] if token_id >= 0]
    if context and rng.random() < 0.4:
        context[rng.randrange(len(context))] = rng.choice([*known, 41, MAX_VOCAB_SIZE + 5])
    return [rng.choice(known) for _ in range(rng.randrange(4))] + context


@pytest.mark.parametrize("seed", range(60))
def test_lookup_equals_the_backward_scan(seed: int):
    rng = random.Random(seed)
    corpus = random_corpus(rng, rng.choice([0, 3, 4, 5, 20, 200]))
    source = CorpusSource(FrozenIndex(np.array(corpus, np.int32)), depth=rng.randrange(1, 49))
    proposed = 0
    for _ in range(60):
        context = random_context(rng, corpus) if corpus else [1, 2, 3, 4]
        split = rng.randrange(len(context) + 1)
        source.begin(context[:split])
        limit = rng.choice([0, 1, 7, 63])
        expected, match_length = corpus_lookup(corpus, context, source._depth)
        proposed += len(expected)
        draft = source.propose(limit, context[split:])
        if expected[:limit]:
            assert draft is not None
            assert (list(draft.token_ids), draft.match_length) == (expected[:limit], match_length)
        else:
            assert draft is None
        assert source.counters.proposed == proposed, "counted before trimming"


@pytest.mark.parametrize("depth", range(1, 49))
def test_a_whole_response_equals_the_slow_source_with_its_guard(depth: int):
    rng = random.Random(depth)
    corpus = random_corpus(rng, 300)
    # a response that follows the corpus for a while, then other near misses: the guard pauses and re-arms
    response: list[int] = []
    while len(response) < 1200:
        start = rng.randrange(len(corpus) - 1)
        length = rng.choice([4, 5, 30])
        response.extend(token_id for token_id in corpus[start : start + length] if token_id >= 0)
    lines: list[str] = []
    min_acceptance = rng.choice([20, 50, 90])
    fast = CorpusSource(
        FrozenIndex(np.array(corpus, np.int32)),
        depth=depth,
        guard=PausingGuard("corpus drafts", lines.append, percent=min_acceptance),
    )
    slow = SlowCorpus(corpus, depth, min_acceptance)
    fast.begin(response[:5])
    slow.begin(response[:5])
    at = 5
    while at < len(response):
        limit = len(response) - at
        draft = fast.propose(limit)
        expected = slow.ask(limit)
        assert list(draft.token_ids if draft else ()) == expected
        accepted = 0
        while accepted < len(expected) and expected[accepted] == response[at + accepted]:
            accepted += 1
        if draft:
            fast.judged(min(accepted + 1, len(expected)), accepted)
        slow.judged(accepted)
        emitted = response[at : at + accepted + 1]
        fast.commit(emitted)
        slow.commit(emitted)
        at += len(emitted)
    assert (fast.counters.proposed, fast.counters.accepted) == (slow.proposed, slow.accepted)
    assert ["re-armed" if "re-armed" in line else "paused" for line in lines] == slow.events


@dataclass
class Settings:
    """What --corpus and its companions say."""

    corpus: Path | None
    corpus_k: int = 8
    corpus_minacc: int = 50
    enabled: bool = True
    draft: int | None = None
    graph: Path | None = None
    grammar: Path | None = None
    schema: Path | None = None
    grammar_draft: int = 24
    gate: str = "seed"
    mtp: bool | None = None


def open_corpus(path: Path, vocab_size: int = 100) -> tuple[CorpusSource | None, list[str]]:
    lines: list[str] = []
    merged = open_sources(Settings(path), vocab_size, lines.append, lambda: "print")
    (source,) = merged.sources or (None,)
    assert source is None or isinstance(source, CorpusSource)
    return source, lines


def test_the_seeds_file_is_loaded_and_reported_in_its_words(tmp_path: Path):
    path = tmp_path / "corpus.txt"
    path.write_text(" 1 2 3 4 5\n6 7 -1\t8 9\r\n-7 +10")
    source, lines = open_corpus(path)
    assert source is not None
    assert lines == [f"corpus drafts: 10 frozen ids from {path}, depth 8"]
    assert source.report_lines() == [], "only if anything was proposed"
    source.begin([1, 2, 3])
    draft = source.propose(63)
    assert draft is not None
    assert draft.token_ids == (4, 5, 6, 7)
    source.judged(4, 3)
    assert source.report_lines() == ["corpus drafts: 75% acceptance (3/4 proposed from 10 frozen ids)"]


@pytest.mark.parametrize(
    ("text", "field", "offset", "shown"),
    [
        ("1 2 x3 4", 3, 4, "'x3'"),
        ("1 2.5", 2, 2, "'2.5'"),
        ("1 2 100", 3, 4, "'100'"),
        ("1\n\n 99999999999999999999999", 2, 4, "'99999999999999999999999'"),
        ("1 2 3-4", 3, 4, "'3-4'"),
        ("1 --2", 2, 2, "'--2'"),
        ("- 1", 1, 0, "'-'"),
        ("1_0", 1, 0, "'1_0'"),
        ("[TOKENS] 3 generated: 1 2 3", 1, 0, "'[TOKENS]'"),
        ("1 -99999999999999999999999 2", 2, 2, "expected a token id"),
        ("1 " + "7" * 30, 2, 2, "'777777777777777777777777'..., outside"),
        ("5 \u0663", 2, 2, "'\\u0663'"),
        ("1 \x00", 2, 2, "'\\x00'"),
    ],
)
def test_a_bad_field_is_named_with_its_number_and_offset(
    tmp_path: Path, text: str, field: int, offset: int, shown: str
):
    path = tmp_path / "corpus.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CorpusError, match=f"field {field} at byte {offset} is ") as caught:
        open_corpus(path)
    assert str(path) in str(caught.value)
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_bad_field_far_into_a_large_file_keeps_its_place(tmp_path: Path):
    path = tmp_path / "corpus.txt"
    good = "123 " * 1_200_000
    path.write_text(good + "x 5")
    with pytest.raises(CorpusError, match=f"field 1200001 at byte {len(good)} is 'x'"):
        open_corpus(path, vocab_size=200)
    path.write_text("7" * 6_000_000)
    with pytest.raises(CorpusError, match="field 1 at byte 0 is '7777"):
        open_corpus(path)
    path.write_text(good)
    source, _ = open_corpus(path, vocab_size=200)
    assert source is not None
    assert source._index.num_ids == 1_200_000


def test_a_library_reads_a_corpus_again_only_when_its_file_changes(tmp_path: Path):
    lines: list[str] = []
    library = SourceLibrary(100, lambda: "print", lines.append)
    settings = Settings(tmp_path / "corpus.txt", corpus_k=2)
    settings.corpus.write_text("1 2 3 4")
    for _ in range(3):
        assert library.sources(settings).sources
    assert lines == [f"corpus drafts: 4 frozen ids from {settings.corpus}, depth 2"]
    settings.corpus.write_text("1 2 3 4 5 6")
    (source,) = library.sources(settings).sources
    assert lines[1:] == [f"corpus drafts: 6 frozen ids from {settings.corpus}, depth 2"]
    assert isinstance(source, CorpusSource)
    assert not library.sources(Settings(settings.corpus, enabled=False, draft=3)).sources
    assert [source.name for source in library.sources(Settings(None, draft=3)).sources] == ["ngram"]


def test_always_leaves_the_guard_out(tmp_path: Path):
    path = tmp_path / "corpus.txt"
    path.write_text("1 2 3 4 5 6 7 8 9")
    for gate, proposals in (("seed", 4), ("always", 20)):
        merged = open_sources(Settings(path, gate=gate), 100, lambda line: None)
        merged.begin([1, 2, 3])
        assert sum(merged.propose(8) is not None for _ in range(20)) == proposals


def test_an_index_is_told_from_text_and_checked_for_its_model(tmp_path: Path):
    path = tmp_path / "corpus.safetensors"
    tokens = Tokens(np.array([1, 2, 3, 4, 5, -1], np.int32), [(0, 0, 0)], [Source("memory", "ids")])
    write_index(path, tokens, IndexOptions(100, "print"))
    source, lines = open_corpus(path)
    assert source is not None
    assert lines == [f"corpus drafts: 5 frozen ids from {path}, depth 8"]
    source.begin([1, 2, 3])
    draft = source.propose(8)
    assert draft is not None
    assert draft.token_ids == (4, 5)
    with pytest.raises(CorpusError, match="another tokenizer"):
        open_sources(Settings(path), 100, lines.append, lambda: "another")


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_a_graph_is_opened_once_and_asked_last(tmp_path: Path, strategy: str):
    path = tmp_path / "graph.safetensors"
    tokens = Tokens(np.array([1, 2, 3, 4, 5, -1], np.int32), [(0, 0, 0)], [Source("memory", "ids")])
    write_index(path, tokens, IndexOptions(100, "print"))
    lines: list[str] = []
    library = SourceLibrary(100, lambda: "print", lines.append)
    for _ in range(2):
        merged = library.sources(Settings(None, draft=3, graph=path), seed=7, graph=GraphOptions(strategy=strategy))
        assert [source.name for source in merged.sources] == ["ngram", "graph"]
        merged.begin([1, 2, 3])
        assert merged.propose(9) == Draft.chain([4, 5], "graph", 3)
    assert lines == [f"graph drafts: 5 ids from {path}, orders 1..5"]
    (tmp_path / "text").write_text("1 2 3 4")
    with pytest.raises(CorpusError, match="not an n-gram index"):
        library.sources(Settings(None, graph=tmp_path / "text"))


def test_a_directory_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match="is a directory"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("text", [None, "", " \n", "-1 -1"])
def test_absent_or_empty_is_one_notice_and_no_source(tmp_path: Path, text: str | None):
    path = tmp_path / "corpus.txt"
    if text is not None:
        path.write_text(text)
    source, lines = open_corpus(path)
    assert source is None
    assert len(lines) == 1
    assert "source off" in lines[0]


def test_unreadable_is_one_notice_and_no_source(tmp_path: Path):
    (tmp_path / "file").write_text("1 2 3 4")
    source, lines = open_corpus(tmp_path / "file" / "corpus.txt")
    assert source is None
    assert len(lines) == 1


def test_a_text_beyond_the_cap_is_refused_before_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coli.drafts.corpus_text.MAX_TEXT_BYTES", 10)
    path = tmp_path / "corpus.txt"
    path.write_text("1 2 3 4 5 6 7 8")
    with pytest.raises(CorpusError, match="coli corpus build"):
        open_corpus(path)
