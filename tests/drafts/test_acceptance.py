"""Acceptance estimates: priors, refinement by match length and depth, forgetting."""

from coli.drafts.acceptance import PRIORS, Acceptance


def test_before_anything_is_seen_the_priors_hold():
    assert Acceptance().probability("corpus", 2, 0) == PRIORS["corpus"]
    assert Acceptance().probability("grammar", 9, 0) == PRIORS["grammar"]
    longer = [Acceptance().probability("ngram", length, 0) for length in (2, 3, 8, 32)]
    assert longer == sorted(longer)
    assert longer[-1] < 0.95
    assert 0 < Acceptance().probability("a new source", 0, 60) < 1


def test_lengths_and_depths_are_told_apart_and_unseen_ones_follow_the_source():
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.add("corpus", 3, 0, False)
        acceptance.add("corpus", 8, 0, True)
        acceptance.add("corpus", 8, 9, False)
    assert acceptance.probability("corpus", 3, 0) < 0.1
    assert acceptance.probability("corpus", 8, 0) > 0.85
    assert acceptance.probability("corpus", 8, 30) < 0.15
    assert 0.2 < acceptance.probability("corpus", 5, 0) < 0.5
    assert acceptance.probability("ngram", 2, 0) == PRIORS["ngram"]


def test_what_changed_is_noticed_within_some_dozens_of_tokens():
    acceptance = Acceptance()
    for _ in range(1000):
        acceptance.add("ngram", 4, 0, True)
    for _ in range(80):
        acceptance.add("ngram", 4, 0, False)
    assert acceptance.probability("ngram", 4, 0) < 0.35


def test_the_table_has_one_estimate_per_source():
    acceptance = Acceptance()
    acceptance.add("ngram", 2, 0, True)
    acceptance.add("graph", 3, 1, False)
    assert set(acceptance.table()) == {"ngram", "graph"}
