"""`coli graph bench` prints the graph tool's figures, and they add up."""

import json
import re
from pathlib import Path

import pytest
from containers import container

PROMPTS = ["one two three", "three two one"]


@pytest.fixture
def graph(coli, tmp_path: Path) -> list[object]:
    """Arguments of a benchmark of a graph made of the answers."""
    model = container("olmoe-base", "f32")
    for at, prompt in enumerate(PROMPTS):
        done = coli("run", "--model", model, "--raw", "--ngen", 40, "--ignore-eos", "--json", "-", prompt)
        (tmp_path / f"{at}.ids").write_text(" ".join(map(str, json.loads(done.out)["token_ids"])))
    names = [str(tmp_path / f"{at}.ids") for at in range(len(PROMPTS))]
    assert coli("graph", "build", *names, "--format", "ids", "-o", tmp_path / "g", "--model", model).status == 0
    (tmp_path / "prompts").write_text("\n\n".join(PROMPTS) + "\n")
    args = ["graph", "bench", tmp_path / "g", "--model", model, "--raw", "--prompts", tmp_path / "prompts"]
    return [*args, "--ignore-eos", "--max-tokens", 40, "--rounds", 1, "--gate", "seed"]


def test_the_figures_of_the_graph_tool_are_printed(coli, graph):
    done = coli(*graph)
    assert done.status == 0, done.err
    assert re.search(r"Native decoding:\n  Time: \d+\.\d\ds\n  Tokens/sec: \d+\.\d\d\n", done.out)
    assert re.search(r"Speculative decoding:\n  Time: \d+\.\d\ds\n  Tokens/sec: \d+\.\d\d\n", done.out)
    assert re.search(
        r"  Draft acceptance rate: \d+\.\d\d%\n  Position 0 acceptance: \d+/\d+ \(\d+\.\d\d%\)\n", done.out
    )
    assert re.search(r"Speedup: \d+\.\d\dx .*native decoding \(2 prompts, 1 rounds, the same answers\)", done.out)
    assert done.out.count("Reading the prompts, apart: ") == 2


@pytest.mark.parametrize("extra", [[], ["--temp", 1, "--strategy", "sampling"], ["--temp", 1, "--accept", "rejection"]])
def test_the_numbers_add_up(coli, graph, extra):
    facts = json.loads(coli(*graph, "--graph-k", 3, "--json", *extra).out)
    native, drafted = facts["native"], facts["speculative"]
    assert (facts["prompts"], facts["rounds"]) == (2, 1)
    assert native["tokens"] == drafted["tokens"] == 78
    assert native["forwards"] == 78
    assert native["judged_at"] == []
    assert len(drafted["judged_at"]) == 3
    assert sum(drafted["accepted_at"]) == 78 - drafted["forwards"]
    assert drafted["judged_at"] == sorted(drafted["judged_at"], reverse=True)
    assert facts["identical"] or "rejection" in extra
    if not extra:
        assert drafted["forwards"] < 40
        assert facts["speedup"] == pytest.approx(drafted["tokens_per_s"] / native["tokens_per_s"], rel=0.01)


def test_without_a_graph_or_prompts_it_says_so(coli, graph, tmp_path):
    assert "give the graph" in coli("graph", "bench", "--model", container("olmoe-base", "f32")).err
    (tmp_path / "empty").write_text("\n \n")
    done = coli(*graph[:3], "--model", container("olmoe-base", "f32"), "--prompts", tmp_path / "empty")
    assert done.status == 2
    assert "no prompt" in done.err
