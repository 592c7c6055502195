"""The frozen-corpus pipeline through the command, on every reference model: exact with each source armed."""

import json
import re
from pathlib import Path

import pytest
from containers import FIXTURES, container, expected

SEED_PATTERN = re.compile(r".*\[TOKENS\][0-9 ]*generated:")  # what the pipeline's sed removes
NGEN = 32


def frozen(err: str) -> str:
    """What `sed -n 's/.*\\[TOKENS\\][0-9 ]*generated://p'` prints."""
    return "".join(SEED_PATTERN.sub("", line) + "\n" for line in err.splitlines() if SEED_PATTERN.search(line))


@pytest.mark.parametrize("name", FIXTURES)
def test_reference_ids_with_each_source_armed(coli, monkeypatch, tmp_path, name):
    want, model = expected(name), container(name, "f32")
    prompt = ",".join(map(str, want["prompt_ids"]))
    args = ("run", "--model", model, "--prompt-ids", prompt, "--ngen", NGEN, "--ignore-eos")
    monkeypatch.setenv("TOKENS", "1")
    monkeypatch.setenv("COLI_TEMP", "0")
    plain = coli(*args)
    assert [int(i) for i in frozen(plain.err).split()] == want["greedy_ids"]
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(frozen(plain.err))

    for variables in (
        {"COLI_DRAFT_CORPUS": str(corpus)},
        {"COLI_DRAFT_CORPUS": str(corpus), "COLI_CORPUS_K": "48"},
        {"DRAFT": "8"},
        {"COLI_DRAFT_CORPUS": str(corpus), "COLI_CORPUS_K": "3", "DRAFT": "8"},
    ):
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            done = coli(*args, "--gate", "always", "--json", tmp_path / "report.json")
            assert done.status == 0
            assert frozen(done.err) == frozen(plain.err), variables
            assert done.out == plain.out
            report = json.loads((tmp_path / "report.json").read_text())
            assert report["token_ids"] == want["greedy_ids"]
            if "COLI_DRAFT_CORPUS" in variables:
                counters = report["drafts"]["corpus"]
                assert counters["accepted"] > 20
                line = f"({counters['accepted']}/{counters['proposed']} proposed from {NGEN} frozen ids)"
                assert re.search(rf"corpus drafts: \d+% acceptance {re.escape(line)}", done.err)
                depths = report["drafting"]["accepted_depth"]  # sources that agree are both credited
                assert report["forwards"] == NGEN - 1 - sum(int(depth) * times for depth, times in depths.items())
                assert f"{report['tokens_per_forward']:.2f} tokens/forward" in done.err


@pytest.mark.parametrize("name", ["olmoe-base", "qwen3-base"])
def test_sampled_bytes_are_the_same_with_each_source_armed(coli, tmp_path, name):
    model, corpus = container(name, "q4"), tmp_path / "corpus.txt"
    prompt = ",".join(map(str, expected(name)["prompt_ids"]))
    for seed, chain in enumerate((["--temp", "0.7"], ["--temp", "1.3", "--top-p", "0.9", "--repeat-penalty", "1.2"])):
        args = ["run", "--model", model, "--prompt-ids", prompt, "--ngen", 60, "--ignore-eos", "--tokens"]
        args += [*chain, "--seed", seed, "--gate", "always"]
        plain = coli(*args)
        corpus.write_text(frozen(plain.err))
        for armed in (["--corpus", corpus], ["--draft", 8], ["--corpus", corpus, "--draft", 63, "--corpus-k", 40]):
            done = coli(*args, *armed)
            assert (done.out, frozen(done.err)) == (plain.out, frozen(plain.err)), armed


def test_depth_flags_reach_the_counters(coli, tmp_path):
    model, want = container("olmoe-base", "f32"), expected("olmoe-base")
    corpus: Path = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(map(str, want["greedy_ids"])))
    args = ["run", "--model", model, "--prompt-ids", ",".join(map(str, want["prompt_ids"])), "--ngen", NGEN]
    args += ["--ignore-eos", "--json", "-", "--corpus", corpus, "--gate", "seed"]
    forwards = [json.loads(coli(*args, "--corpus-k", k).out)["forwards"] for k in (1, 2, 4, 8, 16, 48)]
    assert forwards == sorted(forwards, reverse=True)
    assert len(set(forwards)) == 6
    off = json.loads(coli(*args, "--no-drafts").out)
    assert off["forwards"] == NGEN - 1
    assert not any(counters["proposed"] for counters in off["drafts"].values())


@pytest.mark.parametrize(
    ("content", "position"), [("5 6 7\n8 300000 9", "300000"), ("5 6 7 eight 9", "eight"), (None, "directory")]
)
def test_a_corpus_that_cannot_be_is_one_line_and_status_2(coli, tmp_path, content, position):
    corpus = tmp_path / "corpus"
    if content is None:
        corpus.mkdir()
    else:
        corpus.write_text(content)
    done = coli("run", "--model", container("olmoe-base", "f32"), "--raw", "--quiet", "--corpus", corpus, "hi")
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert position in done.err
    assert str(corpus) in done.err
    if content is not None:
        assert str(content.index(position)) in done.err


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_an_absent_or_empty_corpus_is_one_line_and_the_run_goes_on(coli, tmp_path, content):
    corpus = tmp_path / "corpus.txt"
    if content is not None:
        corpus.write_text(content)
    args = ("run", "--model", container("olmoe-base", "f32"), "--raw", "--ngen", 5, "--ignore-eos")
    done = coli(*args, "--corpus", corpus, "hi")
    assert done.status == 0
    assert done.out == coli(*args, "hi").out
    assert len([line for line in done.err.splitlines() if str(corpus) in line]) == 1


def test_the_measured_gate_changes_no_byte_and_says_what_it_did(coli, monkeypatch, tmp_path):
    model, corpus = container("olmoe-base", "q4"), tmp_path / "corpus.txt"
    args = ["run", "--model", model, "--prompt-ids", "5,17,40,3", "--ngen", 120, "--ignore-eos", "--tokens"]
    plain = coli(*args, "--no-drafts")
    corpus.write_text(frozen(plain.err))
    monkeypatch.setenv("COLI_GATE", "auto")
    monkeypatch.setenv("COLI_GATE_FILE", str(tmp_path / "costs" / "gate.json"))
    for _ in range(2):
        done = coli(*args, "--corpus", corpus, "--json", tmp_path / "report.json")
        assert (done.status, done.out, frozen(done.err)) == (0, plain.out, frozen(plain.err))
        assert re.search(r"gate: \d+ forwards drafted, \d+ declined, \d+ probes", done.err)
        assert re.search(r"gate: cost of rows in plain forwards: 1: 1\.00", done.err)
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["settings"]["gate"] == {"value": "auto", "from": "environment COLI_GATE"}
        for name in ("rows", "accepted_depth", "declined", "probes", "costs", "bytes_saved", "bytes_wasted"):
            assert name in report["drafting"]
        assert sum(report["drafting"]["rows"].values()) == report["forwards"]
    assert (tmp_path / "costs" / "gate.json").is_file()
    monkeypatch.setenv("COLI_GATE_FILE", str(corpus))
    refused = coli(*args, "--corpus", corpus)
    assert refused.status == 2
    assert corpus.read_text() == frozen(plain.err)
