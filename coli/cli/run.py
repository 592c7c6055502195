"""`coli run`: one prompt, one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from coli.cli.flags import GENERATE, settings_options
from coli.cli.json_output import STDOUT, check_target, write_json
from coli.cli.model_path import model_path
from coli.cli.prompt import read_prompt
from coli.cli.report_lines import report_lines
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.options import Resolved, draft_options, engine_options, generate_options, resolve

if TYPE_CHECKING:
    from coli.llm import LLM, GenerationResult
    from coli.store.stats import TraceSink


@click.command("run")
@click.argument("prompt", nargs=-1, type=str)
@settings_options(*GENERATE)
def command(prompt: tuple[str, ...], **flags: Any) -> None:
    """Answer PROMPT (arguments are joined by spaces; - stands for standard input, less its last newline).

    The answer alone goes to standard output, everything else to standard error.
    """
    settings = resolve(flags, names=GENERATE)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    respond(prompt, settings, streams)


def respond(
    prompt: tuple[str, ...],
    settings: Resolved,
    streams: Streams,
    trace: TraceSink | None = None,
    check: Callable[[LLM], None] = lambda llm: None,
    done: Callable[[LLM], None] = lambda llm: None,
) -> None:
    """Answer one prompt and show the report. `check` sees the opened model before the answer, `done` behind it."""
    check_target(settings["json"])
    _check_prompt_flags(prompt, settings)
    text = None if settings["prompt_ids"] is not None else read_prompt(prompt, settings["prompt"])
    path = model_path(settings, streams.notice)
    streams.progress(f"loading {path}")
    from coli.text.loading import load_meanwhile

    tokenizer = load_meanwhile(path)
    from coli.llm import LLM  # numba and the kernels take a second: only now

    with LLM.open(path, engine_options(settings), streams.notice, tokenizer, trace) as llm:
        check(llm)
        ids = _prompt_ids(llm, text, settings, streams)
        generation = llm.generate(ids, generate_options(settings), draft_options(settings))
        streams.progress(f"reading {len(ids)} prompt tokens")
        for piece in generation:
            if settings["json"] != STDOUT:
                streams.text(piece)
        streams.clear_progress()
        result = generation.result
        done(llm)
    if settings["json"] != STDOUT:
        streams.end_text(bool(result.text))
    _show(result, settings, streams)


def _check_prompt_flags(prompt: tuple[str, ...], settings: Resolved) -> None:
    """Refuse flags that would change nothing."""
    given = {name for name in ("prompt_ids", "raw", "system", "think") if settings.values[name].origin == "flag"}
    if "prompt_ids" in given and prompt:
        raise OptionError("--prompt-ids: there is a prompt as text too; give one of the two")
    without_template = given & {"prompt_ids", "raw"}
    if without_template and given & {"system", "think"}:
        flag = "--" + min(without_template).replace("_", "-")
        raise OptionError(f"{flag}: no template is used, so --system and --think have no effect; leave them out")


def _prompt_ids(llm: LLM, text: str | None, settings: Resolved, streams: Streams) -> list[int]:
    if text is None:
        ids = list(settings["prompt_ids"])
        beyond = next((i for i in ids if i >= llm.spec.vocab_size), None)
        if beyond is not None:
            raise OptionError(f"--prompt-ids: {beyond} is outside the vocabulary of {llm.spec.vocab_size} ids")
        return ids
    template = llm.chat_template
    if template is None and not settings["raw"]:
        if settings["system"] is not None:
            raise OptionError("--system: the model has no chat template to put it in; leave it out")
        streams.notice("the model has no chat template: plain completion of the prompt")
    if settings["think"] is not None and not settings["raw"] and (template is None or not template.knows_thinking):
        streams.notice(f"{_spelled(settings, 'think')}: the model's template does not ask for it: no effect")
    return llm.prompt_ids(text, raw=settings["raw"], system=settings["system"], think=settings["think"])


def _spelled(settings: Resolved, name: str) -> str:
    value = settings.values[name]
    if value.origin == "flag":
        return f"--{name}" if value.value else f"--no-{name}"
    return value.origin.removeprefix("environment ")


def _show(result: GenerationResult, settings: Resolved, streams: Streams) -> None:
    for line in report_lines(result.report, tuple(result.lines), settings["ngen"]):
        streams.report(line)
    if settings["verbose"]:
        for name, value in settings.values.items():
            streams.report(f"setting: {name} = {value.value} ({value.origin})")
    if settings["json"] is not None:
        write_json(settings["json"], {**result.report, "settings": settings.report()})
    if settings["tokens"]:
        for line in token_lines(result.prompt_ids, result.token_ids):
            streams.plain(line)


def token_lines(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> tuple[str, str]:
    """The two lines of --tokens; scripts cut the ids out of the second."""
    prompt = f"[PROMPT_TOKENS] {len(prompt_ids)}: {' '.join(map(str, prompt_ids))}"
    return prompt, f"[TOKENS] {len(token_ids)} generated:" + "".join(f" {token_id}" for token_id in token_ids)
