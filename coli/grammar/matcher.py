"""Tokens on the byte automaton: where a text stands in the grammar, by the seed's rules of arming and desync.

Not armed at first: bytes that cannot begin the grammar are passed over, the first that can arms. An illegal byte, or
any byte behind a finished parse, disarms and is tried at once as a new beginning. Never raises on what a model emits.
A position is a State, None while unarmed; the functions take and return positions, `GrammarMatcher` keeps one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coli.grammar.automaton import MAX_FORCED, Automaton
from coli.grammar.states import State

MAX_ROLLBACK = 1024  # tokens

Position = State | None


def feed_bytes(automaton: Automaton, position: Position, data: bytes) -> Position:
    """The position after `data`."""
    step, start = automaton.step, automaton.start
    if position is None:
        data = data.lstrip(automaton.idle)
    for byte in data:
        reached = step(position, byte) if position is not None else None
        position = reached if reached is not None else step(start, byte)
    return position


def walk_bytes(automaton: Automaton, state: State, data: bytes) -> Position:
    """The state after `data`, None as soon as a byte is illegal: no desync, no new beginning."""
    step = automaton.step
    position: Position = state
    for byte in data:
        if position is None:
            break
        position = step(position, byte)
    return position


def walk_token(automaton: Automaton, state: State, token_id: int, data: bytes) -> Position:
    """The state after a token that is legal here, as a token terminal or by its bytes; None if it is not."""
    by_bytes = walk_bytes(automaton, state, data) if data else None
    if not state.tokens:
        return by_bytes
    by_token = automaton.step_token(state, token_id)
    if by_token is None or by_bytes is None:
        return by_token if by_bytes is None else by_bytes
    return automaton.join(by_token, by_bytes)


def feed_token(automaton: Automaton, position: Position, token_id: int, data: bytes) -> Position:
    """The position after a token with these bytes; one without bytes that no terminal takes changes nothing."""
    start = automaton.start
    if start.tokens or (position is not None and position.tokens):
        for state in (position, start):
            reached = walk_token(automaton, state, token_id, data) if state is not None else None
            if reached is not None:
                return reached
    return feed_bytes(automaton, position, data)


class GrammarMatcher:
    """One text's walk through the grammar; forks share everything but the position.

    token_bytes: bytes of a token id, needed only where ids are fed.
    """

    def __init__(self, automaton: Automaton, token_bytes: Callable[[int], bytes] | None = None) -> None:
        self._automaton = automaton
        self._token_bytes = token_bytes
        self._position: Position = None
        self._history: deque[Position] = deque(maxlen=MAX_ROLLBACK)

    @property
    def position(self) -> Position:
        """The state of the walk, None while unarmed."""
        return self._position

    @property
    def armed(self) -> bool:
        """Whether the text so far follows the grammar from some point on."""
        return self._position is not None

    @property
    def can_end(self) -> bool:
        """The grammar may end here."""
        return self._position is not None and self._position.can_end

    @property
    def is_terminated(self) -> bool:
        """The grammar must end here: it is complete and nothing can follow."""
        return self._position is not None and self._position.must_end

    def reset(self) -> None:
        """A new response: unarmed."""
        self._position = None
        self._history.clear()

    def accept_token(self, token: int | bytes) -> bool:
        """Feed one token, by id or by its bytes; whether the walk is armed behind it."""
        self._history.append(self._position)
        if isinstance(token, bytes):
            self._position = feed_bytes(self._automaton, self._position, token)
        elif self._token_bytes is not None:
            self._position = feed_token(self._automaton, self._position, token, self._token_bytes(token))
        else:
            raise TypeError("token ids need a matcher made with token_bytes")
        return self._position is not None

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens fed; ValueError beyond those remembered (MAX_ROLLBACK)."""
        if not 0 <= num_tokens <= len(self._history):
            raise ValueError(f"cannot take back {num_tokens} tokens, {len(self._history)} are remembered")
        for _ in range(num_tokens):
            self._position = self._history.pop()

    def fork(self) -> GrammarMatcher:
        """A second walk from the same position, which can be rolled back as far as this one."""
        twin = GrammarMatcher(self._automaton, self._token_bytes)
        twin._position = self._position
        twin._history = self._history.copy()
        return twin

    def forced_bytes(self, limit: int = MAX_FORCED) -> bytes:
        """The bytes that must come next: as long as exactly one is legal and the parse cannot end. Changes nothing."""
        return self._automaton.forced(self._position)[0][:limit] if self._position is not None else b""

    def forced_token(self) -> int | None:
        """The token terminal that must come next, if nothing else may."""
        return self._automaton.only_token(self._position) if self._position is not None else None
