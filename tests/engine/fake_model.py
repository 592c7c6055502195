"""A target without weights: logits are a fixed function of all ids on a row's path.

Whatever a forward gets wrong about paths, positions or kept rows changes the ids that come out.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class FakeCache:
    """Remembers which id sits in which slot."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.ids: list[int] = []

    def rewind(self, length: int) -> None:
        assert 0 <= length <= self.length
        self.length = length
        del self.ids[length:]

    def expect(self, prompt_length: int) -> None:
        pass

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        assert list(rows) == sorted(set(rows))
        self.ids[start:] = [self.ids[start + row] for row in rows]
        self.length = len(self.ids)


class FakeModel:
    """Logits of a row: pseudo-random from (salt, every id on its path). `repeat` makes text that n-grams can guess."""

    def __init__(self, vocab_size: int, salt: int = 0, repeat: int = 0) -> None:
        self.vocab_size = vocab_size
        self._salt = salt
        self._repeat = repeat
        self._known: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.settled: list[list[int]] = []
        self.forwards: list[int] = []

    def logits(self, path: Sequence[int]) -> NDArray[np.float32]:
        """(V,) float32 behind the ids of `path`."""
        seen = tuple(path[-2:] if self._repeat else path)
        if seen not in self._known:
            digest = hashlib.blake2b(repr((self._salt, seen)).encode(), digest_size=8).digest()
            rng = np.random.default_rng(int.from_bytes(digest, "little"))
            self._known[seen] = (rng.standard_normal(self.vocab_size) * 2).astype(np.float32)
        return self._known[seen]

    def forward(
        self,
        cache: FakeCache,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        parents: NDArray[np.int64] | None,
        logit_rows: NDArray[np.int64],
        *,
        prefill: bool,
    ) -> NDArray[np.float32]:
        S, start = len(token_ids), cache.length
        assert start + S <= cache.capacity
        parents = np.arange(-1, S - 1) if parents is None else parents
        paths: list[list[int]] = []
        for row in range(S):
            before = paths[parents[row]] if parents[row] >= 0 else list(cache.ids[:start])
            paths.append([*before, int(token_ids[row])])
            assert positions[row] == len(paths[row]) - 1, "a row's position is the length of its path"
        cache.ids.extend(int(t) for t in token_ids)
        cache.length = len(cache.ids)
        self.forwards.append(S)
        if not len(logit_rows):
            return np.empty((0, self.vocab_size), np.float32)
        return np.stack([self.logits(paths[row]) for row in logit_rows])

    def first_bad_layer(self) -> int | None:
        return None

    def settle(self, committed_rows: NDArray[np.int64]) -> None:
        self.settled.append([int(row) for row in committed_rows])


class ScriptedModel(FakeModel):
    """Greedy output is `answer` behind whatever prompt of `prompt_tokens` ids there was, then id 0 for ever."""

    def __init__(self, vocab_size: int, prompt_tokens: int, answer: Sequence[int]) -> None:
        super().__init__(vocab_size)
        self._prompt_tokens = prompt_tokens
        self._answer = list(answer)

    def logits(self, path: Sequence[int]) -> NDArray[np.float32]:
        at = len(path) - self._prompt_tokens
        row = np.zeros(self.vocab_size, np.float32)
        row[self._answer[at] if at < len(self._answer) else 0] = 1
        return row
