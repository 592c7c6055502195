"""The n-gram index equals dictionaries of counts, whatever the ids and blocks, and refuses files that are not one."""

import random
from pathlib import Path

import numpy as np
import pytest
from drafts.slow_drafts import corpus_lookup
from drafts.slow_index import count_successors, greedy_draft, mixture, runs

from coli.drafts import suffix_order
from coli.drafts.corpus import CorpusSource
from coli.drafts.index_file import DEPTH, HEADER_BYTES, Source, unpacked_ids
from coli.drafts.ngram_index import MIXES, Mixing, NgramIndex
from coli.errors import CorpusError
from coli.tools.corpus_shards import Tokens
from coli.tools.index_writer import IndexOptions, write_index


def random_documents(rng: random.Random, length: int, vocab_size: int) -> list[list[int]]:
    """Documents with repeats of every scale, some of them of one id only."""
    ids: list[int] = []
    documents: list[list[int]] = [[]]
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.1:
            documents.append([])
            continue
        if kind < 0.6 or len(ids) < 2:
            piece = [min(int(rng.expovariate(0.3)), vocab_size - 1) for _ in range(rng.randrange(1, 30))]
        else:
            start = rng.randrange(len(ids))
            piece = ids[start : start + rng.randrange(1, 40)]
        ids += piece
        documents[-1] += piece
    return [document for document in documents if document]


def tokens_of(documents: list[list[int]]) -> Tokens:
    ids: list[int] = []
    starts = []
    for document in documents:
        starts.append((len(ids), 0, 7 * len(ids)))
        ids += [*document, -1]
    return Tokens(np.array(ids, np.int32), starts, [Source("memory", "ids")])


def build(path: Path, documents: list[list[int]], vocab_size: int = 40, **options: int | bool) -> NgramIndex:
    write_index(path, tokens_of(documents), IndexOptions(vocab_size, "print", **options))  # type: ignore[arg-type]
    return NgramIndex.open(path, vocab_size=vocab_size, tokenizer="print")


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many blocks":
        monkeypatch.setattr(suffix_order.sorted_blocks, "__defaults__", (0, 50))


def test_long_runs_of_equal_contexts_are_found_to_their_end(tmp_path: Path):
    rng = random.Random(8)
    documents = [[1, 2, 3] * 900 + [rng.randrange(6) for _ in range(50)], [2, 2] * 700 + [4], [3, 1, 2] * 300]
    index = build(tmp_path / "index", documents, vocab_size=6)
    for context, counts in count_successors(documents, 5).items():
        assert index.count(context) == sum(counts.values())


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("seed", range(8))
def test_counts_equal_brute_force_for_orders_1_to_10(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    documents = random_documents(rng, rng.choice([3, 60, 700]), rng.choice([2, 5, 39]))
    documents.append([1, 1])
    index = build(tmp_path / "index", documents)
    counts = count_successors(documents, DEPTH)
    for context, found in counts.items():
        assert index.count(context) == sum(found.values())
        assert index.successors(context) == found
    for _ in range(200):
        context = tuple(rng.randrange(40) for _ in range(rng.randrange(1, DEPTH + 1)))
        assert index.count(context) == sum(counts.get(context, {}).values())
    assert index.header.contexts == tuple(sum(len(c) == order for c in counts) for order in range(1, 6))
    assert index.count([40]) == index.count([-1]) == 0


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(3))
def test_laws_and_drafts_equal_the_written_out_mixture(tmp_path: Path, seed: int, mix: str):
    rng = random.Random(seed)
    vocab_size = [20, 700, 2000][seed]
    documents = random_documents(rng, 4000, 20)
    # contexts that are heavy, with more successors than are kept
    documents += [[3, rng.randrange(vocab_size)] for _ in range(1500)] + [[5, 3, 2], [4, 4]] * 200
    index = build(tmp_path / "index", documents, vocab_size, max_order=5)
    assert len(index.array("heavy.keys")) > 3
    counts = count_successors(documents, 5)
    text = [token_id for document in documents for token_id in document]
    for max_order in (1, 3, 5):
        for _ in range(60):
            start = rng.randrange(len(text))
            context = text[start : start + rng.randrange(1, 9)]
            if rng.random() < 0.2:
                context = [*context, rng.randrange(vocab_size), 3]
            ids, chances = index.law(context, Mixing(mix), max_order)
            expected = mixture(counts, context, max_order, mix)
            assert dict(zip(ids.tolist(), chances.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)
            drafted, probabilities, orders = index.draft(context, 6, Mixing(mix), max_order)
            slow = greedy_draft(counts, context, 6, max_order, mix)
            assert len(drafted) == len(slow)
            # equal up to rounding: the likeliest id, not necessarily the same of two equally likely ones
            assert probabilities[:1] == pytest.approx([chance for _, chance in slow][:1], rel=1e-6)
            if drafted:
                assert expected[drafted[0]] == pytest.approx(probabilities[0], rel=1e-6)
                assert 1 <= orders[0] <= max_order


def test_knobs_of_the_mixture_are_the_written_out_ones(tmp_path: Path):
    rng = random.Random(3)
    documents = random_documents(rng, 1000, 12)
    index = build(tmp_path / "index", documents)
    counts = count_successors(documents, 5)
    for knobs in ((0.5, 1.0, 1.0, 0.5), (2.0, 0.5, 0.0, 0.0), (1.0, 2.0, 3.0, 4.0)):
        for start in range(0, 400, 7):
            context = documents[0][start % 20 : start % 20 + 6] or [1]
            ids, chances = index.law(context, Mixing("attentive", *knobs))
            expected = mixture(counts, context, 5, "attentive", *knobs)
            assert dict(zip(ids.tolist(), chances.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)


def test_equal_evidence_gives_the_weights_the_seed_prints(tmp_path: Path):
    # five contexts with the same counts, each order followed by an id of its own half of the time
    counts = {tuple(range(5 - order, 5)): {10 + order: 1, 20 + order: 1} for order in range(1, 6)}
    law = mixture(counts, range(5), 5, "attentive", entropy_penalty=0.0)  # type: ignore[arg-type]
    assert [round(200 * law[10 + order], 1) for order in (5, 4, 3, 2, 1)] == [63.6, 23.4, 8.6, 3.2, 1.2]


@pytest.mark.parametrize("seed", range(12))
def test_as_a_corpus_it_equals_the_backward_scan_over_its_documents(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    documents = random_documents(rng, rng.choice([5, 100, 900]), rng.choice([2, 5, 39]))
    documents.append([1, 2])
    frozen = tokens_of(documents).ids.tolist()
    source = CorpusSource(build(tmp_path / "index", documents), depth=rng.randrange(1, 49))
    text = [token_id for document in documents for token_id in document]
    for _ in range(150):
        start = rng.randrange(len(text))
        context = text[start : start + rng.randrange(12)]
        if context and rng.random() < 0.4:
            context[rng.randrange(len(context))] = rng.randrange(42)
        source.begin(context)
        expected, match_length = corpus_lookup(frozen, context, source._depth)
        draft = source.propose(63)
        if expected:
            assert draft is not None
            assert (list(draft.token_ids), draft.match_length) == (expected, match_length)
        else:
            assert draft is None


def test_documents_are_apart_unless_spanning_is_asked_for(tmp_path: Path):
    documents = [[1, 2], [3, 4], [2, 3]]
    apart = build(tmp_path / "apart", documents)
    spanning = build(tmp_path / "spanning", documents, span_files=True)
    assert (apart.count([2, 3]), apart.count([1, 2])) == (0, 0)
    assert spanning.successors([2, 3]) == {4: 1}
    assert spanning.successors([1, 2]) == {3: 1}
    assert [spanning.place(DEPTH + i).document_offset for i in range(6)] == [0, 0, 21, 21, 42, 42]
    assert [apart.place(DEPTH + i).document_offset for i in (0, 1, 3, 4, 6, 7)] == [0, 0, 21, 21, 42, 42]


def test_pruning_leaves_out_rare_pairs_at_every_order(tmp_path: Path):
    rng = random.Random(1)
    documents = random_documents(rng, 800, 30)
    index = build(tmp_path / "index", documents, prune=3)
    counts = count_successors(documents, 4)
    for context, found in counts.items():
        kept = {token_id: n for token_id, n in found.items() if counts[context[-1:]][token_id] >= 3}
        assert index.successors(context) == kept


def test_the_same_ids_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    documents = random_documents(random.Random(2), 900, 9)
    build(tmp_path / "one", documents)
    monkeypatch.setattr(suffix_order.sorted_blocks, "__defaults__", (0, 30))
    build(tmp_path / "two", documents)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_an_index_is_plain_safetensors(tmp_path: Path):
    from safetensors.numpy import load_file

    index = build(tmp_path / "index", [[1, 2, 3]])
    arrays = load_file(tmp_path / "index")
    assert runs(unpacked_ids(arrays["tokens"]).tolist()) == [[1, 2, 3]]
    assert index.ids().tolist() == unpacked_ids(arrays["tokens"]).tolist()
    assert sorted(arrays["positions"].tolist()) == [DEPTH + 1, DEPTH + 2]
    assert all(array.ctypes.data % array.itemsize == 0 for array in map(index.array, arrays))


def broken(path: Path, change: str) -> None:
    data = bytearray(path.read_bytes())
    text = data[8:HEADER_BYTES]
    if change == "truncated":
        data = data[:-1]
    elif change == "cut in the header":
        data = data[:5000]
    elif change == "longer":
        data += b"x"
    elif change == "other version":
        data[8:HEADER_BYTES] = text.replace(b'"version":"3"', b'"version":"2"')
    elif change == "other format":
        data[8:HEADER_BYTES] = text.replace(b"n-gram index", b"n-gram-index")
    elif change == "shorter array":
        data[8:HEADER_BYTES] = text.replace(b'"shape":[41]', b'"shape":[40]')
    elif change == "other dtype":
        data[8:HEADER_BYTES] = text.replace(b'"dtype":"F32"', b'"dtype":"I32"')
    elif change == "order 11":
        data[8:HEADER_BYTES] = text.replace(b'max_order\\": 5', b'max_order\\":11')
    elif change == "wrong field":
        data[8:HEADER_BYTES] = text.replace(b'\\"prune\\": 0', b'\\"prune\\":{}')
    elif change == "no JSON":
        data[8:10] = b"{{"
    elif change == "pickle":
        data = bytearray(b"\x80\x04\x95" + bytes(100))
    elif change == "text":
        data = bytearray(b"1 2 3 4 5 6 7 8")
    elif change == "empty":
        data = bytearray()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("truncated", "cut short"),
        ("cut in the header", "header cut short"),
        ("longer", "too long"),
        ("other version", "version '2', this coli reads 3"),
        ("other format", "format"),
        ("shorter array", "array first"),
        ("other dtype", "array heavy.entropy"),
        ("order 11", "order 11"),
        ("wrong field", "metadata"),
        ("no JSON", "no n-gram index"),
        ("pickle", "pickle"),
        ("text", "not an n-gram index"),
        ("empty", "not an n-gram index"),
    ],
)
def test_a_file_that_is_no_whole_index_is_refused_in_one_line(tmp_path: Path, change: str, words: str):
    path = tmp_path / "index"
    build(path, [[1, 2, 3]] * 300)
    before = path.read_bytes()
    broken(path, change)
    assert path.read_bytes() != before
    with pytest.raises(CorpusError, match=words) as caught:
        NgramIndex(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_index_of_another_model_is_refused(tmp_path: Path):
    path = tmp_path / "index"
    build(path, [[1, 2, 3]])
    with pytest.raises(CorpusError, match="another tokenizer"):
        NgramIndex.open(path, vocab_size=40, tokenizer="other")
    with pytest.raises(CorpusError, match="40 ids, the model has 39"):
        NgramIndex.open(path, vocab_size=39, tokenizer="print")
    with pytest.raises(CorpusError, match="cannot be read"):
        NgramIndex(tmp_path / "absent")


@pytest.mark.parametrize("seed", range(6))
def test_damage_inside_the_arrays_gives_wrong_drafts_but_never_a_wrong_access(tmp_path: Path, seed: int):
    path = tmp_path / "index"
    rng = random.Random(seed)
    build(path, random_documents(rng, 3000, 6))
    data = bytearray(path.read_bytes())
    for _ in range(len(data) // 20):
        data[rng.randrange(HEADER_BYTES, len(data) - 20)] = rng.choice([0, 127, 128, 255, rng.randrange(256)])
    path.write_bytes(data)
    index = NgramIndex(path)
    for _ in range(300):
        context = [rng.randrange(7) for _ in range(rng.randrange(1, 9))]
        for mix in MIXES:
            index.draft(context, 8, Mixing(mix))
        found = index.continuation(context, 8)
        assert found is None or len(found[0]) <= 8
