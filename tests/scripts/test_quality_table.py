"""scripts/quality_table.py: the ways of quantizing it compares, the text it judges, and its table."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
from containers import ORACLE

SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import quality_table

    yield quality_table
    for name in ("quality_table", "perplexity"):
        sys.modules.pop(name, None)


def weights() -> np.ndarray:
    w = np.random.default_rng(2).standard_normal((20, 96)).astype(np.float32)
    w[3, 32:64] = 0
    return w


def test_q4_0_is_what_the_gguf_package_dequantizes(table):
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    w = weights()
    nibbles, scales = table.q4_0(w)
    expected = dequantize(quantize(w, GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0)
    ours = (nibbles.astype(np.float32) - 8) * np.repeat(scales.astype(np.float32), 32, axis=1)
    assert np.array_equal(ours, expected)


def test_max7_puts_the_largest_weight_of_a_group_on_seven(table):
    nibbles, scales = table.max7(weights())
    values = np.abs(nibbles.astype(int) - 8).reshape(20, 3, 32).max(axis=2)
    assert np.array_equal(values == 7, scales > 0)
    assert (values[scales == 0] == 0).all()


def test_text_is_unwrapped(table, tmp_path):
    text = "One  line\n   goes on.\n\n\u250c\u2500\u2510\n\nTwo.\n"
    (tmp_path / "a").write_text(text)
    (tmp_path / "b").write_bytes(gzip.compress(text.encode()))
    assert table.plain_text(tmp_path / "a") == table.plain_text(tmp_path / "b") == "One line goes on.\n\nTwo."


def test_the_table_compares_every_way_with_float32_and_keeps_scores(table, tmp_path, monkeypatch, capsys):
    words = " ".join(f"word{i % 7} and the other {i}" for i in range(300))
    (tmp_path / "judged").write_text(words)
    (tmp_path / "other").write_text(words[::-1])
    arguments = [
        "quality_table.py", str(ORACLE / "olmoe-base"), "--text", str(tmp_path / "judged"), "--calibrate",
        str(tmp_path / "other"), "--work", str(tmp_path / "work"), "--tokens", "300", "--window", "64",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    assert table.main() == 0
    first = capsys.readouterr().out
    rows = [line.split(" | ")[0].strip("| ") for line in first.splitlines()[4:]]
    assert rows == list(table.NAMES)
    monkeypatch.setattr(table.perplexity, "losses", None)  # whoever calls it fails
    assert table.main() == 0
    assert capsys.readouterr().out == first
