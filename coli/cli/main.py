"""The entry point: finds the command, runs it, and turns whatever goes wrong into one line and an exit status.

Commands are imported only when they are used, so `coli --version` and `--help` stay fast. Exit status: 0 ok, 1 failure,
2 usage or a refused setting, 130 interrupted, 141 output closed, 143 terminated. No traceback unless COLI_DEBUG asks
for it.
"""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType

import click

from coli import __version__
from coli.cli import entry
from coli.cli.streams import one_line, write_error
from coli.errors import ColiError
from coli.options import debug_wanted

INTERRUPTED, OUTPUT_CLOSED = 130, 141
_ENOUGH_FILES = 64
_FEW_FILES = f"too many open files: this process may not open more (`ulimit -n`); {_ENOUGH_FILES} are enough"

# name -> (module in coli.cli that defines `command`, line for --help)
COMMANDS = {
    "run": ("run", "Answer one prompt."),
    "chat": ("chat", "Talk with a model."),
    "serve": ("serve", "Answer an OpenAI-compatible API."),
    "batch": ("batch", "Answer a file of requests, restartable."),
    "demo": ("demo", "See the built-in model draft and stream."),
    "bench": ("bench", "Measure a model's speed in llama-bench's terms."),
    "pull": ("pull", "Fetch a model and keep it by name."),
    "convert": ("convert", "Turn a model folder into a coli container."),
    "plan": ("plan", "Show what a model needs and how fast it may run here."),
    "doctor": ("doctor", "Find what is wrong here and say what to do."),
    "info": ("info", "Show what a container holds."),
    "trace": ("trace", "Answer one prompt and keep which experts it used."),
    "replay": ("replay", "Judge cache policies and budgets on a trace."),
    "corpus": ("corpus", "Make and inspect corpora of token ids to draft from."),
    "graph": ("graph", "Make and inspect n-gram graphs to draft from."),
    "grammar": ("grammar", "Explain grammars and schemas to draft from."),
}


class _Commands(click.Group):
    """A group that imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"coli.cli.{COMMANDS[name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Settings can also come from the environment: docs/settings.md. COLI_DEBUG=1 shows tracebacks.",
)
@click.version_option(__version__, prog_name="coli", message="%(prog)s %(version)s")
def cli() -> None:
    """Run Mixture-of-Experts models that are larger than RAM, on a CPU and a disk."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit status."""
    _fill_closed_streams()
    _install_signals()
    if not sys.warnoptions and not debug_wanted():
        warnings.simplefilter("ignore")  # those of libraries: standard error is for our lines
    cli._main_shell_completion({}, "coli")  # when a shell asks (_COLI_COMPLETE), it answers and leaves
    status = run(sys.argv[1:] if args is None else args)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or OUTPUT_CLOSED
    except OSError as error:
        status = status or _fail(f"standard output: {error.strerror}", 1)
    if status:
        _point_at_nothing(1)  # else the interpreter would try to flush, and complain, once more
    sys.exit(status)


def run(args: Sequence[str]) -> int:
    """Run the command line and return its exit status; everything there is to say has been said."""
    if sys.platform == "win32":
        return _fail("Windows is not supported; use Linux, for example in WSL 2", 1)
    try:
        # Not cli.main(): that would turn a closed pipe and Ctrl-C into exit statuses of its own.
        with cli.make_context("coli", list(args)) as context:
            cli.invoke(context)
        return 0
    except _Stopped as stopped:
        return 128 + stopped.number
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        return _refuse(error)
    except BrokenPipeError:
        return OUTPUT_CLOSED
    except ColiError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        if _files_ran_out(error):
            return _fail(_FEW_FILES, 1)
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}", 1)
    except MemoryError:
        return _fail("out of memory; lower --ram or --ctx", 1)
    except Exception as error:
        if _files_ran_out(error):
            return _fail(_FEW_FILES, 1)
        reason = f"internal error: {type(error).__name__}: {error}"
        return _fail(reason + ("" if debug_wanted() else " (COLI_DEBUG=1 shows where)"), 1)


def _files_ran_out(error: BaseException) -> bool:
    """Whether it comes from a refusal to open one more file; libraries hide that behind errors of their own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EMFILE:
            return True
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, OSError):
        return False
    import resource  # not on Windows, which is refused before this can be reached

    return os.strerror(errno.EMFILE) in str(error) or resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _ENOUGH_FILES


def _fail(message: str, status: int) -> int:
    if debug_wanted():
        traceback.print_exc()
    write_error(f"coli: {one_line(message)}")
    return status


def _refuse(error: click.ClickException) -> int:
    """A usage error of click as one line that names the command whose help tells more."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        write_error(error.format_message())
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "coli"
    if isinstance(error, click.NoSuchOption):
        hint = f" (text that begins with - goes behind --; {command} --help lists the options)"
    else:
        hint = f" ({command} --help tells more)"
    message = error.format_message().rstrip(".")
    return _fail(f"{message[:1].lower()}{message[1:]}{hint}", 2)


class _Stopped(KeyboardInterrupt):
    """Ctrl-C, or a polite request to end; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _install_signals() -> None:
    """The first signal raises _Stopped, so that files are closed; the second ends the process at once.

    Python runs handlers between its own instructions only. A kernel may keep it for seconds, so a thread of its own
    hears of the second signal.
    """
    pairs: dict[signal.Signals, tuple[object, ...]] = {
        signal.SIGINT: (signal.default_int_handler, entry.leave),
        signal.SIGTERM: (signal.SIG_DFL,),
    }
    if hasattr(signal, "SIGHUP"):
        pairs[signal.SIGHUP] = (signal.SIG_DFL,)
    ours = [number for number, usual in pairs.items() if signal.getsignal(number) in usual]
    if not ours or threading.current_thread() is not threading.main_thread():
        return  # ignored by whoever started us, or not our business

    def stop(number: int, frame: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, entry.leave)
        raise _Stopped(number)

    def lost(raised: sys.UnraisableHookArgs, report: Callable[[sys.UnraisableHookArgs], object]) -> None:
        if isinstance(raised.exc_value, _Stopped):  # inside a callback of the compiler: nobody above will see it
            os._exit(128 + raised.exc_value.number)
        report(raised)

    sys.unraisablehook = functools.partial(lost, report=sys.unraisablehook)
    for number in ours:
        signal.signal(number, stop)
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_leave_at_the_second, args=(heard, ours), name="coli-signals", daemon=True).start()


def _leave_at_the_second(heard: int, numbers: Sequence[int]) -> None:
    stops = 0
    while byte := os.read(heard, 1):
        stops += byte[0] in numbers
        if stops > 1:
            os._exit(128 + byte[0])


def _fill_closed_streams() -> None:
    """Give standard streams that were closed a file again, so that no model file gets their number.

    Standard output becomes a pipe nobody reads: writing to it fails as it does when a reader has left.
    """
    if sys.stdin is None:
        _point_at_nothing(0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        for end in {reader, writer} - {1}:
            os.close(end)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        _point_at_nothing(2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _point_at_nothing(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
