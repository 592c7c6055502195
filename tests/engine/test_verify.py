"""verify: the walk through a draft tree commits exactly what sampling without drafts would."""

import numpy as np
import pytest

from coli.engine.verify import draft_children, verify


def logits_for(best: list[int], vocab: int = 8) -> np.ndarray:
    rows = np.zeros((len(best), vocab), np.float32)
    rows[np.arange(len(best)), best] = 1
    return rows


def argmax(row: np.ndarray) -> int:
    return int(np.argmax(row))


def test_children_of_a_tree_and_equal_tokens_merge_to_the_first() -> None:
    assert draft_children([5, 6, 5, 7], [-1, 0, -1, 1]) == [{5: 1}, {6: 2}, {7: 4}, {}, {}]


def test_a_chain_is_accepted_up_to_the_first_difference_and_the_bonus_follows() -> None:
    verdict = verify(logits_for([1, 2, 4, 0]), draft_children([1, 2, 3], [-1, 0, 1]), argmax, lambda _: True)
    assert verdict.token_ids == (1, 2, 4)
    assert verdict.kept_rows == (0, 1, 2)
    assert verdict.num_accepted_tokens == 2
    assert verdict.judged == 3


def test_first_draft_is_not_committed_unverified() -> None:
    # prompt [1, 1, 1], draft [1], the target wants 0
    verdict = verify(logits_for([0, 5]), draft_children([1], [-1]), argmax, lambda _: True)
    assert verdict.token_ids == (0,)
    assert verdict.kept_rows == (0,)


def test_no_draft_gives_one_token() -> None:
    verdict = verify(logits_for([3]), draft_children([], []), argmax, lambda _: True)
    assert verdict.token_ids == (3,)
    assert verdict.judged == 0


def test_the_walk_takes_the_matching_branch_of_a_tree() -> None:
    # root -> 1 -> 2, root -> 3 -> 4
    tree = draft_children([1, 2, 3, 4], [-1, 0, -1, 2])
    verdict = verify(logits_for([3, 0, 0, 4, 6]), tree, argmax, lambda _: True)
    assert verdict.token_ids == (3, 4, 6)
    assert verdict.kept_rows == (0, 3, 4)


def test_commit_ends_the_walk_inside_an_accepted_run() -> None:
    seen: list[int] = []

    def commit(token_id: int) -> bool:
        seen.append(token_id)
        return token_id != 2

    verdict = verify(logits_for([1, 2, 3, 4]), draft_children([1, 2, 3], [-1, 0, 1]), argmax, commit)
    assert seen == [1, 2]
    assert verdict.kept_rows == (0, 1)


@pytest.mark.parametrize("draft", [[], [1], [9, 9, 9], [1, 2, 3, 4, 5, 6, 7]])
def test_rows_are_sampled_only_when_reached(draft: list[int]) -> None:
    calls = 0

    def sample(row: np.ndarray) -> int:
        nonlocal calls
        calls += 1
        return argmax(row)

    verdict = verify(
        logits_for([1, 2, 3, 0, 0, 0, 0, 0][: len(draft) + 1]),
        draft_children(draft, list(range(-1, len(draft) - 1))),
        sample,
        lambda _: True,
    )
    assert calls == len(verdict.token_ids) == verdict.num_accepted_tokens + 1
