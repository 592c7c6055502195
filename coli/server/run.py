"""Runs one server until a signal ends it: answers what it has begun, for a while, then closes."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from coli.errors import OptionError
from coli.llm import LLM
from coli.options import DraftOptions, GenerateOptions
from coli.server.app import Api, ServerOptions
from coli.server.guard import is_loopback
from coli.server.live import Probe
from coli.server.worker import Worker

DRAIN_SECONDS = 30


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
) -> None:
    """Load the model and serve until SIGTERM or SIGINT. Raises OptionError for an address that cannot be used."""
    listener = _listen(options.host, port)
    with listener:
        worker = Worker(llm, drafts, context=context, slots=slots, queue=queue)
        worker.start()
        try:
            if not is_loopback(options.host) and options.api_key is None:
                notice(f"listening on {options.host} without --api-key: everybody who can reach it can use it")
            listener.listen(512)  # from the notice on nobody is refused; uvicorn takes the connections up
            name = f"[{options.host}]" if ":" in options.host else options.host
            notice(f"serving {options.model_name} on http://{name}:{listener.getsockname()[1]}")
            api = Api(llm, worker, options, defaults, probe)
            config = uvicorn.Config(
                api.app(),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=15,
                timeout_graceful_shutdown=DRAIN_SECONDS,
                h11_max_incomplete_event_size=64 * 1024,
                server_header=False,
            )
            server = uvicorn.Server(config)
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
