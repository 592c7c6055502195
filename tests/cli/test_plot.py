"""--plot of bench and replay: bars in a terminal, pictures where matplotlib is there, refusals before the work."""

import importlib.util
import json

import pytest

from coli.cli.charts import bar

PROMPT = "order 4102 by Anna Keller over 49.90 is paid, high priority."
QUICK = ("--no-probe", "-r", "1", "-t", "1", "--quiet", "--no-warmup")
NEEDS_MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


@pytest.fixture
def trace(coli, tmp_path):
    assert coli("trace", "-o", tmp_path / "t.trace", "--ngen", 20, PROMPT).status == 0
    return tmp_path / "t.trace"


def test_replay_draws_hits_and_bytes_by_budget_behind_its_table(coli, trace):
    plain = coli("replay", trace, "--policies", "lru,belady", "--budgets", "20%,100%").out
    drawn = coli("replay", trace, "--policies", "lru,belady", "--budgets", "20%,100%", "--plot", "-").out
    assert drawn.startswith(plain)
    assert "hit rate of decode unions" in drawn.removeprefix(plain)
    assert "read per token" in drawn.removeprefix(plain)
    assert "█" in drawn


def test_bench_draws_speeds_and_what_rows_cost(coli):
    done = coli("bench", *QUICK, "-p", 8, "-n", 4, "--rows", "1,4", "--plot", "-")
    assert done.status == 0, done.err
    for words in ("pp8", "tg4", "vr4", "cost of rows, in forwards of one row"):
        assert words in done.out
    assert coli("bench", *QUICK, "-p", 8, "-n", 0, "--plot", "-").out.count("cost of rows") == 0


def test_rows_are_a_forward_each_and_leave_nothing(coli):
    done = coli("bench", *QUICK, "-p", 0, "-n", 0, "-d", 5, "--rows", "1,64", "-o", "json")
    assert done.status == 0, done.err
    one, many = json.loads(done.out)
    assert (one["n_rows"], many["n_rows"], many["n_depth"]) == (1, 64, 5)
    for result in (one, many):
        assert result["avg_ts"] == pytest.approx(8 * result["n_rows"] / result["avg_ns"] * 1e9, rel=1e-6)
    assert coli("bench", *QUICK, "--rows", "65").status == 2


@NEEDS_MATPLOTLIB
@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_pictures_are_whole_files_of_their_kind(coli, trace, tmp_path, name, start):
    done = coli("replay", trace, "--policies", "lru,slru", "--plot", tmp_path / name)
    assert done.status == 0, done.err
    assert (tmp_path / name).read_bytes().startswith(start)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@NEEDS_MATPLOTLIB
def test_a_bench_makes_a_picture_too(coli, tmp_path):
    done = coli("bench", *QUICK, "-p", 8, "-n", 4, "--rows", "1,2", "--plot", tmp_path / "b.svg", "--json")
    assert done.status == 0, done.err
    assert len(json.loads(done.out)) == 4
    assert "cost of rows" in (tmp_path / "b.svg").read_text()


def test_what_cannot_be_drawn_is_refused_first(coli, tmp_path, monkeypatch):
    assert "expected a name ending in" in coli("bench", "--plot", tmp_path / "a.gif").err
    assert "no such folder" in coli("bench", "--plot", tmp_path / "no" / "a.svg").err
    assert "leave out -o" in coli("bench", "--plot", "-", "--json").err
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    done = coli("bench", "--plot", tmp_path / "a.svg")
    assert done.status == 2
    assert "pip install 'coli[plot]'" in done.err


def test_bars_are_as_long_as_their_share():
    assert [len(bar(share)) for share in (0, 0.5, 1, 2)] == [0, 25, 50, 50]
    assert bar(0.51) == "█" * 25 + "▌"
