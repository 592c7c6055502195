"""`coli serve` as a process: the graph tool's flags, and what ends it."""

import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server.faults import PATIENCE
from server.processes import ENVIRONMENT, serving

from coli.builtin import DEMO_MODEL
from coli.errors import GrammarError
from coli.server.log import told
from coli.speculant import Client, ServerError

ORDER = "List as NDJSON. Orders: 3 lamps for Ana at 20 each. 2 cups for Bo at 7 each."


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    (folder / "text").write_text('{"customer":"Ana","item":"lamp","qty":3,"price":20}\n' * 40)
    command = [sys.executable, "-m", "coli", "graph", "build", "text", "-o", "graph.pkl", "--model", DEMO_MODEL]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return folder / "graph.pkl"


def test_the_graph_tools_flags_are_understood_and_its_client_is_answered(graph):
    flags = (
        "--graph-path",
        graph,
        "--model-name",
        DEMO_MODEL,
        "--k",
        2,
        "--strategy",
        "sampling",
        "--host",
        "127.0.0.1",
    )
    with serving(*flags) as (url, _):
        client = Client(url)
        health = client.health()
        assert (health.status, health.model_loaded, health.graph_loaded) == ("ok", True, True)
        assert (health.model_name, health.graph_path) == (DEMO_MODEL.name, str(graph))
        answer = client.generate(ORDER, max_tokens=40, temperature=0, seed=1)
        assert 0 < answer.num_accepted_tokens <= answer.num_draft_tokens
        assert answer.acceptance_rate == answer.num_accepted_tokens / answer.num_draft_tokens
        assert answer.generated_tokens == 40
        with pytest.raises(ServerError, match="temperature"):
            client.generate(ORDER, temperature=-1)


def test_somebody_who_watches_does_not_hold_the_end_up_and_nonsense_is_a_line_of_ours():
    with serving(more=["coli: http: Invalid HTTP request received"]) as (url, process):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(b"\x16\x03\x01 somebody speaks TLS\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        with httpx.stream("GET", f"{url}/engine/events", timeout=PATIENCE) as watching:
            lines = watching.iter_lines()
            assert next(lines).startswith("data: ")
            process.terminate()
            assert all(not line or line[0] in "d:" for line in lines)  # to its proper end: cut off, it would raise
            assert process.wait(PATIENCE) == 143


def test_a_grammar_that_cannot_be_read_is_refused_before_the_port_opens(start, tmp_path):
    from coli.options import DraftOptions

    for text in (None, "root ::= ("):
        path = tmp_path / "g.gbnf"
        if text is not None:
            path.write_text(text)
        with pytest.raises(GrammarError, match=r"g\.gbnf"):
            start(drafts=DraftOptions(grammar=path))


def test_a_librarys_warning_is_one_line_whatever_is_in_it():
    lines: list[str] = []
    with told(lines.append):
        try:
            raise ValueError("deep")
        except ValueError:
            logging.getLogger("asyncio").error("it\n%s", "broke", exc_info=True)
        logging.getLogger("uvicorn.error").info("not this")
    logging.getLogger("asyncio").debug("nor this")
    assert lines == ["http: it broke: ValueError: deep"]


def test_a_signal_ends_the_server_once_and_what_was_learnt_is_kept(tmp_path):
    """The usage history is written behind the last answer, so nothing may end the process before that."""
    usage = tmp_path / "usage.json"
    command = [sys.executable, "-m", "coli", "serve", "--port", "0", "--ctx", "512"]
    environment = {**ENVIRONMENT, "USAGE_SAVE": "1", "COLI_USAGE": str(usage)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "serving" in line).split()[-1]
        httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 4}, timeout=PATIENCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert usage.exists()


def test_k_bounds_what_is_drafted(graph, start):
    from coli.options import DraftOptions, GraphKnobs

    texts = {}
    for k in (1, 6):
        server = start(drafts=DraftOptions(graph=graph, knobs=GraphKnobs(k=k), gate="always"))
        body = {"prompt": ORDER, "max_tokens": 40, "temperature": 0}
        answer = server.client.post("/../generate", body=body, cast_to=object)
        texts[k] = answer["text"]
        assert 0 < answer["drafts"]["graph"]["proposed"] <= k * answer["forwards"]
    assert texts[1] == texts[6]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--k", "2", "--graph-k", "3"), "--k: the same as --graph-k"),
        (("--model-name", "a", "--model", "b"), "--model-name: the same as --model"),
        (("--strategy", "greedily"), "greedy"),
        (("--graph-k", "64"), "from 1 to 63"),
        (("--port", "99999"), "from 0 to 65535"),
        (("--api-key", ""), "--api-key: expected a key"),
    ],
)
def test_flags_that_cannot_be_are_one_line_and_exit_2(flags, words):
    done = subprocess.run(
        [sys.executable, "-m", "coli", "serve", *flags], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
