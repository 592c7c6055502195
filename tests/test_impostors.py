"""Pipes under a file's name: read where somebody writes, refused where nobody does, never waited for."""

import os
import threading
import time
from pathlib import Path

import pytest

from coli.drafts.corpus_text import load_corpus_text
from coli.errors import GrammarError
from coli.grammar.load import load_grammar
from coli.impostors import open_input


@pytest.fixture
def fifo(tmp_path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_nobody_writes_to_is_refused_at_once(fifo):
    with pytest.raises(OSError, match="a pipe nobody writes to"):
        open_input(fifo, 100)


@pytest.mark.parametrize("delay", [0.0, 0.1])
@pytest.mark.parametrize("data", [b"abc", b"x" * 200_000])
def test_a_pipe_with_a_writer_is_read_to_its_end(data, delay):
    reader, writer = os.pipe()

    def write() -> None:
        time.sleep(delay)
        with os.fdopen(writer, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with open_input(Path(f"/proc/self/fd/{reader}"), 1 << 20) as file:
            assert file.read() == data
    finally:
        thread.join()
        os.close(reader)


def test_no_more_than_the_cap_is_read():
    reader, writer = os.pipe()
    os.write(writer, b"x" * 5000)
    with open_input(Path(f"/proc/self/fd/{reader}"), 1000) as file:
        assert len(file.read()) == 1000
    os.close(writer)
    os.close(reader)


def test_grammars_and_corpora_do_not_wait(fifo):
    with pytest.raises(GrammarError, match="a pipe nobody writes to"):
        load_grammar(fifo)
    notices: list[str] = []
    assert load_corpus_text(fifo, 100, notices.append) is None
    assert "a pipe nobody writes to, source off" in notices[0]


def test_a_name_that_is_too_long_is_like_an_absent_corpus(tmp_path):
    notices: list[str] = []
    assert load_corpus_text(tmp_path / ("x" * 300), 100, notices.append) is None
    assert "File name too long, source off" in notices[0]


def test_utf_16_is_named(tmp_path):
    path = tmp_path / "g.gbnf"
    path.write_bytes('root ::= "a"'.encode("utf-16"))
    with pytest.raises(GrammarError, match="UTF-16 text; save it as UTF-8"):
        load_grammar(path)
