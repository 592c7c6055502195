"""Sources behind one door: order of authority, limits, chaining, and who is credited for what."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from drafts.adversarial import ScriptedSource, every_adversary, perfect, wrong_at_every_depth
from drafts.simulator import RecordingDrafter, predict
from drafts.slow_drafts import SlowCorpus, SlowNgram

from coli.drafts.base import Draft, PausingGuard
from coli.drafts.corpus import CorpusSource
from coli.drafts.frozen_index import FrozenIndex
from coli.drafts.merge import MergedSources
from coli.drafts.ngram import NgramSource


def says(name: str, *token_ids: int) -> ScriptedSource:
    draft = Draft.chain(token_ids, name) if token_ids else None
    return ScriptedSource(name, lambda context, limit: draft)


def drive(
    drafter: MergedSources | RecordingDrafter,
    prompt: Sequence[int],
    truth: Sequence[int],
    max_tokens: int,
    end_id: int | None = None,
) -> tuple[list[int], int]:
    """(emitted ids, forwards) of a decode loop whose target always says truth[position]: the engine without a model."""
    context = list(prompt)
    drafter.begin(prompt)
    forwards = 0
    emitted = [truth[len(context)]]
    while True:
        ended = end_id is not None and emitted[-1] == end_id
        context += emitted[:-1] if ended else emitted
        drafter.commit(emitted[:-1] if ended else emitted)
        left = max_tokens - (len(context) - len(prompt))
        if ended or left == 0:
            return context[len(prompt) :], forwards
        room = min(64, left) - 1
        draft = drafter.propose(room) if room else None
        forwards += 1
        node, kept, judged, emitted = -1, [], 0, []
        while True:
            emitted.append(truth[len(context) + len(emitted)])
            below = [] if draft is None else [i for i, parent in enumerate(draft.parents) if parent == node]
            judged += bool(below)
            right = [i for i in below if draft is not None and draft.token_ids[i] == emitted[-1]]
            if not right or emitted[-1] == end_id:
                break
            node = right[0]
            kept.append(node)
        if draft is not None:
            assert len(draft) <= room
            drafter.judged(draft, kept, judged)


def test_the_first_source_in_order_of_authority_wins_whatever_the_order_given():
    sources = [says("graph", 5), says("ngram", 4), says("mtp", 3), says("corpus", 2), says("grammar")]
    merged = MergedSources(sources, vocab_size=10)
    draft = merged.propose(8)
    assert draft == Draft.chain([2], "corpus")
    assert [source.name for source in merged.sources] == ["grammar", "corpus", "mtp", "ngram", "graph"]
    assert merged.counters["mtp"].proposed == 0, "not asked"


def test_a_proposal_with_no_usable_id_gives_way_to_the_next_source():
    merged = MergedSources([says("corpus", 99, 1), says("ngram", 4)], vocab_size=10)
    assert merged.propose(8) == Draft.chain([4], "ngram")
    assert merged.propose(0) is None


def test_no_source_means_no_draft_and_no_report():
    merged = MergedSources([], vocab_size=10)
    merged.begin([1])
    assert merged.propose(8) is None
    assert merged.report_lines() == []


def test_chained_sources_extend_one_another_and_are_credited_for_their_part():
    grammar = says("grammar", 1, 2)
    corpus = ScriptedSource("corpus", lambda context, limit: Draft.chain(range(len(context), limit + 9), "corpus"))
    merged = MergedSources([corpus, grammar], vocab_size=100, chain=True)
    merged.begin([0] * 5)
    draft = merged.propose(6)
    assert draft is not None
    assert draft.token_ids == (1, 2, 7, 8, 9, 10), "corpus saw the context with the span behind it"
    assert draft.source == "grammar"
    merged.judged(draft, [0, 1, 2], 4)
    assert (grammar.counters.judged, grammar.counters.accepted) == (2, 2)
    assert (corpus.counters.judged, corpus.counters.accepted) == (2, 1)


def test_chaining_ends_when_nobody_else_goes_on():
    merged = MergedSources([says("grammar", 1, 2), says("corpus")], vocab_size=100, chain=True)
    assert merged.propose(60) == Draft.chain([1, 2], "grammar")


def test_a_tree_counts_one_comparison_per_node_of_the_path():
    tree = Draft((1, 1, 2, 3, 4), (-1, -1, -1, 2, 3), "tree")
    source = ScriptedSource("tree", lambda context, limit: tree)
    merged = MergedSources([source], vocab_size=10)
    assert merged.propose(63) is tree
    merged.judged(tree, [2], 2)
    assert (source.counters.judged, source.counters.accepted) == (2, 1)
    assert merged.propose(63) is tree
    merged.judged(tree, [2, 3, 4], 3)
    assert (source.counters.judged, source.counters.accepted) == (5, 4)


@pytest.mark.parametrize("chain", [False, True])
def test_no_adversary_changes_what_is_emitted(chain: bool):
    rng = random.Random(5)
    prompt, answer = [1, 2, 3], [rng.randrange(1, 20) for _ in range(80)]
    truth = prompt + answer + [0] * 400
    for source in every_adversary(truth, 20, end_id=0):
        emitted, _ = drive(MergedSources([source], vocab_size=20, chain=chain), prompt, truth, 200, end_id=0)
        assert emitted == answer, source.name
    everything = every_adversary(truth, 20, end_id=0)
    emitted, _ = drive(MergedSources(everything, vocab_size=20, chain=chain), prompt, truth, 200, end_id=0)
    assert emitted == answer


def test_a_perfect_source_saves_and_a_wrong_one_never_costs_forwards():
    truth = [*range(100)] * 2
    emitted, forwards = drive(MergedSources([perfect(truth, 8)], vocab_size=100), [0], truth, 96)
    assert (emitted, forwards) == (truth[1:97], 11)
    wrong = MergedSources([wrong_at_every_depth(truth, 100, 1)], vocab_size=100)
    assert drive(wrong, [0], truth, 96) == (truth[1:97], 95)
    assert wrong.report_lines()[-1] == "drafts: wrong 94 proposed, 94 judged, 0 accepted"


@pytest.mark.parametrize("seed", range(40))
def test_every_step_is_the_one_the_slow_simulation_predicts(seed: int):
    rng = random.Random(seed)
    depth = rng.choice([1, 8, 16, 32, 48])
    prompt = [rng.randrange(30) for _ in range(rng.randrange(1, 12))]
    answer = [rng.randrange(30) for _ in range(rng.choice([1, 2, 3, 40, 300]))]
    for _ in range(rng.randrange(4)):
        start = rng.randrange(len(answer))
        answer += answer[start : start + 40]
    # what was frozen: the answer itself, or the answer with some ids changed (near misses)
    frozen = [token_id if rng.random() < 0.95 or seed % 2 else rng.randrange(30) for token_id in answer]
    frozen.insert(rng.randrange(len(frozen)), -1)
    end_id = 31 if rng.random() < 0.5 else None
    max_tokens = len(answer) + 5 if end_id else rng.randrange(1, len(answer) + 1)
    lines: list[str] = []
    corpus = CorpusSource(
        FrozenIndex(np.array(frozen, np.int32)), depth=depth, guard=PausingGuard("corpus drafts", lines.append)
    )
    slow: list[SlowCorpus | SlowNgram] = [SlowCorpus(frozen, depth)]
    merged = MergedSources([corpus], vocab_size=32)
    if rng.random() < 0.5:
        slow.append(SlowNgram(5))
        merged = MergedSources([NgramSource(depth=5), corpus], vocab_size=32)
    recorder = RecordingDrafter(merged)
    stream = answer[:max_tokens]
    emitted, forwards = drive(recorder, prompt, [*prompt, *answer, *([31] * 80)], max_tokens, end_id)
    prediction = predict(prompt, stream, slow, max_tokens=max_tokens, end_id=end_id)
    assert emitted == stream
    assert recorder.steps == [step for step in prediction.steps if step.source]
    assert forwards == prediction.forwards
    for source in slow:
        fast = merged.counters[source.name]
        assert (fast.proposed, fast.accepted) == (source.proposed, source.accepted)


def test_the_replay_of_a_frozen_answer_needs_13_forwards_for_96_tokens():
    answer = list(range(100, 196))
    literal = predict([1, 2, 3], answer, [SlowCorpus(answer, 8)], max_tokens=96, keep_last_row=False)
    source = SlowCorpus(answer, 8)
    spared = predict([1, 2, 3], answer, [source], max_tokens=96)
    assert literal.forwards == spared.forwards == 13
    assert [step.accepted for step in spared.steps] == [0, 0] + [8] * 10 + [2]
    assert [step.accepted for step in literal.steps] == [0, 0] + [8] * 10 + [3]
    assert (source.proposed, source.accepted) == (83, 82)
