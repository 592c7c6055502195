"""Where the process starts: Ctrl-C is quiet from the first import on.

Imports nothing of weight before that; `main` takes the signals over when it is ready to clean up after them.
"""

import gc
import os
import signal
from types import FrameType

# Objects made before cycles are looked for. Imports make 200000 that stay; at Python's 700 the search is a tenth of
# the time to the first token.
COLLECT_EVERY = 200_000


def leave(number: int, frame: FrameType | None) -> None:
    """Handler of a signal that ends the process while there is nothing to clean up yet."""
    os._exit(128 + number)


def main() -> None:
    """Run the command line of this process and leave it with its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    gc.set_threshold(COLLECT_EVERY)
    from coli.cli.main import main

    main()
