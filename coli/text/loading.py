"""Opening a tokenizer on a thread of its own: the library parses megabytes of JSON without Python's lock, so that a
command can import the kernels meanwhile. Called once per command, before anything else is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from coli.text.tokenizer import Tokenizer


def load_meanwhile(folder: Path) -> Callable[[], Tokenizer]:
    """Start to open the tokenizer of a model folder; the function returned waits for it and raises what it raised."""
    outcome: list[Tokenizer | BaseException] = []

    def work() -> None:
        try:
            outcome.append(Tokenizer.load(folder))
        except BaseException as error:
            outcome.append(error)

    # No daemon: one that outlives the interpreter inside the library would abort the process.
    thread = threading.Thread(target=work, name="coli-tokenizer")
    thread.start()

    def result() -> Tokenizer:
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return result
