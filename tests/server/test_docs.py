"""Every curl line of docs/server.md, and the example client, against a real server."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server.faults import PATIENCE

ROOT = Path(__file__).parent.parent.parent
LINES = [line for line in (ROOT / "docs" / "server.md").read_text().splitlines() if line.startswith("curl ")]


def test_there_are_such_lines():
    assert len(LINES) > 8


@pytest.mark.parametrize("line", LINES)
def test_curl_line(server, line):
    words = [word for word in shlex.split(line)[1:] if word != "-N"]
    url, body = words[0].replace("http://127.0.0.1:8000", server.url), None
    if len(words) > 1:
        assert words[1] == "-d"
        body = words[2]
    answer = httpx.get(url, timeout=PATIENCE) if body is None else httpx.post(url, content=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    if body is not None and json.loads(body).get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")


def test_example_client_prints_the_answer(server):
    command = [sys.executable, ROOT / "scripts" / "example_client.py", "--url", server.url, "--max-tokens", "9"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--temperature", "0"], capture_output=True, text=True, env=environment)
    assert (done.returncode, bool(done.stdout.strip())) == (0, True)
    assert "Model: demo" in done.stderr
    assert "9 tokens, acceptance rate" in done.stderr
