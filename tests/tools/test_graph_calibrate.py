"""Calibration scores drafts against held-out text and never ends worse than the defaults."""

import random
from pathlib import Path

import pytest
from drafts.slow_index import count_successors, greedy_draft
from drafts.test_index import build, random_documents

from coli.drafts.ngram_index import MIXES, Mixing
from coli.errors import CorpusError
from coli.tools.graph_calibrate import calibrate, places_in, score


def test_a_score_counts_the_ids_that_equal_the_text(tmp_path: Path):
    documents = random_documents(random.Random(1), 1200, 6)
    index = build(tmp_path / "index", documents[3:])
    counts = count_successors(documents[3:], 5)
    unseen = [token_id for document in documents for token_id in document]
    text = [*unseen[:61], -1, *unseen[61:90]]
    places = places_in(text)
    assert 61 not in places
    assert 62 not in places, "behind a separator there is no context"
    lengths = []
    for place in places:
        context = text[max(0, place - 10, 62 if place > 62 else 0) : place]
        guesses = [token_id for token_id, _ in greedy_draft(counts, context, 4, 5, "witten-bell")]
        right = 0
        while right < len(guesses) and place + right < len(text) and guesses[right] == text[place + right]:
            right += 1
        lengths.append(right)
    found = score(index, text, places, Mixing("witten-bell"), 4)
    # equally likely ids may be drafted in another order than the slow twin's
    assert found.length == pytest.approx(sum(lengths) / len(lengths), abs=0.1)


def test_the_best_is_at_least_as_good_as_every_default(tmp_path: Path):
    documents = random_documents(random.Random(2), 2000, 8)
    index = build(tmp_path / "index", documents[:-3])
    text = [token_id for document in documents[-3:] for token_id in [*document, -1]][:200]
    scores = calibrate(index, text, 3)
    assert {entry.mixing.mix for entry in scores} == set(MIXES)
    assert [entry.length for entry in scores] == sorted((entry.length for entry in scores), reverse=True)
    default = score(index, text, places_in(text), Mixing(), 3)
    best = max(entry.length for entry in scores if entry.mixing.mix == "attentive")
    assert best >= default.length


def test_text_without_two_ids_in_a_row_is_refused(tmp_path: Path):
    with pytest.raises(CorpusError, match="too short"):
        calibrate(build(tmp_path / "index", [[1, 2, 3]]), [1, -1, 2], 3)
