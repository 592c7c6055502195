"""Where the prompt comes from: arguments, the variable PROMPT, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from coli.errors import OptionError
from coli.setting_values import utf8

STDIN_CAP = 64 * 2**20  # bytes


def read_prompt(arguments: Sequence[str], variable: str | None) -> str:
    """The prompt: arguments joined by spaces (one `-` among them stands for standard input), else the variable,
    else standard input if it is not a terminal. Raises OptionError when there is nothing.
    """
    if arguments:
        if list(arguments).count("-") > 1:
            raise OptionError("the prompt has more than one - for standard input; give one")
        return " ".join(_read_stdin() if part == "-" else _checked(part, "the prompt") for part in arguments)
    if variable is not None:
        return _checked(variable, "PROMPT")
    text = "" if sys.stdin.isatty() else _read_stdin()
    if not text:
        raise OptionError("no prompt: give it as arguments, in PROMPT or on standard input")
    return text


def _read_stdin() -> str:
    """All of standard input without the newline that ends its last line, as the shell's $(...) would give it."""
    data = sys.stdin.buffer.read(STDIN_CAP + 1)
    if len(data) > STDIN_CAP:
        raise OptionError(f"standard input: more than {STDIN_CAP} bytes is no prompt")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"standard input: not UTF-8 text (byte {error.start})") from None


def _checked(text: str, where: str) -> str:
    try:
        return utf8(text)
    except ValueError:
        raise OptionError(f"{where}: not UTF-8 text") from None
