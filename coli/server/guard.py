"""What every request passes before anything reads it: the host check, the API key, and the limits of its body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from coli.server.bodies import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/health",)  # probes of a supervisor carry no key
DROPPED_BYTES, DROPPING_S, SILENCE_S = 64 << 20, 2.0, 0.2  # most of a refused body that is read, and how long


class HttpError(Exception):
    """A request that is answered with `status` and one message."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.field, self.code, self.retry_after = status, field, code, retry_after

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(error_body(self.status, str(self), self.field, self.code), self.status, headers)


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address) is this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def _hostname(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


class Guard:
    """ASGI middleware. On a loopback address only loopback names and pages are served: a web page from elsewhere can
    reach it neither by a name of its own nor by ours. A connection whose body was not read to its end is closed behind
    the answer: the rest would be read, for ever if need be, to find the next request. A part of it is read and dropped
    first, since a client that is still writing would lose the answer with its connection.
    """

    def __init__(self, app: App, *, api_key: str | None, host: str, open_paths: Collection[str] = ()) -> None:
        """open_paths: served without the key, beside OPEN_PATHS."""
        self._app, self._api_key, self._host = app, api_key, host
        self._open = {*OPEN_PATHS, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            receive, send = _closing_when_unread(request, receive, send)
            try:
                self._check(request)
            except HttpError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        if is_loopback(self._host):
            named = request.headers.get("host", "")
            name = named.rsplit(":", 1)[0] if not named.endswith("]") else named
            if not is_loopback(name):
                raise HttpError(403, f"host {name!r}: this server answers to localhost only", code="host_not_allowed")
            origin = request.headers.get("origin")
            if origin is not None and not is_loopback(_hostname(origin)):
                # a browser sends simple POST requests of any page without asking first
                message = f"origin {origin[:100]!r}: pages of other hosts may not use this server"
                raise HttpError(403, message, code="origin_not_allowed")
        if self._api_key is None or request.url.path in self._open:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode("latin-1"), self._api_key.encode()
        ):
            raise HttpError(401, "expected the header Authorization: Bearer KEY with this server's key")


def _closing_when_unread(request: Request, receive: Receive, send: Send) -> tuple[Receive, Send]:
    unread = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers

    async def received() -> MutableMapping[str, Any]:
        nonlocal unread
        message = await receive()
        unread = unread and bool(message.get("more_body", False))
        return message

    async def sent(message: MutableMapping[str, Any]) -> None:
        if unread and message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        elif unread and not message.get("more_body", False):
            await send({**message, "more_body": True})
            await _drop(received)
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    return received, sent


async def _drop(receive: Receive) -> None:
    """Read what a client is still sending, within limits."""
    left = DROPPED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROPPING_S):
            while left > 0:
                async with asyncio.timeout(SILENCE_S):
                    message = await receive()
                if not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The whole body, at most `limit` bytes within `seconds`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise HttpError(413, f"body: expected at most {limit} bytes, found {declared}")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise HttpError(413, f"body: expected at most {limit} bytes, found more")
    except TimeoutError:
        raise HttpError(408, f"body: not complete after {seconds:g} seconds") from None
    except ClientDisconnect:
        raise HttpError(400, "body: the connection ended before it was complete") from None
    return bytes(body)
