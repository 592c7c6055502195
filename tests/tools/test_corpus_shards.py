"""A large input is kept in stretches: the same ids wherever it is cut, and a killed build goes on inside it."""

import io
import json
import sys
from pathlib import Path

import pytest
from tools.test_corpus_build import TEXT as LONG_TEXT
from tools.test_corpus_build import GluedEncoder, WordEncoder, make

from coli.drafts.ngram_index import NgramIndex
from coli.errors import CorpusError, OptionError
from coli.tools import corpus_shards
from coli.tools.corpus_build import BuildOptions, build_index
from coli.tools.corpus_inputs import find_inputs
from coli.tools.corpus_shards import Reading, Tokens, tokenize, work_folder
from coli.tools.index_facts import why

TEXT = LONG_TEXT[:5000]
IDS = " -1 ".join(" ".join(str((7 * i + j) % 50) for j in range(i % 40)) for i in range(60))
LOG = "".join(f"line {i}\n[TOKENS] 3 generated: {i} 2 3 [TOKENS] 1 generated: {i % 9}\n" for i in range(70))
CONTENTS = {
    "a.txt": TEXT,
    "bom.txt": "\ufeff" + TEXT,
    "b.jsonl": "".join(json.dumps({"text": TEXT[i * 40 : i * 40 + 200]}) + "\n\n" for i in range(60)),
    "ids": IDS,
    "log": LOG,
}


def tokens(tmp_path: Path, name: str, encoder: WordEncoder, piece_chars: int | None = None) -> tuple[Tokens, int]:
    """(ids, how many shards were kept)."""
    target = tmp_path / "g"
    inputs = find_inputs([str(tmp_path / name)], None)
    found = tokenize(inputs, target, Reading(encoder, 5000, piece_chars=piece_chars))
    count = len(list(work_folder(target).glob("*.json")))
    corpus_shards.remove_work_folder(target)
    return found, count


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("encoder_type", [WordEncoder, GluedEncoder])
def test_ids_and_documents_do_not_depend_on_where_an_input_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, encoder_type: type[WordEncoder]
):
    (tmp_path / name).write_text(CONTENTS[name], encoding="utf-8")
    encoder = encoder_type()
    whole, count = tokens(tmp_path, name, encoder)
    assert count == 1
    for shard_bytes, piece_chars in ((1, 200), (300, 100), (2000, 900), (2001, 10_000)):
        monkeypatch.setattr(corpus_shards, "SHARD_BYTES", shard_bytes)
        cut, count = tokens(tmp_path, name, encoder, piece_chars)
        assert cut.ids.tolist() == whole.ids.tolist()
        assert (cut.documents, cut.sources) == (whole.documents, whole.sources)
        if shard_bytes == 300 and encoder_type is WordEncoder:
            assert count > 5


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl"])
def test_a_build_goes_on_inside_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(corpus_shards, "SHARD_BYTES", 2000)
    (tmp_path / name).write_text(CONTENTS[name])
    encoder = WordEncoder()
    expected, _ = make(tmp_path, [tmp_path / name], encoder, piece_chars=500)
    data = expected.path.read_bytes()
    expected.path.unlink()
    stop_at, all_calls = encoder.calls // 2, encoder.calls

    class Tired(WordEncoder):
        def encode(self, text: str, special: bool = False) -> list[int]:
            if self.calls == stop_at:
                raise KeyboardInterrupt
            return super().encode(text, special)

    tired = Tired()
    tired.words = encoder.words
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, [tmp_path / name], tired, piece_chars=500)
    encoder.calls = 0
    index, _ = make(tmp_path, [tmp_path / name], encoder, piece_chars=500)
    assert 0 < encoder.calls < 0.7 * all_calls
    assert index.path.read_bytes() == data


def test_progress_moves_inside_an_input_and_errors_name_its_own_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_shards, "SHARD_BYTES", 1000)
    path = tmp_path / "b.jsonl"
    path.write_text(CONTENTS["b.jsonl"])
    seen: list[tuple[str, int, int]] = []
    target = tmp_path / "g"
    build_index([str(path)], target, WordEncoder(), 5000, BuildOptions(), lambda *step: seen.append(step))
    reading = [done for what, done, _ in seen if what == "reading"]
    assert reading == sorted(reading)
    assert len(reading) > 10
    assert reading[-1] == path.stat().st_size
    path.write_text(CONTENTS["b.jsonl"] + "{")
    with pytest.raises(CorpusError, match=f"line 121 at byte {len(CONTENTS['b.jsonl'])} is not JSON"):
        build_index([str(path)], target, WordEncoder(), 5000, BuildOptions())


def test_standard_input_is_read_to_its_end_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_shards, "SHARD_BYTES", 100)
    encoder = WordEncoder()
    whole = encoder.encode(TEXT)

    class Stdin:
        buffer = io.BytesIO(TEXT.encode())

    monkeypatch.setattr(sys, "stdin", Stdin())
    index, _ = make(tmp_path, ["-"], encoder, piece_chars=100)
    assert index.header.num_ids == len(whole)
    assert index.sources == [("(standard input)", "text")]


def test_what_somebody_else_keeps_under_our_names_stays(tmp_path: Path):
    folder, mine = tmp_path / "out.graph.partial", tmp_path / "out.graph.tmp"
    folder.mkdir()
    (folder / "notes.txt").write_text(TEXT)
    mine.write_text(TEXT)
    index, _ = make(tmp_path, [folder])
    assert index.header.num_documents == 1
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    mine.write_text(TEXT)
    with pytest.raises(OptionError, match=r"out\.graph\.tmp: is an input too"):
        make(tmp_path, [mine])
    assert mine.read_text() == TEXT


def test_places_are_the_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_shards, "SHARD_BYTES", 50)
    (tmp_path / "bom.txt").write_text("\ufeffthe cat sat on a mat.\nthe cat sat on a hat", encoding="utf-8")
    (tmp_path / "named.text").write_text('{"text": "x"}\n{"text": "the dog ran"}\n')
    (tmp_path / "ids").write_text("1 2 3 -1 40 41 42")
    encoder = WordEncoder()
    index, _ = make(tmp_path, [tmp_path / "bom.txt"], encoder, piece_chars=10)
    data = (tmp_path / "bom.txt").read_bytes()
    _, _, reasons = why(index, [encoder.words[" a"]], encoder)
    for reason in reasons:
        text = encoder.token_bytes(reason.token_id)
        assert (reason.exact, data[reason.offset : reason.offset + len(text)]) == (True, text)
    index, _ = make(tmp_path, [tmp_path / "named.text"], encoder, kind="jsonl")
    _, _, (reason,) = why(index, [encoder.words[" dog"]], encoder)
    assert (reason.exact, reason.offset) == (False, 14)
    index, _ = make(tmp_path, [tmp_path / "ids"], encoder)
    assert isinstance(index, NgramIndex)
    _, _, (reason,) = why(index, [41], encoder)
    assert (reason.exact, reason.offset) == (False, 9)
