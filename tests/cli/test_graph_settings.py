"""Every SPECULANT variable of a draft changes what the report shows, and nothing of the answer."""

import json
from pathlib import Path

import pytest
from containers import container

NGEN = 40


@pytest.fixture
def graph(coli, tmp_path: Path) -> tuple[list[object], Path]:
    """(arguments of a run, a graph of its answer and of other ids)."""
    args: list[object] = ["run", "--model", container("olmoe-base", "f32"), "--prompt-ids", "5,17,40,3", "--ngen", NGEN]
    args += ["--ignore-eos", "--json", "-", "--gate", "seed", "--seed", 3]
    ids = json.loads(coli(*args).out)["token_ids"]
    other = [ids[(7 * i) % NGEN] for i in range(200)]
    (tmp_path / "ids").write_text(" ".join(map(str, [*ids, -1, *other, -1, *ids[10:], *ids[5:20]])))
    path = tmp_path / "g.safetensors"
    built = coli("graph", "build", tmp_path / "ids", "-o", path, "--model", container("olmoe-base", "f32"))
    assert built.status == 0, built.err
    return [*args, "--graph", path], path


def graph_report(coli, args: list[object]) -> tuple[list[int], dict[str, object], dict[str, object]]:
    """(ids, drafts.graph, settings) of a run."""
    done = coli(*args)
    assert done.status == 0, done.err
    report = json.loads(done.out)
    return report["token_ids"], report["drafts"]["graph"], report["settings"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_each_variable_shows_and_changes_no_byte(coli, monkeypatch, graph, temperature):
    args = [*graph[0], "--temp", temperature]
    ids, usual, _ = graph_report(coli, args)
    assert usual["proposed"] > 20
    assert len(usual["judged_at"]) == len(usual["accepted_at"]) == 5
    assert (usual["strategy"], usual["mix"]) == ("greedy", "attentive")
    for variable, value, setting, shown in (
        ("SPECULANT_DRAFT__K", "9", "graph_k", "judged_at"),
        ("SPECULANT_DRAFT__MAX_ORDER", "1", "graph_order", "orders"),
        ("SPECULANT_DRAFT__STRATEGY", "sampling", "strategy", "strategy"),
        ("SPECULANT_DRAFT__ATTENTIVE_MIX", "false", "mix", "mix"),
        ("SPECULANT_DRAFT__MIX", "witten-bell", "mix", "mean_probability"),
        ("SPECULANT_DRAFT__ORDER_BIAS", "-3", "order_bias", "mean_probability"),
        ("SPECULANT_DRAFT__MIX_TEMPERATURE", "9", "mix_temperature", "mean_probability"),
        ("SPECULANT_DRAFT__RELIABILITY_WEIGHT", "4", "reliability_weight", "mean_probability"),
        ("SPECULANT_DRAFT__ENTROPY_PENALTY", "8", "entropy_penalty", "mean_probability"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            same, now, settings = graph_report(coli, args)
        assert same == ids, variable
        assert now[shown] != usual[shown], variable
        assert settings[setting]["from"] == f"environment {variable}"
    assert len(graph_report(coli, [*args, "--graph-k", 9])[1]["judged_at"]) == 9
    assert set(graph_report(coli, [*args, "--graph-order", 2])[1]["orders"]) <= {"1", "2"}


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("SPECULANT_DRAFT__K", "64", "1 to 63"),
        ("SPECULANT_DRAFT__STRATEGY", "beam", "greedy, sampling"),
        ("SPECULANT_DRAFT__MIX_TEMPERATURE", "0", "excluded"),
        ("SPECULANT_VERIFIER__DEVICE", "cuda", "cpu"),
    ],
)
def test_a_value_that_is_not_allowed_is_one_line_and_status_2(coli, monkeypatch, variable, value, allowed):
    monkeypatch.setenv(variable, value)
    done = coli("run", "--model", container("olmoe-base", "f32"), "--raw", "--ngen", 2, "hi")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert variable in done.err
    assert value in done.err
    assert allowed in done.err


def test_graphs_are_built_as_the_variables_say(coli, monkeypatch, tmp_path):
    model = container("olmoe-base", "f32")
    (tmp_path / "ids").write_text("1 2 3 4 5 6 7 8 9 -1 1 2 3 4 5 6 7 9")
    monkeypatch.setenv("SPECULANT_GRAPH__TOKENIZER_NAME", str(model))
    monkeypatch.setenv("SPECULANT_GRAPH__CHUNK_SIZE", "100")
    for value, flags, order in (("3", [], 3), ("3", ["--max-order", 7], 7), ("", [], 5)):
        monkeypatch.setenv("SPECULANT_GRAPH__MAX_ORDER", value)
        assert coli("graph", "build", tmp_path / "ids", "-o", tmp_path / "g", *flags).status == 0
        assert json.loads(coli("graph", "info", tmp_path / "g", "--json").out)["max_order"] == order
    monkeypatch.setenv("SPECULANT_GRAPH__MAX_ORDER", "11")
    done = coli("graph", "build", tmp_path / "ids", "-o", tmp_path / "h")
    assert done.status == 2
    assert "SPECULANT_GRAPH__MAX_ORDER" in done.err


def test_rejection_is_chosen_by_flag_or_variable_and_goes_without_the_mixed_gate(coli, monkeypatch, graph):
    args = graph[0]
    ids, _, _ = graph_report(coli, args)
    same, judged, settings = graph_report(coli, [*args, "--accept", "rejection"])
    assert (same, settings["accept"]["value"]) == (ids, "rejection")  # temperature 0: one law, one answer
    assert judged["accepted"] > 5
    hot = [*args, "--temp", 1, "--strategy", "sampling", "--accept", "rejection"]
    again = [graph_report(coli, hot)[0] for _ in range(2)]
    assert again[0] == again[1] != graph_report(coli, [*args, "--temp", 1])[0]
    monkeypatch.setenv("COLI_ACCEPT", "rejection")
    done = coli(*args, "--gate", "auto")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "--gate seed" in done.err
    refused = coli("serve", "--model", container("olmoe-base", "f32"))
    assert refused.status == 2
    assert "COLI_ACCEPT" in refused.err
