"""A socket is not kept for somebody who begins no request, or never ends its head."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
from server.faults import PATIENCE

pytest.importorskip("uvicorn")

from uvicorn.server import ServerState

from coli.server import connections
from coli.server.run import configured

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Timer:
    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds, self.call, self.cancelled = seconds, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Time that passes when the test says so; requests are begun and never answered."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(seconds, call))
        return self.timers[-1]

    def create_task(self, request: Any) -> "Loop":
        request.close()
        return self

    def add_done_callback(self, call: object) -> None:
        pass

    @property
    def waiting(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.cancelled]


class Transport:
    def __init__(self) -> None:
        self.written, self.closed = b"", False

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed


async def nobody(scope: Any, receive: Any, send: Any) -> None:
    pass


@pytest.fixture
def made() -> tuple[connections.Connection, Loop, Transport]:
    loop, transport = Loop(), Transport()
    connection = connections.Connection(configured(nobody), ServerState(), {}, loop)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    return connection, loop, transport


def test_who_says_nothing_is_left(made):
    _, loop, transport = made
    (timer,) = loop.waiting
    assert timer.seconds == connections.HEAD_SECONDS
    timer.call()
    assert (transport.closed, transport.written) == (True, b"")


def test_who_does_not_get_to_the_end_of_the_head_is_told_and_left_whatever_trickles(made):
    connection, loop, transport = made
    for byte in HEAD[:-1]:
        connection.data_received(bytes([byte]))
    (timer,) = loop.waiting
    timer.call()
    assert transport.closed
    assert transport.written.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in transport.written.lower()


def test_a_whole_head_stops_the_clock(made):
    connection, loop, transport = made
    connection.data_received(HEAD[:9])
    connection.data_received(HEAD[9:])
    assert loop.waiting == []
    connection.data_received(b"more, of another request")
    assert loop.waiting == []
    assert not transport.closed


def test_a_connection_that_ends_stops_the_clock(made):
    connection, loop, _ = made
    connection.connection_lost(None)
    assert loop.waiting == []


def test_a_real_server_does_so(start, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    server = start(slots=1)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as silent:
        assert silent.recv(1000) == b""
