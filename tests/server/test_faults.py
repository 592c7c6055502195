"""Clients that leave, dawdle, lie or come in crowds: the right status, and no slot stays taken."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server.faults import PATIENCE, held, job_of, settled, until
from server.processes import serving
from server.storm import GONE, storm

from coli.server import guard

LONG = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def small(start):
    return start(slots=1, queue=1, body_bytes=20_000, body_seconds=PATIENCE, api_key="secret")


@pytest.fixture(scope="module")
def hasty(start):
    """Asked only what it gives up on."""
    return start(slots=1, body_bytes=20_000, body_seconds=0.5, api_key="secret")


@pytest.fixture
def patient(monkeypatch):
    """Whoever stops for a moment while a refused body is dropped is waited for: clients here send theirs to the end."""
    monkeypatch.setattr(guard, "DROPPING_S", PATIENCE)
    monkeypatch.setattr(guard, "SILENCE_S", PATIENCE)


HEADERS = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_a_stream_or_an_answer_ends_it(server, stream):
    assert settled(server)
    cancelled = server.worker.counts.cancelled
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with held(server, steps=2):
        connection.request("POST", "/v1/chat/completions", json.dumps({**LONG, "stream": stream}))
        job = job_of(server)
        if stream:
            with connection.getresponse() as answer:
                assert answer.readline().startswith(b"data: ")
        connection.close()
        until(lambda: job.cancelled)
    until(lambda: server.worker.counts.cancelled == cancelled + 1)
    assert settled(server)


def test_beyond_the_queue_is_429_with_retry_after_and_the_others_are_answered(small):
    def ask(_: int) -> httpx.Response:
        body = {**LONG, "max_tokens": 60}
        return httpx.post(f"{small.url}/v1/chat/completions", json=body, headers=HEADERS, timeout=PATIENCE)

    assert settled(small)
    refused = small.worker.counts.refused
    with ThreadPoolExecutor(8) as pool, held(small) as go:
        asking = [pool.submit(ask, at) for at in range(8)]
        until(lambda: small.worker.counts.refused == refused + 6)  # one runs, one waits
        go.set()
        answers = [each.result() for each in asking]
    assert Counter(answer.status_code for answer in answers) == {200: 2, 429: 6}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert settled(small)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{" + b" " * 30_000, 413), (b"not json", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"", 400)],
    ids=["huge", "no json", "list", "no utf-8", "empty"],
)
@pytest.mark.usefixtures("patient")
def test_bad_bodies_get_their_status(small, body, status):
    answer = httpx.post(f"{small.url}/v1/chat/completions", content=body, headers=HEADERS, timeout=PATIENCE)
    assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})


@pytest.mark.usefixtures("patient")
def test_a_huge_body_without_a_length_is_cut_off(small):
    def parts():
        for _ in range(5):
            yield b" " * 10_000

    assert httpx.post(f"{small.url}/tokenize", content=parts(), headers=HEADERS, timeout=PATIENCE).status_code == 413


@pytest.mark.parametrize(
    ("more", "status"),
    [("Content-Length: 99999999", 413), ("Transfer-Encoding: chunked", 413), ("Content-Length: 100", 408)],
)
def test_an_answer_to_a_body_not_read_to_its_end_ends_the_connection(small, hasty, more, status):
    """Whoever sends for ever is not read for ever; so it is without the key."""
    port = (hasty if status == 408 else small).port
    for key, expected in (("Authorization: Bearer secret", status), ("Authorization: none", 401)):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n{key}\r\n{more}\r\n\r\n"
            connection.sendall(head.encode() + (b"7000\r\n" + b" " * 0x7000 if "chunked" in more else b"{"))
            data = b""
            while part := connection.recv(65536):
                data += part
        assert data.startswith(b"HTTP/1.1 %d" % expected)
        assert b"\r\nconnection: close\r\n" in data.lower()


@pytest.mark.usefixtures("patient")
def test_a_whole_body_that_is_too_long_is_answered(server):
    huge = {**LONG, "messages": [{"role": "user", "content": "x" * 9 * 2**20}]}
    with httpx.Client(timeout=PATIENCE) as client:
        assert client.post(f"{server.url}/v1/chat/completions", json=huge, timeout=PATIENCE).status_code == 413
        assert client.get(f"{server.url}/health").status_code == 200


def test_a_half_sent_body_times_out(hasty):
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=PATIENCE) as connection:
        connection.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_key_and_host_are_checked_but_health_needs_no_key(small):
    assert httpx.get(f"{small.url}/v1/models", timeout=PATIENCE).status_code == 401
    assert (
        httpx.get(f"{small.url}/v1/models", headers={"Authorization": "Bearer wrong"}, timeout=PATIENCE).status_code
        == 401
    )
    assert httpx.get(f"{small.url}/v1/models", headers=HEADERS, timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{small.url}/health", timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{small.url}/health", headers={"Host": "evil.example"}, timeout=PATIENCE).status_code == 403
    for origin, status in (("http://evil.example", 403), ("null", 403), ("http://[", 403), (small.url, 200)):
        assert httpx.get(f"{small.url}/health", headers={"Origin": origin}, timeout=PATIENCE).status_code == status, (
            origin
        )
    for host in ("localhost:80", "LOCALHOST", "LocalHost:80", "localhost.", "localhost.:80", "[::1]:80", "127.0.0.2"):
        assert httpx.get(f"{small.url}/health", headers={"Host": host}, timeout=PATIENCE).status_code == 200, host
    for host in ("localhost.evil.example", "localhost..", "", "127.0.0.1.evil.example", "[::2]"):
        assert httpx.get(f"{small.url}/health", headers={"Host": host}, timeout=PATIENCE).status_code == 403, host


def test_a_key_may_have_any_characters(start):
    server = start(slots=1, api_key="schlüssel")
    for key, status in (("schlüssel", 200), ("schlussel", 401), ("schl", 401)):
        answer = httpx.get(
            f"{server.url}/v1/models", headers=[(b"Authorization", b"Bearer " + key.encode())], timeout=PATIENCE
        )
        assert answer.status_code == status


def test_unknown_paths_and_methods_are_json_errors(server):
    assert httpx.get(f"{server.url}/nowhere", timeout=PATIENCE).json()["error"]["message"].endswith("no such endpoint")
    assert httpx.get(f"{server.url}/generate", timeout=PATIENCE).status_code == 405


def test_a_slow_reader_holds_nobody_up(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/chat/completions", json.dumps({**LONG, "stream": True}))
    response = connection.getresponse()
    quick = httpx.post(f"{server.url}/v1/chat/completions", json={**LONG, "max_tokens": 5}, timeout=PATIENCE)
    assert quick.status_code == 200
    assert settled(server)  # the engine is done though nobody has read
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_storm_with_random_cancels_leaves_no_slot_taken(server):
    rng = random.Random(5)
    fates = [(at, rng.random()) for at in range(60)]

    def one(fate: tuple[int, float]) -> None:
        at, luck = fate
        body = {**LONG, "max_tokens": 1 + at % 20, "stream": at % 2 == 0, "seed": at, "temperature": 1.0}
        timeout = 0.02 if luck < 0.3 else PATIENCE
        try:
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=timeout)
        except httpx.TimeoutException:
            assert luck < 0.3

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, fates))
    assert settled(server)
    assert answers_again(server)


def answers_again(server) -> bool:
    body = {**LONG, "max_tokens": 3}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE).status_code == 200


def test_sigterm_lets_a_stream_finish_and_then_leaves():
    command = [sys.executable, "-m", "coli", "serve", "--port", "0", "--ctx", "512"]
    environment = {**os.environ, "USAGE_SAVE": "0"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "serving" in line).split()[-1]
        body = {**LONG, "max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(PATIENCE) == 143
        assert process.stderr.read() == ""


def test_a_storm_of_bad_clients_is_answered_rightly_and_leaves_no_slot_taken(start):
    server = start(slots=2, queue=3)
    with ThreadPoolExecutor(1) as pool, held(server) as go:
        storming = pool.submit(storm, server.port, 120, seed=3)
        until(lambda: server.worker.counts.refused >= 12 or storming.done())  # some of them stay for their answer
        go.set()
        outcomes = storming.result()
    statuses = {outcome.status for outcome in outcomes}
    assert statuses >= {200, 400, 413, 429}
    assert settled(server)
    assert answers_again(server)


def resident(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_thousand_bad_clients_leave_memory_as_it_was():
    with serving("--slots", 4, "--queue", 4) as (url, process):
        port = int(url.rsplit(":", 1)[1])
        for rows in range(1, 101):  # a tape is recorded per number of rows, and kept, up to a bound
            prompt = [5 + (7 * rows + at) % 60 for at in range(rows)]
            body = {"prompt": prompt, "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
        total = storm(port, 1000, seed=1)
        # Pools and buffers grow until they are what they will be, sooner or later by machine; a leak never levels off.
        sizes = [resident(process.pid)]
        while len(sizes) < 3 or sizes[-1] >= sizes[-2] + 8 * 2**20:
            assert len(sizes) < 16, sizes
            total += storm(port, 600, seed=1 + len(sizes))
            sizes.append(resident(process.pid))

        def at_rest() -> bool:
            health = httpx.get(f"{url}/health", timeout=PATIENCE).json()
            return (health["slots_free"], health["waiting"]) == (4, 0)

        until(at_rest)
        until(lambda: len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 60)
    print(sizes, sorted(total.items(), key=str))
    assert {outcome.status for outcome in total} == {GONE, 200, 400, 413, 429}
