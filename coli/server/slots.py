"""The conversations a server keeps in memory: who gets which, and the file they are kept in between two servers.

A slot is a session and whoever uses it now. Owned by the worker; called on its thread, and before that has begun or
after it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coli.engine.session import Session
from coli.errors import WriteError
from coli.session_file import SessionFile

if TYPE_CHECKING:
    from coli.server.worker import Active

CHEAP_BYTES = 256 * 2**20  # up to here sessions are written when the server idles too, not only at its end


class Slot:
    """A conversation kept in memory, and who uses it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.active: Active | None = None
        self.used = 0


class Slots:
    """All of them."""

    def __init__(self, file: SessionFile | None, notice: Callable[[str], None]) -> None:
        """file: where sessions are read from, and written to by `save`."""
        self._all: list[Slot] = []
        self._file, self._notice = file, notice
        self._clock = 0
        self._changed = False  # since the file was written
        self.restored_tokens = 0

    def open(self, count: int, new_session: Callable[[], Session]) -> None:
        """Make them, as far as the file goes with what it holds. Raises what `SessionFile` raises."""
        file = self._file
        sessions: list[Session] = []
        if file is not None:
            file.check_writable()
            if file.path.exists():
                sessions, _ = file.load(count, new_session)
                self.restored_tokens = sum(len(session.token_ids) for session in sessions)
                held = f"{len(sessions)} conversation{'s' * (len(sessions) != 1)}, {self.restored_tokens} tokens"
                self._notice(f"going on with {file.path}: {held}")
        self._all = [Slot(session) for session in sessions]
        self._all += [Slot(new_session()) for _ in range(count - len(sessions))]
        for slot in self._all[: len(sessions)]:  # the file has the least recently used first
            self._touch(slot)

    @property
    def path(self) -> Path | None:
        """Of the file."""
        return None if self._file is None else self._file.path

    @property
    def active(self) -> list[Active]:
        return [slot.active for slot in self._all if slot.active is not None]

    @property
    def free(self) -> int:
        return sum(slot.active is None for slot in self._all)

    def find(self, prompt_ids: Sequence[int]) -> Slot:
        """A free slot that holds the longest beginning of the prompt; a long other conversation is copied from."""
        best = max(self._all, key=lambda slot: slot.session.common_length(prompt_ids))
        common = best.session.common_length(prompt_ids)
        if best.active is None and 2 * common >= len(best.session.token_ids):
            return best
        free = min((slot for slot in self._all if slot.active is None), key=lambda slot: slot.used)
        if free is not best and common > free.session.common_length(prompt_ids):
            free.session.token_ids = best.session.token_ids[:common]
            free.session.cache.copy_prefix(best.session.cache, common)
        return free

    def take(self, slot: Slot, active: Active) -> None:
        """`active` runs on it from now on."""
        slot.active = active
        self._touch(slot)

    def release(self, slot: Slot) -> None:
        slot.active = None
        self._changed = True

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    @property
    def worth_saving(self) -> bool:
        """Whether the file is behind, and writing it takes a moment only."""
        return self._file is not None and self._changed and self._nbytes <= CHEAP_BYTES

    @property
    def _nbytes(self) -> int:
        """What the rows of all sessions take, roughly."""
        shares = [(slot.session.cache, slot.session.cache.length) for slot in self._all]
        return sum(cache.nbytes * length // cache.capacity for cache, length in shares)

    def save(self) -> None:
        """Write the file, if there is one and it is behind. Raises WriteError."""
        if self._file is None or not self._changed:
            return
        kept = sorted((slot for slot in self._all if slot.session.cache.length), key=lambda slot: slot.used)
        self._file.save([slot.session for slot in kept])
        self._changed = False

    def save_idle(self) -> None:
        """The same while the server goes on: what cannot be written is a line, and tried again after more answers."""
        try:
            self.save()
        except WriteError as error:
            self._notice(str(error))
            self._changed = False
