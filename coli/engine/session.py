"""One timeline: the committed token ids and the cache rows that hold them.

Owns the rule that the cache holds every committed id but the newest. Knows nothing of drafts, text or sampling.
Called by the engine, one thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Cache(Protocol):
    """What a session needs of an attention memory (coli.model.kv_cache.KVCache)."""

    length: int
    capacity: int

    @property
    def nbytes(self) -> int: ...

    @property
    def reads_alone(self) -> bool:
        """Whether a forward of many rows may hold those of this cache only."""
        ...

    def expect(self, prompt_length: int) -> None: ...

    def rewind(self, length: int) -> None: ...

    def keep_path(self, start: int, rows: Sequence[int]) -> None: ...

    def copy_prefix(self, other: Any, length: int) -> None: ...


class Model(Protocol):
    """The forward, as the engine sees it (coli.model.transformer.Transformer)."""

    vocab_size: int

    def forward(
        self,
        cache: Any,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        parents: NDArray[np.int64] | None,
        logit_rows: NDArray[np.int64],
        *,
        prefill: bool,
    ) -> NDArray[np.float32]:
        """Append S rows to the cache and return the logits (len(logit_rows), V) of the chosen ones.

        `parents` (S,) holds the row index of each row's parent, -1 for the committed prefix; None means a chain.
        """
        ...

    def forward_many(
        self, groups: Sequence[Any], logit_rows: NDArray[np.int64], *, prefill: bool
    ) -> NDArray[np.float32]:
        """The rows of several sequences (`cache`, `token_ids`, `positions`, `parents` each) in one forward."""
        ...

    def settle(self, committed_rows: NDArray[np.int64]) -> None:
        """Tell the expert store which rows of the last forward were committed."""
        ...

    def first_bad_layer(self) -> int | None:
        """The first layer that gave NaN or infinity in the last forward, -1 the embedding, None none of them."""
        ...


class Session:
    """Committed ids (prompt and answer) with the cache behind them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.token_ids: list[int] = []

    @property
    def newest(self) -> int:
        return self.token_ids[-1]

    @property
    def pending(self) -> int:
        """Committed ids whose rows are not in the cache yet."""
        return len(self.token_ids) - self.cache.length

    def commit(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def common_length(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` this session begins with and has rows of; at least the last is always left over."""
        most = min(self.cache.length, len(token_ids) - 1)
        pairs = zip(self.token_ids[:most], token_ids[:most], strict=True)
        return next((at for at, (mine, other) in enumerate(pairs) if mine != other), max(most, 0))

    def resume(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Keep what `token_ids` begins with, take back the rest; returns the ids still to be computed."""
        kept = self.common_length(token_ids)
        self.rewind(kept)
        return token_ids[kept:]

    def rewind(self, length: int) -> None:
        """Take back every id from position `length` on, and its row."""
        del self.token_ids[length:]
        self.cache.rewind(min(self.cache.length, length))

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Whatever is raised inside, an interrupt included, leaves ids and rows as they were."""
        num_ids, num_rows = len(self.token_ids), self.cache.length
        try:
            yield
        except BaseException:
            del self.token_ids[num_ids:]
            self.cache.rewind(num_rows)
            raise
