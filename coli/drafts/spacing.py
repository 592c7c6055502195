"""How often a source is asked: at every step while what it says is right or drafted, ever more seldom while it is not.

Asking takes a lookup and a judgement, which show beside a forward of half a millisecond (TreeSources leaves spaces out
where they do not). The spaces double up to
LONGEST_SPACE emitted ids, so a text that begins to repeat is found within so many, and the first right answer, drafted
or not, ends them. Pure; one thread.
"""

from __future__ import annotations

LONGEST_SPACE = 8  # ids
ASKED_PER_SPACE = 4  # fruitless askings before the space doubles
_SPACES = tuple(1 << doubled for doubled in range(LONGEST_SPACE.bit_length()) for _ in range(ASKED_PER_SPACE))


class Spacing:
    """Of one source. `due`: ids of the response from which it is asked again."""

    __slots__ = ("_fruitless", "due")

    def __init__(self) -> None:
        self.due = 0
        self._fruitless = 0

    def fruitless(self, emitted: int) -> None:
        """With so many ids emitted it said nothing, or something that was wrong and had not been drafted either."""
        self.due = emitted + _SPACES[self._fruitless]
        self._fruitless = min(self._fruitless + 1, len(_SPACES) - 1)

    def fruitful(self) -> None:
        """It was right."""
        self.due = self._fruitless = 0
