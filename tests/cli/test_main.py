import ast
import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coli import __version__
from coli.options import BY_NAME

ROOT = Path(__file__).parent.parent.parent
WITH_FAKE = (
    "import sys; sys.path[:0] = [sys.argv.pop(1)]; from cli import fake_llm; sys.modules['coli.llm'] = fake_llm; "
    "fake_llm.behaviour.endless = '--endless' in sys.argv and (sys.argv.remove('--endless') or True); "
    "from coli.cli.main import main; main()"
)


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


def test_text_is_flushed_as_it_comes(model):
    with start("run", "--model", model, "--quiet", "--endless", "hi", stdout=subprocess.PIPE) as process:
        started = time.monotonic()
        assert process.stdout.read(30).startswith(b"Paris is ")
        assert time.monotonic() - started < 300
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
