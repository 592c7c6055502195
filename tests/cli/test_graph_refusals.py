"""What `coli graph` is asked for and cannot do is one line; links, devices, pipes and histories stay as they are."""

import json
import os
import shutil
from pathlib import Path

import pytest
from containers import container

MODEL = Path(__file__).parent.parent / "oracle" / "olmoe-base"
TEXT = "the party shall pay the other party. " * 30


@pytest.fixture
def graph(coli, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    done = coli("graph", "build", tmp_path / "a.txt", "-o", tmp_path / "g", "--model", MODEL)
    assert done.status == 0, done.err
    return tmp_path / "g"


def refused(done, *words: str) -> None:
    assert (done.status, done.out) == (2, ""), done.err
    assert done.err.count("\n") == 1, done.err
    for word in words:
        assert word in done.err


def test_pruning_everything_away_is_refused_and_leaves_nothing(coli, graph, tmp_path):
    for count in (100_000, 10**30):
        done = coli("graph", "build", tmp_path / "a.txt", "-o", tmp_path / "p", "--model", MODEL, "--prune", count)
        refused(done, f"--prune {count}", "smaller number")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "g"]


def test_a_graph_pruned_to_its_last_pairs_is_a_graph(coli, graph, tmp_path):
    counts = json.loads(coli("graph", "info", graph, "--json", "--why", "the", "--model", MODEL).out)["why"]
    pruned = tmp_path / "p"
    args = (tmp_path / "a.txt", "-o", pruned, "--model", MODEL, "--prune", 60)
    assert coli("graph", "build", *args).status == 0
    facts = json.loads(coli("graph", "info", pruned, "--json", "--check").out)
    assert (facts["prune"], facts["digest_checked"]) == (60, True)
    assert 0 < facts["contexts"]["1"] < json.loads(coli("graph", "info", graph, "--json").out)["contexts"]["1"]
    assert coli("graph", "view", pruned, "-o", tmp_path / "v.html", "--model", MODEL).status == 0
    assert counts["successors"]
    model = container("olmoe-base", "f32")
    for path in (pruned, graph):
        done = coli("run", "--model", model, "--raw", "--ngen", 8, "--graph", path, "--gate", "seed", "the party")
        assert done.status == 0, done.err


def test_adding_and_building_through_a_link_writes_what_it_leads_to(coli, graph, tmp_path):
    real, link = tmp_path / "deep" / "real.graph", tmp_path / "link"
    real.parent.mkdir()
    shutil.copyfile(graph, real)
    real.chmod(0o640)
    link.symlink_to(Path("deep") / "real.graph")
    (tmp_path / "b.txt").write_text("one two three. " * 9)
    assert coli("graph", "add", link, tmp_path / "b.txt", "--model", MODEL).status == 0
    assert link.is_symlink()
    added = real.read_bytes()
    assert added != graph.read_bytes()
    assert real.stat().st_mode & 0o777 == 0o640
    args = (tmp_path / "a.txt", tmp_path / "b.txt", "-o", link, "--model", MODEL)
    assert coli("graph", "build", *args).status == 0
    assert link.is_symlink()
    assert real.read_bytes() == added
    page = tmp_path / "page.html"
    page.symlink_to("deep/page.html")
    assert coli("graph", "view", real, "-o", page, "--model", MODEL).status == 0
    assert page.is_symlink()
    assert sorted(path.name for path in real.parent.iterdir()) == ["page.html", "real.graph"]


def test_a_view_of_nodes_or_weights_that_cannot_be_is_refused(coli, graph, tmp_path):
    values = {
        "--min-weight": ("nan", "inf", "-inf", "-1", "2", "x", ""),
        "--max-nodes": ("0", "-1", "1", "1001", "x", ""),
    }
    for option, wrong in values.items():
        for value in wrong:
            done = coli("graph", "view", graph, "-o", tmp_path / "v.html", "--model", MODEL, f"{option}={value}")
            refused(done, option)
    assert not (tmp_path / "v.html").exists()


def test_a_graph_is_not_built_over_what_it_is_built_of(coli, graph, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text(TEXT)
    refused(coli("graph", "build", folder, "-o", folder / "b.txt", "--model", MODEL), "an input too")
    assert (folder / "b.txt").read_text() == TEXT
    refused(coli("graph", "add", graph, graph, "--model", MODEL), "an input too")


def test_the_size_of_pieces_shows_in_how_often_the_tokenizer_is_asked(coli, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the party\n" * 4000)
    asked = []
    for size in ("1000", "30000"):
        monkeypatch.setenv("SPECULANT_GRAPH__CHUNK_SIZE", size)
        args = (tmp_path / "a.txt", "-o", tmp_path / "g", "--model", MODEL, "--verbose")
        line = coli("graph", "build", *args).err.splitlines()[0]
        assert line.endswith(f"cut at {size}")
        asked.append(int(line.split()[3]))
    assert asked[0] > 5 * asked[1]


def test_pipes_and_devices_are_refused_at_once(coli, graph, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    model = container("olmoe-base", "f32")
    refused(coli("graph", "calibrate", graph, pipe, "--model", MODEL), "pipe or a device")
    refused(coli("graph", "calibrate", pipe, tmp_path / "a.txt", "--model", MODEL), "not a regular file")
    refused(coli("graph", "calibrate", graph, "/dev/zero", "--model", MODEL), "pipe or a device")
    refused(coli("graph", "info", pipe), "not a regular file")
    bench = ("graph", "bench", graph, "--model", model, "--prompts")
    refused(coli(*bench, pipe), "nobody writes to")
    refused(coli(*bench, "/dev/zero"), "no list of prompts")
    refused(coli(*bench, tmp_path), "--prompts")
    (tmp_path / "latin").write_bytes(b"one \xff")
    refused(coli(*bench, tmp_path / "latin"), "not UTF-8 text (byte 4)")
    refused(coli("graph", "bench", pipe, "--model", model, "--prompt", "x"), "not a regular file")


def test_held_out_text_and_prompts_come_through_standard_input_and_written_pipes(coli, graph, tmp_path):
    held = b"the other party shall pay the party. " * 4
    (tmp_path / "held.txt").write_bytes(held)
    wanted = coli("graph", "calibrate", graph, tmp_path / "held.txt", "--model", MODEL).out
    assert wanted
    assert coli("graph", "calibrate", graph, "-", "--model", MODEL, stdin=held).out == wanted
    model = container("olmoe-base", "f32")
    args = ("graph", "bench", graph, "--model", model, "--raw", "--max-tokens", 2, "--rounds", 1, "--json", "--prompts")
    assert json.loads(coli(*args, "-", stdin=b"one\n\ntwo\n").out)["prompts"] == 2
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    held_open = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # what is written stays in the pipe when its writer leaves
    try:
        pipe.write_bytes(b"one\ntwo\nthree\n")
        assert json.loads(coli(*args, pipe).out)["prompts"] == 3
    finally:
        os.close(held_open)


def test_a_benchmark_without_drafts_or_with_other_sources_is_refused(coli, graph, tmp_path):
    bench = ("graph", "bench", graph, "--model", container("olmoe-base", "f32"), "--prompt", "x")
    refused(coli(*bench, "--no-drafts"), "--no-drafts")
    refused(coli(*bench, "--corpus", graph), "--corpus")
    refused(coli(*bench, "--draft", 3), "--draft")
    refused(coli(*bench, "--graph-path", graph), "--graph-path")


def test_a_benchmark_leaves_no_history_beside_the_model(coli, graph, tmp_path, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(container("olmoe-base", "f32"), model)
    for name in ("usage.json", "gate.json"):
        (model / name).unlink(missing_ok=True)
    before = sorted(path.name for path in model.iterdir())
    bench = ("graph", "bench", graph, "--model", model, "--raw", "--max-tokens", 9, "--rounds", 1, "--prompt", "a b")
    assert coli(*bench, "--pin", "off").status == 0
    assert coli(*bench).status == 0
    assert coli("graph", "calibrate", graph, tmp_path / "a.txt", "--model", model).status == 0
    assert sorted(path.name for path in model.iterdir()) == before
    monkeypatch.setenv("USAGE_SAVE", "0")
    assert coli("run", "--model", model, "--raw", "--ngen", 4, "a b").status == 0
    assert sorted(path.name for path in model.iterdir()) == before
