"""Sessions go on as if nothing had happened: after a stop in mid-run, an error, an interrupt, over a warm cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from adversarial import perfect, random_trees
from fake_model import FakeCache, FakeModel
from responses import Setup

from coli.drafts.merge import MergedSources
from coli.engine.session import Session
from coli.errors import NumericError
from coli.options import SamplerOptions

PROMPT, QUESTION = [1, 2, 3, 1, 2], [4, 0, 4]
SETUPS = [Setup(), Setup(sampler=SamplerOptions(temperature=1.0, repeat_penalty=1.2), seed=5)]


def is_whole(session: Session, ids: Sequence[int]) -> None:
    """Ids as given, rows for all of them but perhaps the newest."""
    cache = session.cache
    assert isinstance(cache, FakeCache)
    assert session.token_ids == list(ids)
    assert cache.length == len(cache.ids)
    assert cache.ids == list(ids[: cache.length])
    assert cache.length <= len(ids)


@pytest.mark.parametrize("setup", SETUPS, ids=["greedy", "sampled"])
def test_a_session_closed_at_any_id_ends_behind_it_and_goes_on_like_a_fresh_one(setup: Setup) -> None:
    plain = setup.run(PROMPT, 20).ids
    truth = PROMPT + plain
    for taken in range(1, 20):
        for source in (perfect(truth), perfect(truth, 3), random_trees(taken, 7, truth)):
            model, session = FakeModel(7), Session(FakeCache(1000))
            stream = setup.stream(model, session, PROMPT, 20, MergedSources([source], vocab_size=7))
            assert [next(stream) for _ in range(taken)] == plain[:taken]
            stream.close()
            is_whole(session, PROMPT + plain[:taken])
            again = setup.run(QUESTION, 9, model=model, session=session)
            assert again.ids == setup.run(PROMPT + plain[:taken] + QUESTION, 9).ids
            is_whole(session, PROMPT + plain[:taken] + QUESTION + again.ids)


@pytest.mark.parametrize("setup", SETUPS, ids=["greedy", "sampled"])
def test_a_warm_cache_gives_the_ids_of_a_cold_one(setup: Setup) -> None:
    session, model = Session(FakeCache(1000)), FakeModel(7)
    history: list[int] = []
    for turn in range(4):
        question = [turn, *QUESTION]
        warm = setup.run(question, 7, model=model, session=session)
        assert warm.ids == setup.run(history + question, 7).ids
        assert warm.stats.prefill_tokens == len(question) + (turn > 0)  # the newest id had no row yet
        history += question + warm.ids


def test_an_end_id_leaves_rows_for_everything_and_the_next_turn_computes_only_its_own() -> None:
    plain = Setup().run(PROMPT, 40).ids
    setup = Setup(end_ids=frozenset({plain[6]}))
    answer = plain[: plain.index(plain[6])]
    first = setup.run(PROMPT, 40, MergedSources([perfect(PROMPT + plain)], vocab_size=7))
    assert first.ids == answer
    is_whole(first.session, PROMPT + answer)
    second = setup.run(QUESTION, 5, model=first.model, session=first.session)
    assert second.stats.prefill_tokens == len(QUESTION)
    assert second.ids == setup.run(PROMPT + answer + QUESTION, 5).ids


class FailingModel(FakeModel):
    """Raises `error` in its forward number `at`, after the rows have been appended; `nan` damages logits instead."""

    def __init__(self, at: int, error: BaseException | None) -> None:
        super().__init__(7)
        self._left, self._error = at, error

    def forward(self, cache: Any, *rows: Any, prefill: bool) -> np.ndarray:
        logits = super().forward(cache, *rows, prefill=prefill)
        self._left -= 1
        if self._left == 0:
            if self._error is not None:
                raise self._error
            if not len(logits):  # a prompt's first part: damage the next forward
                self._left = 1
            logits = logits.copy()
            logits[len(logits) // 2 :] = np.nan
        return logits


@pytest.mark.parametrize("error", [NumericError("layer 1"), KeyboardInterrupt(), None], ids=["error", "ctrl-c", "nan"])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("setup", SETUPS, ids=["greedy", "sampled"])
def test_a_failed_forward_leaves_what_was_yielded_and_nothing_else(
    setup: Setup, at: int, error: BaseException | None
) -> None:
    setup = Setup(sampler=setup.sampler, seed=setup.seed, chunk=3)  # the prompt takes two forwards
    plain = setup.run(PROMPT, 60).ids
    truth = PROMPT + plain
    model, session, seen = FailingModel(at, error), Session(FakeCache(1000)), []
    stream = setup.stream(model, session, PROMPT, 60, MergedSources([perfect(truth, 7)], vocab_size=7))
    with pytest.raises(type(error) if error else NumericError):
        seen.extend(stream)
    assert seen == plain[: len(seen)]
    is_whole(session, PROMPT + seen)
    again = setup.run(QUESTION, 9, model=model, session=session)
    assert again.ids == setup.run(PROMPT + seen + QUESTION, 9).ids
