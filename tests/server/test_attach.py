import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socket import SHUT_WR, create_server

import pytest
from server.processes import ENVIRONMENT
from server.test_openai_client import ORDER, SCHEMA

from coli.cli.chat import _asked_of_server
from coli.errors import OptionError
from coli.options import DraftOptions, GenerateOptions, SamplerOptions, resolve
from coli.remote import RemoteConversation, RemoteError

OPTIONS = GenerateOptions(max_tokens=12, sampler=SamplerOptions(temperature=0.9, seed=4))


def test_an_attached_chat_says_what_the_server_says_and_errors_keep_the_conversation(server):
    remote = RemoteConversation(server.url, None, {"temp", "seed", "ngen"})
    said = "".join(remote.ask("hello", OPTIONS))
    answer = server.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "hello"}], temperature=0.9, seed=4, max_tokens=12
    )
    assert said == answer.choices[0].message.content
    assert len(remote.messages) == 2
    with pytest.raises(RemoteError, match="the context is 512"):
        list(remote.ask("long " * 600, OPTIONS))
    assert len(remote.messages) == 2


def test_a_server_that_is_not_there_is_one_line():
    remote = RemoteConversation("http://127.0.0.1:9", None, ())
    with pytest.raises(RemoteError, match=r"127\.0\.0\.1:9"):
        list(remote.ask("hello", OPTIONS))
    assert remote.messages == []


@contextmanager
def one_answer(data: bytes) -> Iterator[str]:
    """A server that says `data` to whoever comes first and hangs up."""

    def serve() -> None:
        client, _ = listener.accept()
        with client, suppress(ConnectionError):  # whoever has heard enough may leave as it likes
            client.recv(65536)
            client.sendall(data)
            client.shutdown(SHUT_WR)
            while client.recv(65536):  # what is left unread would turn the end into a reset
                pass

    with create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PIECE = b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEAD + b"\r\n" + PIECE, "broke off"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n" + PIECE[:20], "broke off"),
        (b"SSH-2.0-nobody\r\n", "no answer of a server"),
        (HEAD + b"\r\n<html></html>\n", "broke off"),
        (HEAD + b"\r\ndata: [1]\n\n", "expected the events"),
        (HEAD + b'\r\ndata: {"error": {"message": "overloaded"}}\n\n', "overloaded"),
    ],
)
def test_an_answer_that_is_none_or_breaks_off_is_an_error_and_not_remembered(data: bytes, words: str):
    with one_answer(data) as url:
        remote = RemoteConversation(url, None, ())
        with pytest.raises(RemoteError, match=words):
            list(remote.ask("hello", OPTIONS))
    assert remote.messages == []


@pytest.mark.parametrize("url", ["foo", "", "ftp://x", "file:///etc/passwd", "http://"])
def test_an_address_of_no_server_is_refused(url: str):
    with pytest.raises(OptionError, match="--attach"):
        RemoteConversation(url, None, ())


def test_thinking_and_grammars_are_sent_along_and_what_is_the_servers_own_is_said(start, tmp_path):
    grammar, schema = tmp_path / "g.gbnf", tmp_path / "s.json"
    grammar.write_text('root ::= "yes" | "no"')
    schema.write_text(json.dumps(SCHEMA))
    wanted = {"enable_thinking": False, "grammar": grammar.read_text()}
    assert _asked_of_server(resolve({"think": False, "grammar": str(grammar)}, {})) == wanted
    assert _asked_of_server(resolve({}, {"SCHEMA": str(schema)})).keys() == {"grammar"}
    assert _asked_of_server(resolve({}, {})) == {}
    with pytest.raises(OptionError, match="one of the two"):
        _asked_of_server(resolve({"grammar": str(grammar), "schema": str(schema)}, {}))
    server = start(slots=1, drafts=DraftOptions(gate="always"))
    flags = ("--schema", schema, "--no-think", "--ctx", "100", "--temp", "0", "--ngen", "20")
    command = [sys.executable, "-m", "coli", "chat", "--attach", f"{server.url}/v1", *flags]
    done = subprocess.run(command, input=f"{ORDER[0]['content']}\n", capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "coli: --ctx: the server has its own; no effect with --attach\n"
    assert server.worker.draft_counters()["grammar"]["proposed"] > 0


def test_what_nobody_gave_is_left_to_the_server():
    remote = RemoteConversation("http://127.0.0.1:9", None, ())
    assert set(remote._body(OPTIONS)) == {"stream", "messages"}
    longer = GenerateOptions(max_tokens=13, ignore_eos=True, sampler=OPTIONS.sampler)
    assert remote._body(longer)["max_tokens"] == 13
    assert remote._body(longer)["ignore_eos"] is True
