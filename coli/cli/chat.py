"""`coli chat`: talk with a model; what was said stays in memory, so each turn reads only what is new."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from coli.cli.conversing import DEFAULTS, context_length, sampling_defaults
from coli.cli.flags import GENERATE, settings_options
from coli.cli.model_path import model_path
from coli.cli.report_lines import report_lines
from coli.cli.streams import Streams
from coli.errors import ColiError, OptionError
from coli.options import GenerateOptions, Resolved, draft_options, engine_options, generate_options, resolve
from coli.settings_table import BY_NAME

if TYPE_CHECKING:
    from coli.generation import GenerationResult

_UNUSED = ("prompt", "prompt_ids", "raw", "json", "tokens")
SETTINGS = (*(name for name in GENERATE if name not in _UNUSED), "session", "api_key")
LOCAL = tuple(
    name
    for name in SETTINGS
    if BY_NAME[name].flag and BY_NAME[name].group in ("model", "engine", "drafts") and name not in ("grammar", "schema")
)
SAMPLER = {"temp": "temperature"} | {
    name: name
    for name in ("top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "seed")
}
HELP = (
    "/retry            answer the last message again, with a new seed",
    "/reset            forget what was said",
    "/system [TEXT]    set or show the system message",
    "/set [NAME VALUE] set or show: ngen, " + ", ".join(SAMPLER),
    "/stats            the report of the last answer",
    "/save FILE        keep the conversation; /load FILE goes on with it",
    "/quit             leave; so do Ctrl-D, and Ctrl-C at the prompt",
)


class Partner(Protocol):
    """Who answers: a model in this process, or a server."""

    messages: list[dict[str, str]]
    system: str | None
    result: GenerationResult | None

    def ask(self, text: str, options: GenerateOptions) -> Iterator[str]: ...
    def retry(self, options: GenerateOptions) -> Iterator[str]: ...
    def reset(self) -> None: ...
    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...


@click.command("chat")
@settings_options(*SETTINGS, defaults=DEFAULTS)
@click.option("attach", "--attach", metavar="URL", help="Talk with a running `coli serve` instead.")
def command(attach: str | None, **flags: Any) -> None:
    """Talk with a model. Lines that begin with / are commands; /help lists them.

    Ctrl-C stops an answer and keeps the conversation.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    path: Path | None = settings["session"]
    if attach is not None:
        from coli.remote import RemoteConversation

        if path is not None:
            raise OptionError("--session: a server keeps no file of the conversation; leave it out with --attach")
        ours = [f"{BY_NAME[name].flag.split('/')[0]}" for name in LOCAL if settings.values[name].origin == "flag"]
        if ours:
            streams.notice(f"{', '.join(ours)}: the server has its own; no effect with --attach")
        given = frozenset(filter(settings.given, (*SAMPLER, "ngen")))
        remote = RemoteConversation(attach, settings["api_key"], given, _asked_of_server(settings))
        remote.system = settings["system"]
        _Chat(remote, generate_options(settings), streams).run()
        return
    folder = model_path(settings, streams.notice)
    streams.progress(f"loading {folder}")
    from coli.conversation import Conversation
    from coli.llm import LLM

    with LLM.open(folder, engine_options(settings), streams.notice) as llm:
        if llm.chat_template is None:
            streams.notice("the model has no chat template: conversations are completed as plain text")
        context = context_length(llm, settings)
        conversation = Conversation(llm, context, draft_options(settings), settings["think"])
        if path is not None:
            conversation.file(path).check_writable()
        if path is not None and path.exists():
            conversation.load(path)
            streams.notice(f"going on with {path}: {len(conversation.messages)} messages")
        if settings["system"] is not None:
            conversation.system = settings["system"]
        streams.clear_progress()
        try:
            _Chat(conversation, sampling_defaults(llm, settings), streams).run()
        finally:
            if path is not None:
                conversation.save(path)


def _asked_of_server(settings: Resolved) -> dict[str, Any]:
    """Fields of every request that come from settings. Raises GrammarError, OptionError."""
    fields: dict[str, Any] = {} if settings["think"] is None else {"enable_thinking": settings["think"]}
    paths = [(name, settings[name]) for name in ("grammar", "schema") if settings[name] is not None]
    if len(paths) > 1:
        raise OptionError("--grammar, --schema: a server takes one of the two; leave one out with --attach")
    for name, path in paths:
        from coli.grammar.load import GRAMMAR_TAG, SCHEMA_TAG, load_grammar

        loaded = load_grammar(path, GRAMMAR_TAG if name == "grammar" else SCHEMA_TAG)
        fields["grammar"] = loaded.text  # of a schema, what it means as a grammar
    return fields


class _Chat:
    """The loop over lines."""

    def __init__(self, partner: Partner, options: GenerateOptions, streams: Streams) -> None:
        self._partner, self._options, self._streams = partner, options, streams
        self._verbose = streams.verbose

    def run(self) -> None:
        """Until the input ends, /quit, or Ctrl-C at the prompt. After an error, where nobody was there to see it, the
        exit status is 1."""
        # Ctrl-C belongs to the answer here, however often: the thread that ends the process at the second is not told.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        failed = False
        for line in _lines():
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    if not self._command(line):
                        break
                else:
                    self._show(self._partner.ask(line, self._options))
            except ColiError as error:
                self._streams.plain(f"coli: {error}")
                failed = True
        if failed and not sys.stdin.isatty():
            click.get_current_context().exit(1)

    def _command(self, line: str) -> bool:
        """Do what a line with / says; False to leave."""
        name, _, rest = line.partition(" ")
        rest, partner, streams = rest.strip(), self._partner, self._streams
        match name:
            case "/quit" | "/exit":
                return False
            case "/retry":
                self._show(partner.retry(self._options))
            case "/reset":
                partner.reset()
            case "/system":
                partner.system = rest or partner.system
                streams.plain(f"system: {partner.system or ''}")
            case "/set":
                self._set(rest)
            case "/stats":
                self._stats()
            case "/save" | "/load" if rest:
                (partner.save if name == "/save" else partner.load)(Path(os.path.expanduser(rest)))
                streams.plain(f"{name[1:]}: {rest}, {len(partner.messages)} messages")
            case "/save" | "/load":
                raise OptionError(f"{name}: expected the name of a file behind it")
            case "/help":
                for each in HELP:
                    streams.plain(each)
            case _:
                raise OptionError(f"{line.strip()}: no such command; /help lists them")
        return True

    def _show(self, pieces: Iterator[str]) -> None:
        anything = False
        try:
            for piece in pieces:
                self._streams.text(piece)
                anything = anything or bool(piece)
        except KeyboardInterrupt:
            if type(sys.exc_info()[1]) is not KeyboardInterrupt:  # a signal that ends the process
                raise
            with contextlib.suppress(AttributeError):
                pieces.close()  # type: ignore[attr-defined]
            if sys.stdout.isatty():
                self._streams.text("\n")  # behind the ^C that the terminal shows
            else:
                self._streams.end_text(anything)
            self._streams.plain("(stopped)")
            return
        self._streams.end_text(anything)
        if self._verbose:
            self._stats()

    def _stats(self) -> None:
        result = self._partner.result
        if result is None:
            self._streams.plain("no answer in this process yet")
            return
        for line in report_lines(result.report, tuple(result.lines), self._options.max_tokens):
            self._streams.plain(line)

    def _set(self, rest: str) -> None:
        name, _, text = rest.replace("-", "_", 1).partition(" ") if not rest.startswith("-") else rest.partition(" ")
        if name and name not in (*SAMPLER, "ngen"):
            raise OptionError(f"/set: {name}: expected ngen, {', '.join(SAMPLER)}")
        if name and text.strip():
            value = BY_NAME[name].parse(text.strip(), f"/set {name}")
            if name == "ngen":
                self._options = replace(self._options, max_tokens=value)
            else:
                sampler = replace(self._options.sampler, **{SAMPLER[name]: value})
                self._options = replace(self._options, sampler=sampler)
        for each in [name] if name else ["ngen", *SAMPLER]:
            value = self._options.max_tokens if each == "ngen" else getattr(self._options.sampler, SAMPLER[each])
            self._streams.plain(f"{each} = {value}")


def _lines() -> Iterator[str]:
    """What the user types, with line editing and history on a terminal; else the lines of standard input."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        while line := sys.stdin.buffer.readline():
            yield line.decode("utf-8", "replace").rstrip("\r\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it and keeps the history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()  # behind the ^C that the terminal shows
            raise
        yield line
