"""Runs one server until a signal ends it: answers what it has begun, for a while, then closes."""

from __future__ import annotations

import gc
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from uvicorn.server import HANDLED_SIGNALS

from coli.errors import OptionError
from coli.llm import LLM
from coli.options import DraftOptions, GenerateOptions
from coli.server.app import Api, ServerOptions
from coli.server.connections import Connection
from coli.server.guard import App, is_loopback
from coli.server.live import Probe
from coli.server.log import told
from coli.server.worker import Worker

DRAIN_SECONDS = 30
# Objects made before cycles are looked for: connections leave some, which the start's large number would let pile up.
COLLECT_EVERY = 2_000


class _Server(uvicorn.Server):
    """Ends at the first signal, when what runs is finished. It then calls the handler that was there before: raised
    once more, as its base does, the signal would look like a second one, which ends the process at once."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for captured in self._captured_signals:
            handler = before[signal.Signals(captured)]
            if callable(handler):
                handler(captured, None)


def configured(app: App, drain_seconds: int = DRAIN_SECONDS) -> uvicorn.Config:
    """How `app` is served, wherever; `drain_seconds`: for what runs when the server is told to end."""
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=15,
        timeout_graceful_shutdown=drain_seconds,
        h11_max_incomplete_event_size=64 * 1024,
        server_header=False,
    )


def serve(
    llm: LLM,
    options: ServerOptions,
    defaults: GenerateOptions,
    drafts: DraftOptions,
    *,
    context: int,
    slots: int,
    queue: int,
    port: int,
    notice: Callable[[str], None],
    probe: Probe | None = None,
    session: Path | None = None,
) -> None:
    """Load the model and serve until SIGTERM or SIGINT. `session`: file the conversations are kept in.

    Raises OptionError for an address that cannot be used, what `SessionFile` raises, and what loading the model does.
    """
    listener = _listen(options.host, port)
    with listener, told(notice):
        worker = Worker(llm, drafts, context=context, slots=slots, queue=queue, session=session, notice=notice)
        worker.start()
        gc.freeze()  # what the start made stays
        gc.set_threshold(COLLECT_EVERY, 10, 10)
        try:
            if not is_loopback(options.host) and options.api_key is None:
                notice(f"listening on {options.host} without --api-key: everybody who can reach it can use it")
            listener.listen(512)  # from the notice on nobody is refused; uvicorn takes the connections up
            name = f"[{options.host}]" if ":" in options.host else options.host
            notice(f"serving {options.model_name} on http://{name}:{listener.getsockname()[1]}")
            api = Api(llm, worker, options, defaults, probe)
            server = _Server(configured(api.app()))
            api.view.leaving = lambda: server.should_exit
            server.run([listener])
        finally:
            worker.stop()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OptionError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return listener
