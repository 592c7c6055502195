"""`coli demo`: every way gives the same answer, and each shows what it is there to show."""

import json

from coli.cli.demo import COLUMNS, ORDERS


def test_every_way_gives_the_answer_and_shows_what_it_is_there_for(coli, tmp_path):
    done = coli("demo", "--json", tmp_path / "demo.json")
    assert done.status == 0, done.err
    facts = json.loads((tmp_path / "demo.json").read_text())
    assert done.out.startswith(ORDERS)
    assert facts["text"] in done.out
    assert all(set(json.loads(line)) >= {"id", "customer", "total"} for line in facts["text"].splitlines())
    assert all(column in done.out for column in COLUMNS)
    ways = {row["way"]: row for row in facts["rows"]}
    assert all(way in done.out for way in ways)
    plain, small = ways["plain"], ways["10 of 32 experts: plain"]
    assert plain["tokens_per_forward"] < 1.1
    for way in ("grammar", "n-grams", "corpus (this answer, replayed)", "all three"):
        assert ways[way]["forwards"] < 0.8 * plain["forwards"], way
    assert plain["expert_hit_rate"] == 1
    assert small["expert_hit_rate"] < 0.8
    assert small["bytes_per_token"] > 50_000
    assert small["forwards"] == plain["forwards"]


def test_json_alone_on_standard_output(coli):
    done = coli("demo", "--json", "-", "--quiet")
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["prompt"] == ORDERS
