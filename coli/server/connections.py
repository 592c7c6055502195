"""HTTP connections that end when their client begins no request, or does not get to the end of its head.

Bodies have a bound of their own (`guard.read_body`), and so has the time between two requests (uvicorn's keep-alive);
without this one a socket that says nothing, or a byte a minute, would be kept for ever. Runs on the event loop.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 15.0  # from the connection, or from the first byte behind an answer, to the end of a request's head


class Connection(H11Protocol):
    """uvicorn's, with a clock while a head is awaited; more bytes of it do not set the clock back."""

    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_clock()  # there it is
        elif self._clock is None and not self.transport.is_closing():
            self._clock = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_late(self) -> None:
        self._clock = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:  # it has begun: then it is told
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            answer = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            self.transport.write((self.conn.send(answer) or b"") + (self.conn.send(h11.EndOfMessage()) or b""))
        self.transport.close()
