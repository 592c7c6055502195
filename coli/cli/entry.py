"""Where the process starts: Ctrl-C is quiet from the first import on.

Imports nothing of weight before that; `main` takes the signals over when it is ready to clean up after them.
"""

import os
import signal
from types import FrameType


def leave(number: int, frame: FrameType | None) -> None:
    """Handler of a signal that ends the process while there is nothing to clean up yet."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line of this process and leave it with its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    from coli.cli.main import main

    main()
