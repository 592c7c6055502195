"""The graph source drafts what its index says, with the target's own noise when it samples, and counts by position."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from drafts.slow_index import count_successors, greedy_draft, mixture
from drafts.test_index import build, random_documents
from numpy.typing import NDArray

from coli.drafts.graph import GraphOptions, GraphSource
from coli.drafts.merge import MergedSources
from coli.drafts.ngram_index import Mixing


def noise_of(seed: int):
    def noise(position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        uniforms = np.array([random.Random(f"{seed} {position} {token_id}").random() for token_id in ids.tolist()])
        return -np.log(-np.log(np.maximum(uniforms, 1e-12)))

    return noise


def test_greedy_drafts_continue_the_context_and_its_extension(tmp_path: Path):
    documents = random_documents(random.Random(4), 1500, 15)
    index = build(tmp_path / "index", documents)
    counts = count_successors(documents, 5)
    source = GraphSource(index, GraphOptions(k=6))
    source.begin(documents[0][:3])
    source.commit(documents[0][3:9])
    for extension in ([], documents[0][9:12]):
        draft = source.propose(63, extension)
        slow = greedy_draft(counts, [*documents[0][:9], *extension], 6, 5, "attentive")
        assert draft is not None
        assert len(draft) == len(slow)
        assert draft.token_ids[0] == slow[0][0]
        assert draft.match_length == 5
        assert draft.source == "graph"
    assert source.counters.proposed == 12


def test_the_limit_and_an_unknown_context_are_respected(tmp_path: Path):
    source = GraphSource(build(tmp_path / "index", [[1, 2, 3, 1, 2, 3, 1]]), GraphOptions(k=5))
    source.begin([1, 2])
    draft = source.propose(2)
    assert draft is not None
    assert draft.token_ids == (3, 1)
    assert source.propose(0) is None
    source.begin([9])
    assert source.propose(5) is None
    source.begin([])
    assert source.propose(5) is None
    assert source.counters.proposed == 2


def test_a_dead_end_gives_a_partial_draft(tmp_path: Path):
    source = GraphSource(build(tmp_path / "index", [[1, 2, 3, 4]]), GraphOptions(k=5))
    source.begin([7, 1])
    draft = source.propose(63)
    assert draft is not None
    assert draft.token_ids == (2, 3, 4)


@pytest.mark.parametrize("mix", ["attentive", "single", "witten-bell"])
def test_sampling_draws_from_the_mixture_with_the_noise_of_each_position(tmp_path: Path, mix: str):
    documents = random_documents(random.Random(5), 600, 6)
    counts = count_successors(documents, 3)
    options = GraphOptions(k=3, strategy="sampling", mixing=Mixing(mix), max_order=3)
    index = build(tmp_path / "index", documents)
    context = documents[0][:4]
    law = mixture(counts, context, 3, mix)
    drawn: Counter[int] = Counter()
    for seed in range(600):
        noise = noise_of(seed)
        source = GraphSource(index, options, noise=noise)
        source.begin(context)
        draft = source.propose(63)
        assert draft is not None
        drawn[draft.token_ids[0]] += 1
        growing = list(context)
        for token_id, (ids, chances) in zip(draft.token_ids, source.laws, strict=True):
            expected = mixture(counts, growing, 3, mix)
            assert dict(zip(ids.tolist(), chances.tolist(), strict=True)) == pytest.approx(expected, rel=1e-6)
            noisy = np.log(chances) + noise(len(growing), ids)
            assert token_id == ids[np.argmax(noisy)]
            growing.append(token_id)
    statistic = sum((drawn[token_id] - 600 * p) ** 2 / (600 * p) for token_id, p in law.items())
    assert statistic < 3 * len(law) + 15  # chi-square far beyond its mean


def test_acceptance_is_counted_by_position(tmp_path: Path):
    source = GraphSource(build(tmp_path / "index", [[1, 2, 3, 4, 5]]), GraphOptions(k=3))
    merged = MergedSources([source], vocab_size=40)
    merged.begin([1])
    for kept, judged in (([0, 1, 2], 3), ([], 1), ([0], 2)):
        draft = merged.propose(3)
        assert draft is not None
        merged.judged(draft, kept, judged)
    assert (source.judged_at, source.accepted_at) == ([3, 2, 1], [2, 1, 1])
    assert source.report_lines() == [
        "graph drafts: 44% acceptance (4/9 proposed from 5 ids), position 0 acceptance: 2/3 (66.67%)"
    ]


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 64}, {"strategy": "beam"}, {"mixing": Mixing("other")}])
def test_knobs_out_of_range_are_refused(options: dict[str, object]):
    with pytest.raises(ValueError, match="expected"):
        GraphOptions(**options)  # type: ignore[arg-type]
