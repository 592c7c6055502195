"""`coli serve --session`: conversations in memory outlive the server, bit for bit, or the file is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server.faults import PATIENCE, until
from server.processes import ENVIRONMENT, serving

from coli.builtin import DEMO_MODEL
from coli.conversation import Conversation
from coli.errors import CheckpointError, OptionError, WriteError
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions
from coli.server import slots, worker

FIRST = {"messages": [{"role": "user", "content": "alpha beta gamma " * 12}], "seed": 3, "max_tokens": 12}
MODES = [{"temperature": 0}, {"temperature": 1.1}]


def ask(url: str, body: dict) -> dict:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def second(answer: dict) -> dict:
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    return {**FIRST, "messages": [*FIRST["messages"], said, {"role": "user", "content": "go on"}]}


@pytest.fixture(scope="module")
def kept(start, tmp_path_factory) -> Path:
    """The file of a server that was asked FIRST and something else, and stopped."""
    path = tmp_path_factory.mktemp("kept") / "sessions"
    server = start(session=path)
    ask(server.url, FIRST)
    ask(server.url, {"messages": [{"role": "user", "content": "other words"}], "max_tokens": 3})
    assert not path.exists()
    server.stop()
    return path


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_reopened_server_goes_on_with_the_bytes_of_one_that_never_stopped(start, server, tmp_path, mode):
    first = ask(server.url, {**FIRST, **mode})
    whole = ask(server.url, {**second(first), **mode})
    path = tmp_path / "sessions"
    stopping = start(session=path)
    assert ask(stopping.url, {**FIRST, **mode})["choices"] == first["choices"]
    stopping.stop()
    again = start(session=path)
    assert "1 conversation, " in again.notices[0]
    props = httpx.get(f"{again.url}/props", timeout=PATIENCE).json()
    assert (props["session"], props["session_restored_tokens"] > 100) == (str(path), True)
    answer = ask(again.url, {**second(first), **mode})
    assert answer["choices"] == whole["choices"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert f"coli_cached_prompt_tokens_total {cached}.0" in httpx.get(f"{again.url}/metrics", timeout=PATIENCE).text


def test_what_was_used_last_is_kept_longest_also_behind_a_restart(start, kept, tmp_path):
    path = shutil.copy(kept, tmp_path / "sessions")
    server = start(session=path, slots=2)
    ask(server.url, {"messages": [{"role": "user", "content": "something new"}], "max_tokens": 1})
    cached = [
        ask(server.url, {**body, "max_tokens": 1})["usage"]["prompt_tokens_details"]["cached_tokens"]
        for body in ({"messages": [{"role": "user", "content": "other words"}]}, FIRST)
    ]
    assert cached[0] > cached[1]
    server.stop()


def test_an_idle_server_writes_what_is_cheap_and_one_that_was_asked_nothing_writes_nothing(
    start, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker, "SAVE_SECONDS", 0.01)
    path = tmp_path / "sessions"
    server = start(session=path)
    ask(server.url, FIRST)
    until(path.exists)
    before = path.stat().st_mtime_ns
    server.stop()
    assert path.stat().st_mtime_ns == before
    monkeypatch.setattr(slots, "CHEAP_BYTES", 0)
    dear = start(session=tmp_path / "other")
    ask(dear.url, FIRST)
    assert not dear.worker.slots.worth_saving
    dear.stop()
    assert (tmp_path / "other").exists()


def test_a_file_that_can_not_be_written_any_more_is_a_line_and_an_error_at_the_end(start, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    server = start(session=folder / "sessions")
    ask(server.url, FIRST)
    folder.rmdir()
    server.worker.slots.save_idle()
    assert server.notices == [f"{folder / 'sessions'}: the session is not written: No such file or directory"]
    ask(server.url, FIRST)
    with pytest.raises(WriteError):
        server.worker.stop()
    folder.mkdir()
    server.stop()
    assert (folder / "sessions").exists()


def damaged(path: Path, fault: str) -> None:
    data = bytearray(path.read_bytes())
    if fault == "cut":
        del data[-100:]
    elif fault == "flipped":
        data[-100] ^= 1
    elif fault == "longer":
        data += b"more"
    elif fault == "empty":
        data.clear()
    else:
        header = int.from_bytes(data[:8], "little")
        table = json.loads(data[8 : 8 + header])
        {"no digest": lambda: table["__metadata__"].pop("digest"),
         "many": lambda: table["__metadata__"].update(sessions="9" * 5000),
         "more": lambda: table["__metadata__"].update(sessions="3"),
         "note": lambda: table["__metadata__"].update(note="x"),
         "renamed": lambda: table.update({"0.kays": table.pop("0.keys")})}[fault]()  # fmt: skip
        text = json.dumps(table).encode()
        data[: 8 + header] = len(text).to_bytes(8, "little") + text
    path.write_bytes(data)


FAULTS = ["cut", "flipped", "longer", "empty", "no digest", "many", "more", "note", "renamed"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_refused_and_left_as_it_is(start, kept, tmp_path, fault):
    path = shutil.copy(kept, tmp_path / "sessions")
    damaged(path, fault)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"sessions: .*name another file") as refused:
        start(session=path)
    assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context": 64}, "raise --ctx"),
        ({"slots": 1}, "raise --slots"),
        ({"engine": EngineOptions(kv="f32", usage_save=False, gate_save=False)}, "give --kv f16"),
    ],
    ids=["context", "slots", "kv"],
)
def test_other_settings_are_refused_with_what_to_give(start, kept, settings, words):
    with pytest.raises(OptionError, match=words):
        start(session=kept, **settings)


def test_files_of_others_are_refused(start, kept, tmp_path):
    from containers import container

    with pytest.raises(OptionError, match="another model"):
        start(session=kept, model=container("olmoe-base", "f32"), context=64)
    with LLM.open(DEMO_MODEL, EngineOptions(usage_save=False, gate_save=False), print) as llm:
        talk = Conversation(llm, 512, DraftOptions())
        list(talk.ask("hello", GenerateOptions(max_tokens=2)))
        talk.save(tmp_path / "talk")
        with pytest.raises(OptionError, match="kept by coli serve, this is coli chat"):
            talk.load(kept)
    with pytest.raises(OptionError, match="kept by coli chat, this is coli serve"):
        start(session=tmp_path / "talk")
    foreign = next(DEMO_MODEL.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match="found another"):
        start(session=shutil.copy(foreign, tmp_path / "weights"))
    with pytest.raises(OptionError, match="no regular file"):
        start(session=tmp_path)
    with pytest.raises(OptionError, match="No such file or directory; name a file in a folder"):
        start(session=tmp_path / "none" / "sessions")


def test_a_process_keeps_its_conversations_when_a_signal_ends_it(tmp_path):
    path = tmp_path / "sessions"
    with serving("--session", path) as (url, _):
        first = ask(url, FIRST)
    path.chmod(0o600)
    with serving("--session", path) as (url, _):
        assert httpx.get(f"{url}/props", timeout=PATIENCE).json()["session_restored_tokens"] > 100
        assert ask(url, second(first))["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    damaged(path, "cut")
    command = [sys.executable, "-m", "coli", "serve", "--port", "0", "--quiet", "--session", path]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"coli: {path}: ")
