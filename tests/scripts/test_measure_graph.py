"""scripts/measure_graph.py builds from text files alone, and measures what is there without building again."""

import importlib.util
import sys
from pathlib import Path

import pytest
from containers import ORACLE

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "measure_graph.py"


def test_text_is_built_and_measured_and_a_graph_is_only_measured(tmp_path: Path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("measure_graph", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "PLACES", 50)
    monkeypatch.setattr(script, "COLD", 2)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one two three, three two one. " * 200)
    (texts / "b.md").write_bytes(b"\xff\xfe not UTF-8")
    (texts / "c.py").write_bytes(b"zero \0 byte")
    (texts / "d.bin").write_text("not a text file")
    model, graph = ORACLE / "olmoe-base", tmp_path / "g.safetensors"
    if not (model / "tokenizer.json").exists():
        pytest.skip("this checkpoint has no tokenizer")
    monkeypatch.setattr(sys, "argv", ["x", str(texts), "--model", str(model), "-o", str(graph)])
    assert script.main() == 0
    first = capsys.readouterr().out
    assert "in 1 files" in first
    assert "bytes per id" in first
    assert script.main() == 0
    again = capsys.readouterr().out
    assert "encoding" not in again
    assert again.count("us |") == 2
