"""Stop strings, matched on bytes as tokens arrive.

Owns the bytes that may still turn out to be the beginning of a stop string; knows nothing of tokens' meaning
nor of characters. Used by the engine's generate loop, one matcher a response.
"""

from collections.abc import Sequence


class StopMatcher:
    """Finds the earliest stop string in a stream of bytes.

    `push` returns the bytes that can no longer be part of a stop string. Once `matched` is true, nothing more comes out
    and `kept_bytes` is the length of the stream up to (not including) the stop string.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = b""
        self._released = 0
        self.matched = False

    @property
    def kept_bytes(self) -> int:
        """Bytes of the stream that belong to the text: released ones, plus the held ones while nothing matched."""
        return self._released + len(self._held)

    def push(self, data: bytes) -> bytes:
        """Take the bytes of one token; return what is safe to show now."""
        if self.matched:
            return b""
        if not self._stops:
            self._released += len(data)
            return data
        window = self._held + data
        found = [at for at in (window.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.matched = True
            self._held = b""
            safe = window[: min(found)]
        else:
            hold = self._longest_partial(window)
            safe, self._held = window[: len(window) - hold], window[len(window) - hold :]
        self._released += len(safe)
        return safe

    def flush(self) -> bytes:
        """The held bytes: generation ended and they are text after all."""
        held, self._held = self._held, b""
        self._released += len(held)
        return held

    def _longest_partial(self, window: bytes) -> int:
        for size in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[len(window) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
