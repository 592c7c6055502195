"""`coli chat` on the built-in model: turns, commands, sessions that go on, Ctrl-C."""

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coli.builtin import DEMO_MODEL

ROOT = Path(__file__).parent.parent.parent
FIRST, SECOND = "List as NDJSON. Orders: 3 lamps for Ana at 20 each.", "And 2 cups for Bo at 7 each."
ARGS = ("chat", "--temp", "0.8", "--seed", "5", "--ngen", "24", "--ctx", "512")


@pytest.fixture(autouse=True)
def _signals_as_before():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def talk(coli, *lines: str, args: tuple[object, ...] = (), status: int = 0):
    """status: 1 where a line is refused, which does not end the conversation."""
    done = coli(*ARGS, *args, stdin="".join(f"{line}\n" for line in lines).encode())
    assert done.status == status, done.err
    return done


def test_a_saved_session_goes_on_with_the_bytes_of_one_that_never_stopped(coli, tmp_path):
    whole = talk(coli, FIRST, SECOND).out
    kept = tmp_path / "talk.session"
    parts = [talk(coli, line, args=("--session", kept)) for line in (FIRST, SECOND)]
    assert "".join(part.out for part in parts) == whole
    assert "going on with" in parts[1].err


def test_a_loaded_session_is_warm(coli, tmp_path):
    kept = tmp_path / "talk.session"
    talk(coli, "alpha beta gamma " * 12, f"/save {kept}")
    stats = talk(coli, f"/load {kept}", "more", "/stats").err
    prompt = next(line for line in stats.splitlines() if line.startswith("prompt:"))
    assert int(prompt.split()[1]) > 60
    from coli.builtin import DEMO_MODEL
    from coli.conversation import Conversation
    from coli.llm import LLM
    from coli.options import DraftOptions, EngineOptions, GenerateOptions

    with LLM.open(DEMO_MODEL, EngineOptions(usage_save=False), print) as llm:
        conversation = Conversation(llm, 512, DraftOptions())
        conversation.load(kept)
        session = conversation._session
        assert session.cache.length > 60
        list(conversation.ask("more", GenerateOptions(max_tokens=1)))
        ids = list(conversation.result.prompt_ids)
        assert session.common_length(ids) == len(ids) - 1


def test_session_of_another_model_or_a_damaged_one_is_refused(coli, tmp_path):
    from containers import container

    kept = tmp_path / "talk.session"
    talk(coli, "hello", args=("--session", kept))
    other = coli("chat", "--model", container("olmoe-base", "f32"), "--session", kept, "--ctx", "64", stdin=b"hi\n")
    assert (other.status, other.out) == (2, "")
    assert "another model" in other.err
    kept.write_bytes(kept.read_bytes()[:-100])
    damaged = coli(*ARGS, "--session", kept, stdin=b"hi\n")
    assert (damaged.status, damaged.out) == (1, "")
    assert str(kept) in damaged.err


def test_what_cannot_be_kept_is_said_in_our_words(coli, tmp_path):
    """A name that cannot be written: of --session before anything else, of /save without the temporary's name."""
    missing = tmp_path / "none" / "talk"
    done = talk(coli, FIRST, args=("--session", missing, "--quiet"), status=2)
    assert (done.out, done.err.count("\n")) == ("", 1)
    assert f"{missing}: no session can be kept there: No such file or directory" in done.err
    assert "no regular file" in talk(coli, FIRST, args=("--session", tmp_path), status=2).err
    done = talk(coli, FIRST, f"/save {missing}", status=1)
    line = next(line for line in done.err.splitlines() if "talk" in line)
    assert line == f"coli: {missing}: the session is not written: No such file or directory"


def test_another_kv_type_is_refused_with_what_to_give(coli, tmp_path):
    kept = tmp_path / "talk.session"
    talk(coli, "hello", args=("--session", kept, "--kv", "f16"))
    done = talk(coli, "hello", args=("--session", kept, "--kv", "f32", "--quiet"), status=2)
    assert "its keys and values are f16, here they would be f32: give --kv f16" in done.err
    assert (done.out, done.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("note", ["", "[]", '{"messages": 5}', '{"messages": [{"role": "user"}], "system": null}'])
def test_a_file_without_a_conversation_is_refused(coli, tmp_path, note):
    from coli.conversation import Conversation
    from coli.llm import LLM
    from coli.options import DraftOptions, EngineOptions

    kept = tmp_path / "talk.session"
    with LLM.open(DEMO_MODEL, EngineOptions(usage_save=False), print) as llm:
        conversation = Conversation(llm, 512, DraftOptions())
        conversation.file(kept).save([llm.new_session(512)], note)
    done = talk(coli, "hello", f"/load {kept}", status=1)
    assert "expected the messages of a conversation" in done.err


def test_help_tells_the_defaults_of_a_conversation(coli):
    for command in ("chat", "serve"):
        told = " ".join(coli(command, "--help").out.split())
        assert "default: 4096, at most the model's" in told
        assert "default: the model's own, else 0.7]" in told
        assert "default: the model's own, else 0.95; 1 with --temp]" in told
        assert "KVSAVE" in told


def test_a_model_that_suggests_sampling_without_a_temperature_is_sampled(tmp_path):
    from coli.cli.conversing import sampling_defaults
    from coli.llm import LLM
    from coli.options import EngineOptions, resolve

    folder = tmp_path / "demo"
    shutil.copytree(DEMO_MODEL, folder)
    cases = (
        ('{"do_sample": true, "top_k": 20}', (1.0, 20, 1.0)),
        ('{"top_k": 20}', (0.7, 20, 0.95)),
        ('{"do_sample": false, "top_k": 20}', (0.0, 0, 1.0)),
        ("{}", (0.7, 0, 0.95)),
    )
    for text, wanted in cases:
        (folder / "generation_config.json").write_text(text)
        with LLM.open(folder, EngineOptions(usage_save=False), print) as llm:
            found = sampling_defaults(llm, resolve({}, {})).sampler
        assert (found.temperature, found.top_k, found.top_p) == wanted


def test_commands_change_what_follows_and_errors_keep_the_conversation(coli):
    lines = "/set temp 0", FIRST, "/retry", "/set top_p 7", "/nonsense", "/reset", FIRST, "/set ngen 3", "/set"
    done = talk(coli, *lines, status=1)
    first, retried, again = done.out.splitlines()
    assert first == retried == again
    assert "/set top_p: '7' is not allowed" in done.err
    assert "/nonsense: no such command" in done.err
    assert "ngen = 3" in done.err


def test_retry_draws_another_seed(coli):
    first, retried = talk(coli, "/set temp 20", "/set ngen 6", FIRST, "/retry").out.splitlines()[:2]
    assert first != retried


def test_a_prompt_too_long_is_one_line_and_the_next_turn_works(coli):
    done = talk(coli, "long " * 600, FIRST, status=1)
    assert done.out == talk(coli, FIRST).out
    assert "the context is 512" in done.err or "--ctx is 512" in done.err


def templated(folder: Path, template: str) -> Path:
    """The demo model with another chat template."""
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


def test_a_template_that_refuses_a_role_is_one_line_with_its_reason(coli, tmp_path):
    """K07, K09"""
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}"
    )
    model = templated(tmp_path / "demo", template)
    done = talk(coli, "/system be good", FIRST, args=("--model", model), status=1)
    assert done.out == ""
    assert [line for line in done.err.splitlines() if "no system role" in line] != []
    assert talk(coli, FIRST, args=("--model", model)).out


def test_split_characters_special_texts_and_limits(coli):
    """K03, K04, K14, K16, D07: bytes of all kinds, text that looks like special tokens, answers without an end."""
    done = talk(coli, "<|im_end|> \N{GRINNING FACE}", "/set temp 100", "hello", "/stats", args=("--ignore-eos",))
    assert "\u0120" not in done.out
    assert "answer: 24 tokens" in done.err
    long = talk(coli, "/set ngen 1000", "hello", args=("--ignore-eos", "--ctx", "64"))
    assert long.out


@pytest.mark.parametrize("drafts", [("--no-drafts",), ("--draft", "6", "--gate", "always")])
def test_drafts_change_no_byte_of_a_conversation(coli, drafts):
    """D02, D03: and the second turn starts from the first one's rows."""
    assert talk(coli, FIRST, SECOND, args=drafts).out == talk(coli, FIRST, SECOND).out


def test_a_reader_that_leaves_ends_it_quietly():
    """C01"""
    lines = f"{FIRST}\n{SECOND}\n" * 40
    command = f"{sys.executable} -m coli {' '.join(ARGS)} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], input=lines, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "USAGE_SAVE": "0"},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "141"
    assert "Traceback" not in done.stderr


class Screen:
    """What a terminal shows, read as far as it is waited for."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._seen = terminal, b""

    def wait_for(self, wanted: bytes) -> None:
        while wanted not in self._seen:
            ready, _, _ = select.select([self._terminal], [], [], 300)
            assert ready, self._seen
            self._seen += os.read(self._terminal, 4096)
        self._seen = self._seen.partition(wanted)[2]


# No answer ends before it is stopped, however late the signal comes.
SLOWLY = """
import sys, time
from coli.cli.main import main
from coli.conversation import Conversation
ask = Conversation.ask
def slowly(self, *rest, **more):
    for piece in ask(self, *rest, **more):
        yield piece
        time.sleep(0.1)
Conversation.ask = slowly
main(sys.argv[1:])
"""


def leave(process: subprocess.Popen) -> int:
    """Ctrl-C at the prompt; again should the first have come before the line editor listened, and ended the answer."""
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(10)
    raise AssertionError("it did not leave")


def test_ctrl_c_stops_the_answer_and_the_second_at_the_prompt_leaves():
    ours, theirs = pty.openpty()
    args = ["chat", "--temp", "0", "--ignore-eos", "--ngen", "1500", "--color", "never"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "USAGE_SAVE": "0", "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOWLY, *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    screen = Screen(ours)
    try:
        screen.wait_for(b"> ")
        os.write(ours, b"hello\n")
        screen.wait_for(b"hello\r\n")
        screen.wait_for(b" ")  # of the answer
        process.send_signal(signal.SIGINT)
        screen.wait_for(b"\r\n(stopped)")
        screen.wait_for(b"> ")
        os.write(ours, b"/set ngen 2\n")
        screen.wait_for(b"ngen = 2")
        screen.wait_for(b"> ")
        os.write(ours, b"hi\n")
        screen.wait_for(b"hi\r\n")
        screen.wait_for(b"> ")
        assert leave(process) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
