import json
from pathlib import Path

import pytest

MODEL = Path(__file__).parent.parent / "oracle" / "olmoe-base"
TEXT = "the party shall pay the other party. " * 30


@pytest.fixture
def build(coli, tmp_path):
    def call(command: str, *args: object) -> Path:
        target = tmp_path / f"{command}.index"
        done = coli(command, "build", *args, "-o", target, "--model", MODEL)
        assert (done.status, done.out) == (0, ""), done.err
        assert done.err.startswith(f"{target}: ")
        assert done.err.count("\n") == 1
        return target

    return call


def test_a_graph_is_built_of_text_and_shown(coli, build, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    graph = build("graph", tmp_path / "a.txt", "--max-order", 3)
    facts = json.loads(coli("graph", "info", graph, "--json", "--check").out)
    assert facts["num_documents"] == 1
    assert list(facts["contexts"]) == ["1", "2", "3"]
    assert facts["digest_checked"] is True
    lines = coli("graph", "info", graph, "--why", " other part", "--model", MODEL).out
    assert "30 times" in lines
    assert str(tmp_path / "a.txt") in lines
    assert "no suffix" in coli("graph", "info", graph, "--why", "§", "--model", MODEL).out


def test_a_corpus_is_built_of_the_runs_own_log_and_added_to(coli, build, tmp_path):
    (tmp_path / "log").write_text("[PROMPT_TOKENS] 1: 9\n[TOKENS] 5 generated: 1 2 3 4 5\n")
    corpus = build("corpus", tmp_path / "log")
    done = coli("corpus", "add", corpus, "-", "--format", "ids", "--model", MODEL, stdin=b"6 7 8 -1 7 8")
    assert done.status == 0, done.err
    facts = json.loads(coli("corpus", "info", corpus, "--json").out)
    assert (facts["num_ids"], facts["num_documents"], facts["sources"]) == (10, 3, 2)


def test_special_tokens_are_drafted_from_a_corpus_only(coli, build, tmp_path):
    (tmp_path / "ids").write_text("1 2 327 3 4")
    counts = {}
    for command in ("corpus", "graph"):
        counts[command] = json.loads(coli(command, "info", build(command, tmp_path / "ids"), "--json").out)["num_ids"]
    assert counts == {"corpus": 5, "graph": 4}


@pytest.mark.parametrize(
    ("args", "content", "words"),
    [
        (["--max-order", "11"], "a b c", "--max-order 11: expected 1..10"),
        ([], "", "empty"),
        ([], "a\0b", "binary file"),
        ([], "1 2 3 99999", "id 99999 at byte 6 is outside the vocabulary of 330 ids"),
        (["--format", "jsonl"], "{", "line 1 at byte 0 is not JSON"),
    ],
)
def test_bad_input_is_one_line_status_2_and_no_file(coli, tmp_path, args, content, words):
    (tmp_path / "a.txt").write_text(content)
    done = coli("graph", "build", tmp_path / "a.txt", "-o", tmp_path / "g", "--model", MODEL, *args)
    assert (done.status, done.out) == (2, "")
    assert words in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "g").exists()


def test_what_is_no_index_is_refused(coli, tmp_path):
    (tmp_path / "graph.pkl").write_bytes(b"\x80\x04\x95abc")
    for name, words in (("graph.pkl", "a pickle"), ("absent", "cannot be read"), (".", "cannot be read")):
        done = coli("graph", "info", tmp_path / name)
        assert (done.status, done.out) == (2, "")
        assert words in done.err
        assert done.err.count("\n") == 1


def test_a_graph_is_drawn_and_calibrated(coli, build, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT + "<b>bold</b>")
    (tmp_path / "held.txt").write_text("the other party shall pay the party. " * 4)
    graph = build("graph", tmp_path / "a.txt")
    before = graph.read_bytes()
    for target, words in ((graph, "an input too"), ("/dev/null", "pipe or a device")):
        refused = coli("graph", "view", graph, "-o", target, "--model", MODEL)
        assert refused.status == 2
        assert words in refused.err
    assert graph.read_bytes() == before
    done = coli("graph", "view", graph, "-o", tmp_path / "view.html", "--max-nodes", 20, "--model", MODEL)
    assert done.status == 0, done.err
    page = (tmp_path / "view.html").read_text()
    assert f"{page.count('<circle') - 2} nodes" in done.err
    assert "<b>" not in page
    done = coli("graph", "calibrate", graph, tmp_path / "held.txt", "--model", MODEL, "--json")
    scores = json.loads(done.out)["scores"]
    assert scores[0]["accepted_length"] == max(score["accepted_length"] for score in scores)
    assert coli("graph", "calibrate", graph, tmp_path / "held.txt", "--model", MODEL).out.startswith(scores[0]["mix"])


def test_a_damaged_graph_is_one_line_in_every_command_that_shows_it(coli, build, tmp_path):
    from safetensors import safe_open

    (tmp_path / "a.txt").write_text(TEXT)
    graph = build("graph", tmp_path / "a.txt")
    with safe_open(graph, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in ("positions", "sources")}
    whole = graph.read_bytes()
    for name, commands in (
        ("positions", (("view", graph, "-o", tmp_path / "v.html"), ("info", graph, "--why", "the party"))),
        ("sources", (("view", graph, "-o", tmp_path / "v.html"), ("info", graph), ("info", graph, "--check"))),
    ):
        content = arrays[name].tobytes()
        assert whole.count(content) == 1
        graph.write_bytes(whole.replace(content, b"\x80" * len(content)))
        for command in commands:
            done = coli("graph", *command, "--model", MODEL)
            assert done.status == 2, (name, command, done.err)
            assert str(graph) in done.err
            assert "internal error" not in done.err
    assert not (tmp_path / "v.html").exists()
