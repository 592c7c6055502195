"""The model inside the package, through the command line."""

import json

import pytest

from coli.builtin import DEMO_MODEL, is_builtin

ORDER = "order 1042 by Anna Keller over 49.90 is paid, high priority."


def test_an_order_in_words_becomes_its_record(coli):
    done = coli("run", "--ngen", 120, ORDER)
    assert done.status == 0
    record = json.loads(done.out)
    assert (record["id"], record["customer"], record["total"]) == (1042, "Anna Keller", 49.9)


def test_nothing_is_written_into_the_package(coli):
    before = sorted(path.name for path in DEMO_MODEL.iterdir())
    assert coli("run", "--ngen", 20, ORDER).status == 0
    assert coli("run", "--ngen", 20, "--gate", "auto", "--draft", 4, ORDER).status == 0
    assert sorted(path.name for path in DEMO_MODEL.iterdir()) == before
    assert "usage.json" not in before


def test_a_history_that_is_asked_for_is_written(coli, monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_USAGE", str(tmp_path / "usage.json"))
    assert coli("run", "--ngen", 20, ORDER).status == 0
    assert (tmp_path / "usage.json").exists()


@pytest.mark.parametrize("command", ["run", "info"])
def test_a_named_model_beats_it(coli, monkeypatch, tmp_path, command):
    monkeypatch.setenv("COLI_MODEL", str(tmp_path))
    done = coli(command, *(["x"] if command == "run" else []))
    assert done.status == 2
    assert str(tmp_path) in done.err


def test_info_describes_it(coli):
    facts = json.loads(coli("info", "--json").out)
    assert facts["model_type"] == "qwen3_moe"
    assert facts["num_experts"] > facts["num_experts_per_tok"] > 1


def test_only_its_own_folder_counts_as_built_in(tmp_path):
    assert is_builtin(DEMO_MODEL)
    (tmp_path / "link").symlink_to(DEMO_MODEL)
    assert is_builtin(tmp_path / "link")
    assert not is_builtin(tmp_path)
