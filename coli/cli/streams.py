"""The two streams of a command: text for whoever reads the output, everything else for whoever watches.

Generated text alone goes to standard output, as UTF-8 bytes, flushed as it comes. Notices, progress and reports are
lines on standard error; a broken standard error never stops a run. Texts from files cannot send control codes.
"""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass, field

import click

_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


def one_line(text: str) -> str:
    """`text` without line breaks and control characters."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", " ".join(text.split("\n")))


def write_error(line: str) -> None:
    """One line on standard error; nothing if that is impossible."""
    with contextlib.suppress(OSError, ValueError):
        click.echo(line.encode("utf-8", "replace") + b"\n", file=sys.stderr.buffer, nl=False)


def write_output(data: bytes) -> None:
    """Bytes on standard output, now. Raises BrokenPipeError when nobody reads any more."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


@dataclass(slots=True)
class Streams:
    """Standard output and error of one command."""

    quiet: bool = False
    verbose: bool = False
    color: str = "auto"
    _last: str = field(default="\n", init=False)  # last character on standard output
    _progress: bool = field(default=False, init=False)

    def text(self, piece: str) -> None:
        """Show a piece of generated text now. Raises BrokenPipeError when nobody reads any more."""
        if not piece:
            return
        self.clear_progress()
        write_output(piece.encode("utf-8", "replace"))
        self._last = piece[-1]

    def end_text(self, anything: bool) -> None:
        """One final newline if the text had none; `anything`: whether there was text at all."""
        if not anything or self._last != "\n":
            self.text("\n")

    def notice(self, message: str) -> None:
        """One line on standard error, unless quiet."""
        if not self.quiet:
            self._line(f"coli: {one_line(message)}", "yellow")

    def report(self, line: str) -> None:
        """One line of the end report, unless quiet."""
        if not self.quiet:
            self._line(one_line(line), "bright_black")

    def plain(self, line: str) -> None:
        """One line on standard error that was asked for, quiet or not."""
        self._line(one_line(line), None)

    def progress(self, message: str) -> None:
        """What is going on, on a terminal only; the next line takes its place."""
        if self.quiet or not sys.stderr.isatty():
            return
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[K{one_line(message)}")
            sys.stderr.flush()
            self._progress = True

    def clear_progress(self) -> None:
        """Remove what `progress` shows."""
        if self._progress:
            self._progress = False
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()

    def _line(self, line: str, color: str | None) -> None:
        self.clear_progress()
        colored = self.color == "always" or (self.color == "auto" and sys.stderr.isatty())
        write_error(click.style(line, fg=color) if colored and color else line)
