"""Id files read in bulk: the same runs, offsets and errors as looking at one field after the other."""

import io
import random
import re

import pytest

from coli.errors import CorpusError
from coli.tools import corpus_inputs
from coli.tools.corpus_inputs import IDS, Input

SOURCE = Input("ids", IDS, 0, 0)
FIELDS = ("5", "99", "7", "0", "-1", "-20", "12")
ODD = ("-0", "+5", "100", "x", "--1", "1-", "0" * 23 + "1", "007")


def field_by_field(data: bytes) -> tuple[list[tuple[int, list[int]]], int | None]:
    """(offset, ids) of every run, and the byte of the first field that is no id below 100."""
    runs: list[tuple[int, list[int]]] = []
    open_run = False
    for match in re.finditer(rb"[^ \t\n\r\v\f]+", data):
        if not re.fullmatch(rb"[+-]?[0-9]{1,18}", match.group()) or int(match.group()) >= 100:
            return (runs[:-1] if open_run else runs), match.start()
        if int(match.group()) < 0:
            open_run = False
            continue
        if not open_run:
            runs.append((match.start(), []))
            open_run = True
        runs[-1][1].append(int(match.group()))
    return runs, None


@pytest.mark.parametrize("seed", range(40))
def test_bulk_reading_equals_field_by_field(monkeypatch: pytest.MonkeyPatch, seed: int):
    rng = random.Random(seed)
    for _ in range(25):
        monkeypatch.setattr(corpus_inputs, "PIECE_BYTES", rng.choice([30, 50, 1000]))
        fields = rng.choices(FIELDS + (ODD if rng.random() < 0.3 else ()), k=rng.randrange(30))
        data = "".join(field + rng.choice([" ", "\n", "  ", "\t", "\r\n"]) for field in fields).encode()
        expected, bad = field_by_field(data)
        found: list[tuple[int, list[int]]] = []
        said = ""
        try:
            for document in corpus_inputs._id_runs(io.BytesIO(data), SOURCE, 100, 0):
                assert document.ids is not None
                found.append((document.offset, document.ids.tolist()))
        except CorpusError as error:
            said = str(error)
        assert (f"at byte {bad}" in said) if bad is not None else not said
        assert found == expected
