"""Sample-and-compare: which drafted tokens does the target really emit?

The target is sampled at the root row; where a child row drafts exactly that token the walk goes there, and so on.
Exact for any draft at any temperature: a draft can only be confirmed, never preferred. Pure; called by the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verify committed.

    token_ids: every id sampled, in order: the accepted drafts, then the bonus token.
    kept_rows: forward rows (0 = the newest id's row) whose cache rows belong to the committed path.
    judged: drafted tokens the target got to compare (the accepted ones and the rejected siblings at the last node).
    """

    token_ids: tuple[int, ...]
    kept_rows: tuple[int, ...]
    judged: int

    @property
    def num_accepted_tokens(self) -> int:
        return len(self.kept_rows) - 1


def draft_children(token_ids: Sequence[int], parents: Sequence[int]) -> list[dict[int, int]]:
    """Per forward row the children by token id; row 0 is the root, draft i is row i + 1, parent -1 means the root.

    Of equal tokens below one node the first counts.
    """
    children: list[dict[int, int]] = [{} for _ in range(len(token_ids) + 1)]
    for i, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        children[parent + 1].setdefault(token_id, i + 1)
    return children


def verify(
    logits: NDArray[np.float32],
    children: Sequence[dict[int, int]],
    sample: Callable[[NDArray[np.float32]], int],
    commit: Callable[[int], bool],
) -> Verdict:
    """Walk the draft tree by sampling the target; rows are sampled only when reached.

    logits: (S, V), row i for forward row i. `sample` draws the target's token at the next position; `commit` takes it
    and returns False when generation must end with it (then it was an end id or a limit, and nothing follows).
    """
    row, kept, sampled, judged = 0, [0], [], 0
    while True:
        token_id = sample(logits[row])
        sampled.append(token_id)
        judged += len(children[row]) > 0
        going_on = commit(token_id)
        child = children[row].get(token_id)
        if child is None or not going_on:
            return Verdict(tuple(sampled), tuple(kept), judged)
        row = child
        kept.append(row)
