"""`coli serve`: keep a model loaded and answer an OpenAI-compatible API."""

from __future__ import annotations

import importlib.util
from typing import Any

import click

from coli.cli.conversing import DEFAULTS, context_length, sampling_defaults
from coli.cli.flags import GENERATE, settings_options
from coli.cli.model_path import model_path
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.options import draft_options, engine_options, resolve
from coli.settings_table import BY_NAME

SERVER = ("host", "port", "api_key", "slots", "queue", "session")
_UNUSED = ("prompt", "prompt_ids", "raw", "system", "json", "tokens")  # of one answer: requests say these
SETTINGS = (*(name for name in GENERATE if name not in _UNUSED), *SERVER)
NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client")


@click.command("serve")
@settings_options(*SETTINGS, defaults=DEFAULTS)
@click.option("graph_path", "--graph-path", hidden=True, help="Same as --graph.")
@click.option("model_name", "--model-name", hidden=True, help="Same as --model.")
@click.option("k", "--k", hidden=True, help="Same as --graph-k.")
def command(graph_path: str | None, model_name: str | None, k: str | None, **flags: Any) -> None:
    """Keep a model loaded and answer an OpenAI-compatible API (docs/server.md).

    Settings of generation are what requests get that do not say otherwise. SIGTERM and Ctrl-C finish what is running.
    """
    aliases = (("graph", "--graph-path", graph_path), ("model", "--model-name", model_name), ("graph_k", "--k", k))
    for name, alias, value in aliases:
        if value is not None and flags.get(name) is not None:
            raise OptionError(f"{alias}: the same as {BY_NAME[name].flag}; give one of the two")
        flags[name] = flags.get(name) if value is None else value
    settings = resolve(flags, names=SETTINGS)
    if settings["accept"] != "match":
        raise OptionError("--accept: a server's answers do not depend on its drafts; leave it out (COLI_ACCEPT too)")
    if settings["api_key"] == "":
        raise OptionError("--api-key: expected a key, found nothing; leave it out to serve without one")
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"serve: {missing[0]} is not installed; type: pip install 'coli[server]'")
    path = model_path(settings, streams.notice)
    streams.progress(f"loading {path}")
    from coli.llm import LLM
    from coli.server.app import ServerOptions
    from coli.server.run import serve
    from coli.tools.probe import disk_speed

    with LLM.open(path, engine_options(settings), streams.notice) as llm:
        streams.clear_progress()
        if llm.chat_template is None:
            streams.notice("the model has no chat template: conversations are completed as plain text")
        graph = settings["graph"]
        options = ServerOptions(
            model_name=path.resolve().name,
            host=settings["host"],
            api_key=settings["api_key"],
            graph_name=None if graph is None else str(graph),
            think=settings["think"],
        )
        serve(
            llm,
            options,
            sampling_defaults(llm, settings),
            draft_options(settings),
            context=context_length(llm, settings),
            slots=settings["slots"],
            queue=settings["queue"],
            port=settings["port"],
            notice=streams.notice,
            probe=disk_speed,
            session=settings["session"],
        )
