"""The header of an index is compared with its arrays: damage is found at open, a lie in a check at the latest."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafts.test_index import build, random_documents

from coli.drafts.index_file import ARRAYS, HEADER_BYTES, _seal
from coli.drafts.ngram_index import NgramIndex
from coli.drafts.suffix_order import distinct_contexts
from coli.errors import CorpusError
from coli.tools.index_facts import check_content


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build(tmp_path / "index", random_documents(random.Random(4), 900, 12), max_order=3)
    return tmp_path / "index"


def rewritten(path: Path, change: Callable[[dict[str, Any]], None], *, sealed: bool) -> None:
    """Change what the header says; sealed: as somebody would who wants to be believed."""
    data = path.read_bytes()
    table = json.loads(data[8:HEADER_BYTES])
    notes = table["__metadata__"]
    values = json.loads(notes["index"])
    change(values)
    notes["index"] = json.dumps(values, sort_keys=True)
    if sealed:
        notes["header_digest"] = _seal(notes["index"], {name: table[name]["shape"][0] for name in ARRAYS})
    text = json.dumps(table, separators=(",", ":")).encode()
    path.write_bytes(data[:8] + text.ljust(HEADER_BYTES - 8) + data[HEADER_BYTES:])


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "more ids": (lambda v: v.update(num_ids=v["num_ids"] + 10**9), "num_ids"),
    "fewer ids": (lambda v: v.update(num_ids=0), "num_ids"),
    "negative ids": (lambda v: v.update(num_ids=-5), "num_ids"),
    "documents": (lambda v: v.update(num_documents=v["num_documents"] + 1), "num_documents"),
    "too few orders": (lambda v: v.update(contexts=v["contexts"][:-1]), "number of orders 2, expected 3"),
    "no orders": (lambda v: v.update(contexts=[]), "number of orders 0"),
    "too many contexts": (lambda v: v.update(contexts=[1, 1, 10**12]), "contexts of order 3"),
    "more contexts than ids": (lambda v: v.update(contexts=[41, *v["contexts"][1:]]), "contexts of order 1 41"),
    "negative contexts": (lambda v: v.update(contexts=[1, -1, 1]), "contexts of order 2 -1"),
    "texts as contexts": (lambda v: v.update(contexts=["1", "2", "3"]), "metadata"),
    "negative prune": (lambda v: v.update(prune=-1), "prune -1"),
    "order": (lambda v: v.update(max_order=2), "number of orders"),
    "vocabulary": (lambda v: v.update(vocab_size=39), "array first"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_count_that_cannot_be_is_refused_when_the_file_is_opened(path: Path, name: str):
    change, words = LIES[name]
    rewritten(path, change, sealed=True)
    with pytest.raises(CorpusError, match=words) as caught:
        NgramIndex(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(num_ids=v["num_ids"] - 1),
        lambda v: v.update(contexts=[v["contexts"][0] - 1, *v["contexts"][1:]]),
        lambda v: v.update(contexts=[*v["contexts"][:-1], v["contexts"][-1] - 1]),
    ],
)
def test_a_count_that_could_be_is_damage_at_open_and_a_lie_in_a_check(path: Path, change: Callable[..., None]):
    whole = path.read_bytes()
    rewritten(path, change, sealed=False)
    with pytest.raises(CorpusError, match="damaged: its header"):
        NgramIndex(path)
    path.write_bytes(whole)
    rewritten(path, change, sealed=True)
    with pytest.raises(CorpusError, match="header: "):
        check_content(NgramIndex(path), recount=True)


def test_every_option_in_the_header_is_sealed(path: Path):
    whole = path.read_bytes()
    for change in (
        lambda v: v.update(span_files=True),
        lambda v: v.update(prune=2),
        lambda v: v.update(tokenizer="other"),
        lambda v: v.update(digest="0"),
    ):
        rewritten(path, change, sealed=False)
        with pytest.raises(CorpusError, match="damaged"):
            NgramIndex(path)
        path.write_bytes(whole)
    check_content(NgramIndex(path), recount=True)


def test_only_a_file_that_fits_what_is_counted_is_read_ahead(path: Path, monkeypatch: pytest.MonkeyPatch):
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("nothing here tells how a file is mapped")
    for limit, random_reads in ((1 << 30, False), (0, True)):
        monkeypatch.setattr("coli.drafts.index_file.SEARCHED_BYTES", limit)
        index = NgramIndex(path)
        flags = maps.read_text().split(str(index.path), 1)[1].split("VmFlags:", 1)[1].split("\n", 1)[0].split()
        assert ("rr" in flags) is random_reads
        del index


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 22])
def test_contexts_counted_again_are_those_counted_when_built(path: Path, monkeypatch: pytest.MonkeyPatch, block: int):
    monkeypatch.setattr("coli.drafts.suffix_order.BLOCK_POSITIONS", block)
    index = NgramIndex(path)
    assert tuple(distinct_contexts(index.ids(), index.array("positions"), 3)) == index.header.contexts


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("positions", 2**32 - 1, "positions"),
        ("tokens", 1, "tokens"),
        ("first", 2**40, "first"),
        ("documents.start", 2**40, "documents.start"),
        ("documents.source", 7, "documents.source"),
    ],
)
def test_a_file_made_to_lead_outside_its_arrays_is_refused_by_a_check(path: Path, name: str, value: int, words: str):
    import hashlib

    arrays = NgramIndex(path)
    data = bytearray(path.read_bytes())
    at = HEADER_BYTES
    for other in ARRAYS:
        array = arrays.array(other)
        if other == name:
            last = at + array.nbytes - array.itemsize
            data[last : last + array.itemsize] = value.to_bytes(array.itemsize, "little")
        at += array.nbytes
    path.write_bytes(data)
    digest = hashlib.sha256(data[HEADER_BYTES:]).hexdigest()
    rewritten(path, lambda values: values.update(digest=digest), sealed=True)
    with pytest.raises(CorpusError, match=f"contradicts itself: {words}"):
        check_content(NgramIndex(path))
