"""Drafts are well-formed trees; guards pause, stay silent and re-arm exactly as semantics 2 and 3 say."""

import pytest

from coli.drafts.base import Counters, Draft, PausingGuard, PermanentGuard, SlidingGuard


def test_a_draft_refuses_parents_that_do_not_come_first():
    with pytest.raises(ValueError, match="parent 1"):
        Draft((5, 6), (-1, 1), "corpus")
    with pytest.raises(ValueError, match="parents"):
        Draft((5, 6), (-1,), "corpus")
    with pytest.raises(ValueError, match="None"):
        Draft((), (), "corpus")


def test_trimming_keeps_a_prefix_and_drops_what_hangs_on_a_foreign_id():
    chain = Draft.chain([4, 5, 99, 6], "corpus", 3)
    assert chain.trimmed(2) == Draft.chain([4, 5], "corpus", 3)
    assert chain.trimmed(8, vocab_size=10) == Draft.chain([4, 5], "corpus", 3)
    assert chain.trimmed(4, vocab_size=100) is chain
    assert chain.trimmed(0) is None
    assert Draft.chain([99], "corpus").trimmed(8, vocab_size=10) is None
    tree = Draft((1, 99, 2, 3), (-1, 0, 1, 0), "merged")
    assert tree.trimmed(8, vocab_size=10) == Draft((1, 3), (-1, 0), "merged")
    assert not tree.is_chain
    assert chain.is_chain


def test_the_permanent_guard_switches_off_for_good_at_32_proposed_below_half():
    lines: list[str] = []
    guard = PermanentGuard("grammar", lines.append)
    assert guard.allows(Counters(31, 31, 0))
    assert guard.allows(Counters(32, 32, 16))
    assert not guard.allows(Counters(33, 33, 16))
    assert len(lines) == 1
    assert "48% acceptance (16/33)" in lines[0]
    assert not guard.allows(Counters(33, 33, 33))
    assert guard.report_lines() == lines


def test_the_pausing_guard_counts_emitted_tokens_and_starts_clean_after_the_pause():
    lines: list[str] = []
    guard = PausingGuard("corpus drafts", lines.append)
    counters = Counters(23, 23, 0)
    assert guard.allows(counters)
    counters.proposed = 24
    assert not guard.allows(counters)
    for _ in range(255):
        guard.commit(1)
        assert not guard.allows(counters)
    guard.commit(1)
    assert guard.allows(counters)
    counters.proposed += 24
    counters.accepted += 12
    assert guard.allows(counters), "exactly the minimum is enough"
    counters.proposed += 1
    assert not guard.allows(counters)
    guard.commit(300)
    assert guard.allows(counters)
    assert [line.split(", ")[-1] for line in lines] == [
        "paused for 256 tokens",
        "corpus drafts: re-armed after 256 tokens",
        "paused for 256 tokens",
        "corpus drafts: re-armed after 256 tokens",
    ]
    assert guard.report_lines() == ["corpus drafts: guard below 50% paused 2x, re-armed 2x"]


@pytest.mark.parametrize(("percent", "accepted", "allowed"), [(0, 0, True), (100, 23, False), (100, 24, True)])
def test_the_minimum_is_a_percentage_from_0_to_100(percent: int, accepted: int, allowed: bool):
    guard = PausingGuard("corpus drafts", lambda line: None, percent=percent)
    assert guard.allows(Counters(24, 24, accepted)) is allowed


def test_the_sliding_guard_forgets_old_success():
    guard = SlidingGuard("grammar", lambda line: None, window=32)
    counters = Counters()
    for _ in range(100):
        counters.judged += 8
        counters.accepted += 8
        assert guard.allows(counters)
    steps = 0
    while guard.allows(counters):
        counters.judged += 8
        steps += 1
    assert steps == 3, "24 of the last 32 rejected"
    guard.commit(256)
    assert guard.allows(counters), "the window is empty after the pause"
