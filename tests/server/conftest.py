"""A real server on a free port in a thread of the test process, over the built-in demo model or one made of it."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")

from server.faults import PATIENCE  # noqa: E402

from coli.builtin import DEMO_MODEL  # noqa: E402
from coli.errors import ColiError  # noqa: E402
from coli.llm import LLM  # noqa: E402
from coli.options import DraftOptions, EngineOptions, GenerateOptions  # noqa: E402
from coli.server.app import Api, ServerOptions  # noqa: E402
from coli.server.run import configured  # noqa: E402
from coli.server.worker import Worker  # noqa: E402
from coli.tools.probe import disk_speed  # noqa: E402

CONTEXT = 512


class Running:
    """A server: its address, worker and an OpenAI client."""

    def __init__(self, url: str, worker: Worker, port: int) -> None:
        self.url, self.worker, self.port = url, worker, port
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        self.stop: Callable[[], None]
        self.notices: list[str] = []


@pytest.fixture(scope="session")
def start(tmp_path_factory) -> Iterator[Callable[..., Running]]:
    stops = []

    def begin(
        model: Path = DEMO_MODEL,
        slots: int = 4,
        queue: int = 32,
        defaults: GenerateOptions | None = None,
        drafts: DraftOptions | None = None,
        engine: EngineOptions | None = None,
        context: int = CONTEXT,
        session: Path | None = None,
        **options: object,
    ) -> Running:
        folder = tmp_path_factory.mktemp("usage")
        engine = engine or EngineOptions(usage_save=False, gate_save=False, usage=folder / "usage.json")
        llm = LLM.open(model, engine, print)
        notices: list[str] = []
        limits = {"context": context, "slots": slots, "queue": queue}
        worker = Worker(llm, drafts or DraftOptions(), **limits, session=session, notice=notices.append)
        try:
            worker.start()
        except ColiError:
            llm.close()
            raise
        named = ServerOptions(model_name="demo", **options)
        api = Api(llm, worker, named, defaults or GenerateOptions(max_tokens=64), disk_speed)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)  # before its thread takes connections up: nobody is refused
        server = uvicorn.Server(configured(api.app(), drain_seconds=5))
        api.view.leaving = lambda: server.should_exit
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", worker, listener.getsockname()[1])

        def stop() -> None:
            stops.remove(stop)
            running.client.close()
            server.should_exit = True
            thread.join()
            worker.stop()
            listener.close()
            llm.close()

        stops.append(stop)
        running.stop, running.notices = stop, notices
        return running

    yield begin
    for stop in [*stops]:
        stop()


@pytest.fixture(scope="session")
def server(start) -> Running:
    return start()


@pytest.fixture(scope="session")
def templated(tmp_path_factory) -> Callable[[str], Path]:
    """The demo model with another chat template."""

    def make(template: str | None) -> Path:
        folder = tmp_path_factory.mktemp("templated") / "demo"
        shutil.copytree(DEMO_MODEL, folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config.pop("chat_template")
        path.write_text(json.dumps(config if template is None else {**config, "chat_template": template}))
        return folder

    return make
