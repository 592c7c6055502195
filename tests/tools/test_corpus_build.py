"""From files to an index: the same counts however the text is cut, one line for what is wrong, nothing half-written."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from drafts.slow_index import count_successors

from coli.drafts.ngram_index import NgramIndex
from coli.errors import ColiError, CorpusError, OptionError, WriteError
from coli.tools import corpus_shards, index_writer
from coli.tools.corpus_build import BuildOptions, add_to_index, build_index
from coli.tools.corpus_encoding import encoded
from coli.tools.corpus_inputs import find_inputs
from coli.tools.corpus_shards import work_folder
from coli.tools.index_facts import check_content, index_facts, why


class WordEncoder:
    """Words with the space before them, runs of white space and single other characters; ids by first appearance."""

    fingerprint = "words"

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.calls = 0

    @property
    def vocab_size(self) -> int:
        return 5000

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.calls += 1
        pieces = re.findall(r" ?\w+|\s+(?!\S)|\s+|[^\w\s]", text)
        return [self.words.setdefault(piece, len(self.words)) for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return next(word for word, number in self.words.items() if number == token_id).encode()


class GluedEncoder(WordEncoder):
    """A tokenizer that does not cut at line ends: a line and the next line's first letter are one piece."""

    fingerprint = "glued"

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.calls += 1
        return [self.words.setdefault(piece, len(self.words)) for piece in re.findall(r"\w*\s+\w|\w+|.", text)]


TEXT = "".join(
    f"line {i % 7} of the contract, party {i % 3} shall pay.\n" + ("\n\n  indented\n" if i % 5 == 0 else "")
    for i in range(400)
)


def make(tmp_path: Path, names: Sequence[Path | str], encoder: WordEncoder | None = None, **options: object):
    target = tmp_path / "out.graph"
    encoder = encoder or WordEncoder()
    build_index([str(name) for name in names], target, encoder, 5000, BuildOptions(**options))  # type: ignore[arg-type]
    return NgramIndex.open(target, vocab_size=5000, tokenizer=encoder.fingerprint), encoder


@pytest.mark.parametrize("encoder_type", [WordEncoder, GluedEncoder])
@pytest.mark.parametrize("size", [1, 37, 100, 1000, 10_000])
def test_pieces_of_any_size_give_the_ids_of_the_whole(encoder_type: type[WordEncoder], size: int):
    whole = encoder_type()
    expected = whole.encode(TEXT)
    cut = encoder_type()
    cut.words = dict(whole.words)
    for chunks in ([TEXT], [TEXT[i : i + 97] for i in range(0, len(TEXT), 97)]):
        got = [token_id for ids, _ in encoded(chunks, cut, size) for token_id in ids]
        assert got == expected


def test_long_text_is_encoded_in_pieces():
    encoder = WordEncoder()
    assert len(list(encoded([TEXT], encoder, 1000))) > 10


def test_counts_do_not_depend_on_files_pieces_or_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    parts = [TEXT[: len(TEXT) // 3], TEXT[len(TEXT) // 3 :]]
    (folder / "a.txt").write_text(parts[0])
    (folder / "deep" / "b.md").write_text(parts[1])
    (folder / "c.py").write_text("not read")
    files: dict[str, bytes] = {}
    for name, shard_bytes, piece_chars in (("one", 1 << 30, None), ("two", 1, 100), ("three", 1, 10_000)):
        monkeypatch.setattr(corpus_shards, "SHARD_BYTES", shard_bytes)
        index, encoder = make(tmp_path, [folder], piece_chars=piece_chars)
        files[name] = index.path.read_bytes()
    assert files["one"] == files["two"] == files["three"]
    documents = [encoder.encode(part) for part in parts]
    for context, found in list(count_successors(documents, 4).items())[::7]:
        assert index.successors(context) == found
    assert index.header.num_documents == 2
    assert not work_folder(index.path).exists()


def test_max_order_1_over_two_files_counts_pairs_of_each(tmp_path: Path):
    (tmp_path / "1.txt").write_text("a b a b")
    (tmp_path / "2.txt").write_text(" a b a")
    for chars in (100, 10_000):
        index, encoder = make(tmp_path, [tmp_path / "1.txt", tmp_path / "2.txt"], max_order=1, piece_chars=chars)
        a, b, first = encoder.words[" a"], encoder.words[" b"], encoder.words["a"]
        assert index.header.contexts == (3,)
        assert (index.successors([a]), index.successors([b])) == ({b: 2}, {a: 2})
        assert index.successors([first]) == {b: 1}


def test_spanning_files_joins_them(tmp_path: Path):
    (tmp_path / "1.txt").write_text("a b")
    (tmp_path / "2.txt").write_text("c d")
    index, encoder = make(tmp_path, [tmp_path / "1.txt", tmp_path / "2.txt"], span_files=True)
    assert index.count([encoder.words[" b"]]) == 1
    index, encoder = make(tmp_path, [tmp_path / "1.txt", tmp_path / "2.txt"])
    assert index.count([encoder.words[" b"]]) == 0


def test_json_lines_ids_and_logs_are_read_as_what_they_are(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "x y z"}\n\n{"text": "y z"}\n')
    index, encoder = make(tmp_path, [tmp_path / "a.jsonl"])
    assert index.count([encoder.words[" y"]]) == 1
    assert index.header.num_documents == 2
    (tmp_path / "ids").write_text("1 2 3 -1 2 3 4\n-1\n")
    index, _ = make(tmp_path, [tmp_path / "ids"])
    assert index.successors([2]) == {3: 2}
    assert index.count([3, 4]) == index.count([4]) == 0
    (tmp_path / "log").write_text(
        "noise\n[PROMPT_TOKENS] 2: 7 8\n[TOKENS] 3 generated: 1 2 3\nmore\n[TOKENS] 1 generated: 4\n"
    )
    index, _ = make(tmp_path, [tmp_path / "log"])
    assert index.successors([1, 2]) == {3: 1}
    assert (index.count([7]), index.header.num_ids) == (0, 4)


def test_banned_ids_are_never_drafted_and_cut_the_text(tmp_path: Path):
    (tmp_path / "ids").write_text("1 2 9 3 4 9")
    index, _ = make(tmp_path, [tmp_path / "ids"], banned=frozenset({9}))
    assert index.successors([1]) == {2: 1}
    assert index.count([2]) == index.count([9]) == 0
    assert index.successors([3]) == {4: 1}


@pytest.mark.parametrize("span_files", [False, True])
@pytest.mark.parametrize("prune", [0, 2])
def test_adding_equals_one_build_of_everything(tmp_path: Path, span_files: bool, prune: int):
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text(TEXT[number * 900 : number * 900 + 1000 + number])
    encoder = WordEncoder()
    whole, _ = make(tmp_path, paths, encoder, span_files=span_files, prune=prune, max_order=3)
    expected = whole.path.read_bytes()
    index, _ = make(tmp_path, paths[:1], encoder, span_files=span_files, prune=prune, max_order=3)
    for path in paths[1:]:
        add_to_index([str(path)], index.path, encoder, 5000, BuildOptions())
    if prune:
        grown = NgramIndex(index.path)
        assert grown.header.num_ids == whole.header.num_ids
    assert index.path.read_bytes() == expected


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("a.txt", b"", CorpusError, "empty"),
        ("a.txt", b"ab\x00c", CorpusError, "byte 2: a binary file"),
        ("a.txt", b"abc \xff def", CorpusError, "not UTF-8 text at byte 4"),
        ("a.txt", b"a" * (1 << 20) + b"\xc3", CorpusError, "not UTF-8 text at byte 1048576"),
        ("a.txt", b"one", CorpusError, "nothing to index"),
        ("a.jsonl", b'{"text": "a b"}\n{"text": 3}\n', CorpusError, "line 2 at byte 16: expected an object with text"),
        ("a.jsonl", b'{"text": "a b"}\n{"tex', CorpusError, "line 2 at byte 16 is not JSON"),
        ("a.txt", b"1 2 3 5000", CorpusError, "id 5000 at byte 6 is outside the vocabulary of 5000"),
        ("a.txt", b"[TOKENS] 2 generated: 1 7777", CorpusError, "id 7777 at byte 24"),
    ],
)
def test_what_is_wrong_with_an_input_is_one_line_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes, error: type[ColiError], words: str
):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        make(tmp_path, [tmp_path / "in" / name])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.graph").exists()
    assert not (tmp_path / "out.graph.tmp").exists()
    assert not (tmp_path / "out.graph.partial").exists()


def test_names_that_lead_nowhere_are_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name, words in (("absent", "no such file"), ("empty", r"no .txt, .md or .jsonl"), ("*.zip", "no such file")):
        with pytest.raises(OptionError, match=words):
            find_inputs([str(tmp_path / name)], None)
    with pytest.raises(OptionError, match="max-order 11"):
        make(tmp_path, ["x"], max_order=11)
    with pytest.raises(OptionError, match="is a folder"):
        build_index(["x"], tmp_path, WordEncoder(), 5000, BuildOptions())
    with pytest.raises(OptionError, match="does not exist"):
        build_index(["x"], tmp_path / "no" / "out", WordEncoder(), 5000, BuildOptions())


def test_globs_find_files_in_a_stable_order(tmp_path: Path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text("x")
    found = find_inputs([str(tmp_path / "*.txt"), str(tmp_path / "c.md")], None)
    assert [Path(source.path).name for source in found] == ["a.txt", "b.txt", "c.md"]


def test_a_full_disk_is_one_line_and_the_old_index_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    index, encoder = make(tmp_path, [path])
    before = index.path.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_writer, "heavy_contexts", full)
    with pytest.raises(WriteError, match="disk full"):
        make(tmp_path, [path], encoder)
    assert index.path.read_bytes() == before
    assert not (tmp_path / "out.graph.tmp").exists()
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="disk full"):
        make(tmp_path, [path], encoder)
    assert index.path.read_bytes() == before


def test_an_interrupted_build_encodes_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus_shards, "SHARD_BYTES", 1)
    paths = [tmp_path / f"{number}.txt" for number in range(4)]
    for path in paths:
        path.write_text(TEXT)
    encoder = WordEncoder()
    expected, _ = make(tmp_path, paths, encoder)
    data = expected.path.read_bytes()
    expected.path.unlink()

    class Tired(WordEncoder):
        def encode(self, text: str, special: bool = False) -> list[int]:
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().encode(text, special)

    tired = Tired()
    tired.words = encoder.words
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, paths, tired)
    assert not expected.path.exists()
    paths[1].write_text(TEXT)  # changed, as far as its time goes
    os.utime(paths[1], ns=(1, 1))
    encoder.calls = 0
    index, _ = make(tmp_path, paths, encoder)
    assert encoder.calls == 3
    assert index.path.read_bytes() == data


def test_a_killed_build_leaves_no_index_and_can_be_repeated(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT * 10)
    script = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from tools.test_corpus_build import WordEncoder, BuildOptions, build_index\n"
        "from pathlib import Path\n"
        "say = lambda what, done, total: print(what, flush=True)\n"
        "build_index([sys.argv[1]], Path(sys.argv[2]), WordEncoder(), 5000, BuildOptions(), say)\n"
    )
    target = tmp_path / "out.graph"
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", script, str(tmp_path / "a.txt"), str(target), root]
    for last_words in ("reading", "sorting", "writing"):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == last_words:
                    break
            process.send_signal(signal.SIGKILL)
        if target.exists():  # it was quicker than the signal
            check_content(NgramIndex(target))
            target.unlink()
    index, _ = make(tmp_path, [tmp_path / "a.txt"])
    check_content(index)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.graph"]


def test_facts_and_reasons_name_counts_sizes_and_places(tmp_path: Path):
    (tmp_path / "a.txt").write_text("the cat sat. the cat ran. the cat sat")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": "the dog sat"}\n')
    index, encoder = make(tmp_path, [tmp_path / "a.txt", tmp_path / "b.jsonl"])
    facts = json.loads(json.dumps(index_facts(index)))
    assert (facts["num_ids"], facts["num_documents"], facts["sources"]) == (15, 3, 2)
    assert facts["contexts"]["1"] == 7
    assert facts["bytes"] == index.path.stat().st_size
    context = [encoder.words[word] for word in (" the", " cat")]
    order, occurrences, reasons = why(index, [7, *context], encoder)
    assert (order, occurrences) == (2, 2)
    assert {(encoder.token_bytes(r.token_id), r.count, Path(r.source).name, r.offset) for r in reasons} == {
        (b" ran", 1, "a.txt", 20),
        (b" sat", 1, "a.txt", 33),
    }
    _, _, (reason,) = why(index, [encoder.words["the"], encoder.words[" dog"]], encoder)
    assert (Path(reason.source).name, reason.offset) == ("b.jsonl", 14)
    assert why(index, [4999], encoder) == (0, 0, [])


def test_the_digest_finds_damage_that_the_header_does_not_show(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    index, _ = make(tmp_path, [tmp_path / "a.txt"])
    check_content(index)
    data = bytearray(index.path.read_bytes())
    data[70_000] ^= 1
    index.path.write_bytes(data)
    with pytest.raises(CorpusError, match="damaged"):
        check_content(NgramIndex(index.path))


def test_what_would_be_lost_is_refused(tmp_path: Path):
    text, pipe = tmp_path / "a.txt", tmp_path / "pipe"
    text.write_bytes(b"one two three four")
    os.mkfifo(pipe)
    with pytest.raises(OptionError, match="pipe or a device; give a file, or -"):
        find_inputs([str(pipe)], None)
    for target, words in ((pipe, "pipe or a device"), (text, "an input too")):
        with pytest.raises(OptionError, match=words):
            build_index([str(text)], target, WordEncoder(), 5000, BuildOptions())
    assert text.read_bytes() == b"one two three four"


def test_a_damaged_index_is_not_added_to(tmp_path: Path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"one two three four five six seven")
    index, encoder = make(tmp_path, [text])
    data = bytearray(index.path.read_bytes())
    data[-1] ^= 1
    index.path.write_bytes(data)
    with pytest.raises(CorpusError):
        add_to_index([str(text)], index.path, encoder, 5000, BuildOptions())
    assert index.path.read_bytes() == data
