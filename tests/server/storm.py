"""Clients of every bad kind against one address, and what each must be answered: used by the tests of faults."""

import contextlib
import http.client
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from server.faults import PATIENCE

CHAT = "/v1/chat/completions"
HUGE = 9 * 2**20
GONE = 0  # the client did not stay for an answer


@dataclass(frozen=True)
class Outcome:
    fate: str
    status: int
    field: str | None = None


def body(rng: random.Random, **more: object) -> dict[str, object]:
    text = "hello " * rng.randint(1, 30) + str(rng.randint(0, 99))  # few words: tokenizers remember those they have met
    tokens = rng.randint(1, 24)
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True, **more}


def asked(port: int, data: bytes, path: str = CHAT, method: str = "POST") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, data)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def opened(port: int, data: bytes, length: int | None = None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def killed(connection: socket.socket) -> None:
    """What the system does for a client that is killed with data unread: a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def whole(port: int, rng: random.Random) -> Outcome:
    status, data = asked(port, json.dumps(body(rng)).encode())
    assert status == 429 or json.loads(data)["choices"]
    return Outcome("whole", status)


def stream(port: int, rng: random.Random) -> Outcome:
    status, data = asked(port, json.dumps(body(rng, stream=True)).encode())
    assert status == 429 or data.endswith(b"data: [DONE]\n\n")
    return Outcome("stream", status)


def slow(port: int, rng: random.Random) -> Outcome:
    """A tiny receive buffer, read in small bites."""
    connection = opened(port, json.dumps(body(rng, stream=True, max_tokens=60)).encode())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    data = b""
    with connection:
        while b"[DONE]" not in data and b" 429 " not in data[:40]:
            bite = connection.recv(128)
            if not bite:
                break
            data += bite
    return Outcome("slow", int(data.split(b" ", 2)[1]))


def leaves(port: int, rng: random.Random) -> Outcome:
    """Sends a good request and leaves: at once, or with the first bytes of the answer; politely, or killed."""
    connection = opened(port, json.dumps(body(rng, stream=rng.random() < 0.5, max_tokens=400)).encode())
    if rng.random() < 0.6:
        connection.settimeout(rng.random() / 2)
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.recv(100)
    killed(connection) if rng.random() < 0.5 else connection.close()
    return Outcome("leaves", GONE)


def half_sent(port: int, rng: random.Random) -> Outcome:
    data = json.dumps(body(rng)).encode()
    if rng.random() < 0.3:  # not even the head is complete
        connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc")
    else:
        connection = opened(port, data[: rng.randint(0, len(data) - 1)], len(data))
    killed(connection) if rng.random() < 0.5 else connection.close()
    return Outcome("half sent", GONE)


def huge(port: int, rng: random.Random) -> Outcome:
    """The length alone is refused; nothing is read for it."""
    with opened(port, b"{", HUGE) as connection:
        return Outcome("huge", int(connection.recv(1000).split(b" ", 2)[1]))


WRONG: tuple[tuple[dict[str, object], str], ...] = (
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}, 5]}, "messages[1]"),
    ({"seed": 1.5}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"surprise": 1}, "surprise"),
    ({"stop": [""] * 99}, "stop"),
    ({"top_p": float("1e9")}, "top_p"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"messages": [{"role": "user", "content": "long " * 2000}]}, "messages"),
)


def wrong(port: int, rng: random.Random) -> Outcome:
    more, field = rng.choice(WRONG)
    status, data = asked(port, json.dumps({**body(rng), **more}).encode())
    found = json.loads(data)["error"]["param"]
    return Outcome(f"wrong {field}", status, found if found == field else f"{found}, not {field}")


def nonsense(port: int, rng: random.Random) -> Outcome:
    status, _ = asked(port, rng.randbytes(rng.randint(0, 3000)))
    return Outcome("nonsense", status)


FATES: dict[Callable[[int, random.Random], Outcome], tuple[float, set[int]]] = {
    whole: (3, {200, 429}),
    stream: (3, {200, 429}),
    slow: (1, {200, 429}),
    leaves: (4, {GONE}),
    half_sent: (2, {GONE}),
    huge: (1, {413}),
    wrong: (3, {400}),
    nonsense: (1, {400}),
}


def storm(port: int, count: int, seed: int, at_once: int = 16) -> Counter[Outcome]:
    """`count` clients, `at_once` of them at any time, and what became of them. AssertionError for a wrong answer."""
    rng = random.Random(seed)
    fates = rng.choices(list(FATES), [weight for weight, _ in FATES.values()], k=count)

    def one(at: int) -> Outcome:
        outcome = fates[at](port, random.Random(seed * 100_000 + at))
        assert outcome.status in FATES[fates[at]][1], outcome
        assert "not" not in (outcome.field or ""), outcome
        return outcome

    with ThreadPoolExecutor(at_once) as pool:
        return Counter(pool.map(one, range(count)))
