"""Reader threads: they bring the bytes of records into place while the model computes.

Two `SimpleQueue`s and two deques: demanded reads go before prefetched ones, answers come back in arrival order, and an
answer carries the error of a read that failed, so that nobody waits for ever. Threads touch bytes only.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any


@dataclass(slots=True, eq=False)
class Read:
    """One record on its way: `place` tells `perform` where from and where to."""

    key: int
    place: Any
    prefetch: bool = False
    error: BaseException | None = None
    _claim: threading.Lock = field(default_factory=threading.Lock)

    def claim(self) -> bool:
        """True for the first caller: a thread that performs the read, or the one that calls it off.

        A promoted read waits in both deques.
        """
        return self._claim.acquire(blocking=False)


class ReaderThreads:
    """Runs `perform(read)` for submitted reads on `threads` threads, and `finish(read)` after each answer is out."""

    def __init__(self, perform: Callable[[Read], None], threads: int, finish: Callable[[Read], None]) -> None:
        self._perform = perform
        self._finish = finish
        self._demanded: deque[Read] = deque()
        self._prefetched: deque[Read] = deque()
        self._tickets: SimpleQueue[bool] = SimpleQueue()  # one per entry of the deques; False ends a thread
        self._answers: SimpleQueue[Read] = SimpleQueue()
        self._clock = threading.Lock()  # of the three below
        self._outstanding, self._since, self._reading_s = 0, 0.0, 0.0
        self._threads = [threading.Thread(target=self._run, name=f"coli-read-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def reading_s(self) -> float:
        """Seconds in which at least one read was wanted and not finished."""
        with self._clock:
            return self._reading_s + (time.perf_counter() - self._since if self._outstanding else 0.0)

    def submit(self, read: Read) -> None:
        self._count(1)
        (self._prefetched if read.prefetch else self._demanded).append(read)
        self._tickets.put(True)

    def promote(self, read: Read) -> None:
        """A prefetched read is demanded now: it goes before the others unless it has started."""
        read.prefetch = False
        self._demanded.append(read)
        self._tickets.put(True)

    def call_off(self, read: Read) -> bool:
        """Forget a read that no thread has started; False: it will be answered."""
        if not read.claim():
            return False
        self._count(-1)
        return True

    def receive(self, *, block: bool) -> Read | None:
        """The next finished read, None when there is none and `block` is false; look at its `error`."""
        try:
            return self._answers.get(block)
        except Empty:
            return None

    def close(self) -> None:
        """Let running reads finish, forget the waiting ones, end the threads."""
        self._demanded.clear()
        self._prefetched.clear()
        for _ in self._threads:
            self._tickets.put(False)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while self._tickets.get():
            read = self._next()
            if read is None or not read.claim():
                continue
            try:
                self._perform(read)
            except BaseException as error:  # handed to the thread that waits
                read.error = error
            self._count(-1)
            self._answers.put(read)
            self._finish(read)

    def _count(self, change: int) -> None:
        with self._clock:
            if self._outstanding == 0:
                self._since = time.perf_counter()
            self._outstanding += change
            if self._outstanding == 0:
                self._reading_s += time.perf_counter() - self._since

    def _next(self) -> Read | None:
        for waiting in (self._demanded, self._prefetched):
            try:
                return waiting.popleft()
            except IndexError:
                continue
        return None
