import ast
import dataclasses
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coli import __version__
from coli.settings_table import BY_NAME

ROOT = Path(__file__).parent.parent.parent
WITH_FAKE = (
    "import sys; sys.path[:0] = [sys.argv.pop(1)]; from cli import fake_llm; sys.modules['coli.llm'] = fake_llm; "
    "fake_llm.behaviour.endless = '--endless' in sys.argv and (sys.argv.remove('--endless') or True); "
    "from coli.cli.main import main; main()"
)

# Says one word, then computes for long without looking at signals, as a kernel does.
DEAF = """
import hashlib, os, sys
sys.path[:0] = [sys.argv.pop(1)]
from cli import fake_llm
sys.modules["coli.llm"] = fake_llm
def pieces():
    yield "Paris"
    os.write(1, b"!")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
fake_llm.behaviour.pieces = pieces()
from coli.cli.main import main
main()
"""
# A library warns, as numba does where it finds no semaphores.
WARNING = """
import sys, warnings
sys.path[:0] = [sys.argv.pop(1)]
from cli import fake_llm
sys.modules["coli.llm"] = fake_llm
def pieces():
    warnings.warn("look here", RuntimeWarning)
    yield "Paris"
fake_llm.behaviour.pieces = pieces()
from coli.cli.main import main
main()
"""
# Ctrl-C arrives in a callback from C, where the compiler of the kernels makes them and exceptions are dropped.
CALLBACK = """
import ctypes, signal, sys
sys.path[:0] = [sys.argv.pop(1)]
from cli import fake_llm
sys.modules["coli.llm"] = fake_llm
def pieces():
    yield "Paris"
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
    yield "London"
fake_llm.behaviour.pieces = pieces()
from coli.cli.main import main
main()
"""
# Ctrl-C arrives while the command line is being imported.
EARLY = """
import os, signal, sys
sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "coli.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from coli.cli.entry import main
main()
"""


def start(*args, code=WITH_FAKE, before=(), **kwargs):
    command = [*before, sys.executable, "-c", code, str(ROOT / "tests"), *map(str, args)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=ROOT, **kwargs)


def test_version(coli):
    assert coli("--version").out == f"coli {__version__}\n"


def test_python_m_coli_is_the_same():
    done = subprocess.run([sys.executable, "-m", "coli", "--version"], capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.decode() == f"coli {__version__}\n"


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["-h"], ["convert", "--help"], ["info", "--help"]])
def test_help_is_on_stdout(coli, args):
    done = coli(*args)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("Usage: coli")


@pytest.mark.parametrize("files", [7, 8])
def test_too_few_files_is_one_line(files):
    done = subprocess.run(
        [sys.executable, "-m", "coli", "run", "--quiet", "--ngen", "2", "hi"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
    )
    if done.returncode:  # how many are enough depends on the libraries
        assert done.stderr.decode().startswith("coli: too many open files: ")
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_no_command_shows_the_help_on_stderr(coli):
    done = coli()
    assert (done.status, done.out) == (2, "")
    assert "convert" in done.err


@pytest.mark.parametrize("args", [["nosuch"], ["run", "--nosuch", "x"], ["run", "--ngen"], ["convert", "x"]])
def test_usage_errors_are_one_line_and_status_2(coli, args):
    done = coli(*args)
    assert (done.status, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "--help" in done.err


def test_flag_of_a_later_version_is_refused_by_name(coli, monkeypatch):
    monkeypatch.setitem(BY_NAME, "ngen", dataclasses.replace(BY_NAME["ngen"], later="numbers"))
    done = coli("run", "--ngen", "3", "hi")
    assert (done.status, done.err) == (2, "coli: --ngen: this version does not have numbers yet; leave it out\n")


def test_version_and_help_import_no_kernels():
    code = (
        "import sys; sys.argv[1:] = sys.argv[2:]\n"
        "from coli.cli import main\n"
        "assert main.run(sys.argv[1:]) == 0\n"
        "print([n for n in ('numba', 'numpy', 'tokenizers', 'jinja2') if n in sys.modules])"
    )
    for args in (["--version"], ["--help"], ["run", "--help"]):
        with start(*args, code=code, stdout=subprocess.PIPE) as process:
            out, err = process.communicate()
        assert ast.literal_eval(out.decode().splitlines()[-1]) == [], err


def test_windows_is_refused_with_one_line(coli, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    done = coli("--version")
    assert done.status == 1
    assert "Windows is not supported" in done.err


def test_reader_that_leaves_ends_the_run_quietly_with_141(model):
    with start("run", "--model", model, "--quiet", "--endless", "hi", stdout=subprocess.PIPE) as process:
        assert process.stdout.read(5) == b"Paris"
        process.stdout.close()
        assert process.wait(timeout=300) == 141
        assert process.stderr.read() == b""


@pytest.mark.parametrize("closed", [(1,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_streams_end_the_run_quietly_with_141(model, closed):
    redirections = " ".join(f"{number}>&-" for number in closed)
    shell = ["sh", "-c", f'exec "$@" {redirections}', "sh"]
    with start("run", "--model", model, "--quiet", "hi", before=shell) as process:
        assert process.wait(timeout=300) == 141
        assert process.stderr.read() == b""


def test_full_disk_behind_stdout_is_one_line_and_status_1(model):
    with (
        open("/dev/full", "wb") as full,
        start("run", "--model", model, "--quiet", "hi", stdout=full) as process,
    ):
        assert process.wait(timeout=300) == 1
        assert process.stderr.read() == b"coli: standard output: No space left on device\n"


def test_interrupt_ends_the_run_with_130_and_keeps_the_text_so_far(model):
    with start("run", "--model", model, "--quiet", "--endless", "hi", stdout=subprocess.PIPE) as process:
        assert process.stdout.read(5) == b"Paris"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130
        assert process.stderr.read() == b""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_quiet_and_told_by_the_status(model, number):
    with start("run", "--model", model, "--quiet", "--endless", "hi", stdout=subprocess.PIPE) as process:
        assert process.stdout.read(5) == b"Paris"
        process.send_signal(number)
        assert process.wait(timeout=300) == 128 + number
        assert process.stderr.read() == b""


def test_the_second_interrupt_ends_a_kernel_that_does_not_listen(model):
    deaf = False
    while not deaf:
        with start("run", "--model", model, "--quiet", "hi", stdout=subprocess.PIPE, code=DEAF) as process:
            assert process.stdout.read(6) == b"Paris!"
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=1)  # ends where the kernel had not quite begun: then once more
            except subprocess.TimeoutExpired:
                deaf = True
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 130
            assert process.stderr.read() == b""


@pytest.mark.parametrize(("debug", "shown"), [("", False), ("1", True)])
def test_warnings_of_libraries_are_for_debugging(model, debug, shown):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {"COLI_DEBUG": debug}
    with start("run", "--model", model, "--quiet", "hi", stdout=subprocess.PIPE, code=WARNING, env=environ) as process:
        assert process.wait(timeout=300) == 0
        assert (b"RuntimeWarning: look here" in process.stderr.read()) == shown


def test_interrupt_in_a_callback_from_c_is_not_lost(model):
    with start("run", "--model", model, "--quiet", "hi", stdout=subprocess.PIPE, code=CALLBACK) as process:
        assert process.wait(timeout=300) == 130
        assert (process.stdout.read(), process.stderr.read()) == (b"Paris", b"")


def test_interrupt_during_the_imports_is_quiet(model):
    with start("run", "--model", model, "hi", stdout=subprocess.PIPE, code=EARLY) as process:
        assert process.wait(timeout=300) == 130
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


def test_ignored_signals_stay_ignored(model):
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    with start("run", "--model", model, "--quiet", "--endless", "hi", stdout=subprocess.PIPE, before=shell) as process:
        assert process.stdout.read(5) == b"Paris"
        process.send_signal(signal.SIGHUP)
        assert len(process.stdout.read(200_000)) == 200_000
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130


def test_text_is_flushed_as_it_comes(model):
    with start("run", "--model", model, "--quiet", "--endless", "hi", stdout=subprocess.PIPE) as process:
        assert process.stdout.read(30).startswith(b"Paris is ")  # the answer has no end
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
