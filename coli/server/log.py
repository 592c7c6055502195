"""What the web server and the event loop say by themselves, as lines of ours. Used by `coli.server.run`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Lines(logging.Handler):
    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notice = notice

    def emit(self, record: logging.LogRecord) -> None:
        """One line: the message, and the error behind it in a few words."""
        said = " ".join(record.getMessage().split())
        if said.startswith("No supported WebSocket library"):
            return  # advice to the one who wrote a server, behind the line that names the request
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f": {type(error).__name__}"
        self._notice(f"http: {said.rstrip('.')}{why}" + (f": {error}" if error and str(error) else ""))


@contextmanager
def told(notice: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile every warning of a library is a line."""
    handler, root = _Lines(notice), logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
