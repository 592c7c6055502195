"""`coli graph`: n-grams of the user's own text to draft from."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli.flags import OUTPUT, settings_options
from coli.cli.index_commands import KINDS, StageProgress, index_group, model_tokenizer, open_settings
from coli.cli.json_output import STDOUT, write_json
from coli.cli.model_path import model_path
from coli.cli.streams import Streams
from coli.errors import OptionError
from coli.impostors import open_input
from coli.options import draft_options, engine_options, generate_options, resolve
from coli.settings_table import TABLE

if TYPE_CHECKING:
    from coli.drafts.ngram_index import Mixing
    from coli.tools.graph_calibrate import Score

_UNUSED = ("json", "tokens")  # settings of a single answer
BENCH = tuple(
    setting.name
    for setting in TABLE
    if setting.group in ("model", "generate", "engine", "drafts", "output") and setting.name not in _UNUSED
)
_OTHER_SOURCES = ("grammar", "schema", "grammar_draft", "corpus", "corpus_k", "corpus_minacc", "draft", "mtp")
_OFFERED = tuple(name for name in BENCH if name not in ("graph", *_OTHER_SOURCES))
STDIN = Path("-")
PROMPTS_CAP = 16 << 20  # bytes
QUESTIONS = ("What is contract law?", "What is a force majeure clause?", "When may a party end an agreement?")


def _number(context: click.Context, option: click.Parameter, value: float) -> float:
    """nan is in every range."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number", context, option)
    return value


command = index_group(
    "graph",
    "Make and inspect n-gram graphs for --graph from text of the kind the model will write.",
    draft_special=False,
)


@command.command("view")
@click.argument("graph", metavar="GRAPH", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="HTML file")
@click.option("--max-nodes", default=100, show_default=True, type=click.IntRange(2, 1000), help="nodes at most")
@click.option(
    "--min-weight",
    default=0.1,
    show_default=True,
    type=click.FloatRange(0, 1),
    callback=_number,
    help="least likely edge",
)
@settings_options("model", *OUTPUT)
def view(graph: Path, output: Path, max_nodes: int, min_weight: float, **flags: Any) -> None:
    """Draw the most frequent contexts of GRAPH as one HTML page without scripts."""
    from coli.drafts.ngram_index import NgramIndex
    from coli.tools.graph_view import page
    from coli.tools.index_facts import check_content
    from coli.tools.output_file import checked_target, whole_file

    checked_target(output, [str(graph)])
    settings, streams = open_settings(flags)
    tokenizer, vocab_size = model_tokenizer(settings, streams)
    index = NgramIndex.open(graph, vocab_size=vocab_size, tokenizer=tokenizer.fingerprint)
    check_content(index)  # its numbers are followed to places in the file
    text = page(index, lambda ids: tokenizer.decode(list(ids)), max_nodes, min_weight)
    with whole_file(output) as file:
        file.write(text.encode("utf-8", "replace"))
    streams.report(f"{output}: {text.count('<circle') - 2} nodes, {text.count('<path')} edges")


@command.command("calibrate")
@click.argument("graph", metavar="GRAPH", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True)
@click.option("--k", default=5, show_default=True, type=click.IntRange(1, 63), help="ids per draft")
@click.option("--format", "kind", type=KINDS, help="how to read the inputs  [default: by name and content]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@settings_options("model", *OUTPUT)
def calibrate(graph: Path, files: tuple[str, ...], k: int, kind: str | None, as_json: bool, **flags: Any) -> None:
    """Find the mixing that drafts best on FILES, text that GRAPH was not built of."""
    from coli.drafts.ngram_index import NgramIndex
    from coli.tools.corpus_shards import read_tokens
    from coli.tools.graph_calibrate import calibrate as fit

    settings, streams = open_settings(flags)
    tokenizer, vocab_size = model_tokenizer(settings, streams)
    index = NgramIndex.open(graph, vocab_size=vocab_size, tokenizer=tokenizer.fingerprint)
    text = read_tokens(files, kind, tokenizer, vocab_size)
    scores = fit(index, text.ids, k, StageProgress(streams))
    streams.clear_progress()
    if as_json:
        write_json(STDOUT, {"k": k, "scores": [_facts(entry) for entry in scores]})
    else:
        _show(scores, k, streams)
    streams.report(f"to draft like that: {_flags(scores[0].mixing)}")


@command.command("bench")
@click.argument("graph", metavar="GRAPH", required=False, type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="what to answer (repeatable)  [default: three "
              "questions about contracts]")  # fmt: skip
@click.option(
    "--prompts", "prompt_file", type=click.Path(path_type=Path), help="file with a prompt on every line, or -"
)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 1000), help="each way; medians count")
@click.option(
    "--max-tokens", type=click.IntRange(2), metavar="N", help="tokens of an answer  [default: 100, or --ngen]"
)
@click.option("--raw", is_flag=True, help="feed prompts as they are, without the chat template")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@click.option("graph_path", "--graph-path", hidden=True, type=click.Path(path_type=Path), help="Same as GRAPH.")
@click.option("model_name", "--model-name", hidden=True, help="Same as --model.")
@settings_options(*_OFFERED)
def bench(
    graph: Path | None,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    rounds: int,
    max_tokens: int | None,
    raw: bool,
    as_json: bool,
    graph_path: Path | None,
    model_name: str | None,
    **flags: Any,
) -> None:
    """Answer prompts with and without drafts from GRAPH, in turn, and compare the time it takes.

    No other source drafts beside it; nothing is written to the model's usage history or to what its gate has measured.
    """
    if model_name is not None:
        if flags.get("model") is not None:
            raise OptionError("--model-name: the same as --model; give one of the two")
        flags["model"] = model_name
    settings = resolve(flags, names=BENCH)
    if settings["no_drafts"]:
        raise OptionError("--no-drafts: graph bench always measures plain decoding beside the graph's; leave it out")
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    if graph is not None and graph_path is not None:
        raise OptionError("--graph-path: the same as GRAPH; give one of the two")
    path = graph or graph_path or settings["graph"]
    if path is None:
        raise OptionError("graph bench: give the graph to draft from")
    asked = [*prompts, *(_prompt_lines(prompt_file) if prompt_file is not None else [])] or list(QUESTIONS)
    from coli.llm import LLM
    from coli.tools.graph_bench import compare, facts, lines

    tokens = max_tokens or (settings["ngen"] if settings.given("ngen") else 100)
    seed = 0 if settings["seed"] is None else settings["seed"]
    options = generate_options(settings)
    options = dataclasses.replace(options, max_tokens=tokens, sampler=dataclasses.replace(options.sampler, seed=seed))
    drafts = dataclasses.replace(draft_options(settings), graph=path, draft=0, corpus=None, grammar=None, schema=None)
    engine = dataclasses.replace(engine_options(settings), usage_save=False, gate_save=False, mtp=False)
    with LLM.open(model_path(settings, streams.notice), engine, streams.notice) as llm:
        found = compare(llm, asked, options, drafts, rounds=rounds, raw=raw, progress=streams.progress)
    streams.clear_progress()
    if as_json:
        write_json(STDOUT, facts(found))
    else:
        streams.text("\n".join(lines(found)) + "\n")


def _prompt_lines(path: Path) -> list[str]:
    try:
        if path == STDIN:
            data = sys.stdin.buffer.read(PROMPTS_CAP + 1)
        else:
            with open_input(path, PROMPTS_CAP + 1) as file:
                data = file.read(PROMPTS_CAP + 1) or b""  # a device may have nothing to say
        if len(data) > PROMPTS_CAP:
            raise OptionError(f"--prompts: {path}: more than {PROMPTS_CAP} bytes are no list of prompts")
        found = [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise OptionError(f"--prompts: {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--prompts: {path}: not UTF-8 text (byte {error.start})") from None
    if not found:
        raise OptionError(f"--prompts: {path}: no prompt in it; expected one on every line")
    return found


def _facts(score: Score) -> dict[str, Any]:
    mixing = score.mixing
    return {
        "mix": mixing.mix,
        "order_bias": mixing.order_bias,
        "mix_temperature": mixing.mix_temperature,
        "reliability_weight": mixing.reliability_weight,
        "entropy_penalty": mixing.entropy_penalty,
        "accepted_length": score.length,
        "position_0_acceptance": score.first,
        "drafted": score.drafted,
    }


def _flags(mixing: Mixing) -> str:
    """What `coli run` is told to mix so."""
    if mixing.mix != "attentive":
        return f"--mix {mixing.mix}"
    return (
        f"--mix attentive --order-bias {mixing.order_bias:g} --mix-temperature {mixing.mix_temperature:g} "
        f"--reliability-weight {mixing.reliability_weight:g} --entropy-penalty {mixing.entropy_penalty:g}"
    )


def _show(scores: list[Score], k: int, streams: Streams) -> None:
    for score in scores:
        mixing = score.mixing
        knobs = (
            f" order_bias {mixing.order_bias:g}, mix_temperature {mixing.mix_temperature:g}, reliability_weight "
            f"{mixing.reliability_weight:g}, entropy_penalty {mixing.entropy_penalty:g}"
            if mixing.mix == "attentive"
            else ""
        )
        streams.text(
            f"{mixing.mix}:{knobs}\n  {score.length:.3f} of {k} accepted per place, first right "
            f"{100 * score.first:.1f}%, drafted at {100 * score.drafted:.1f}%\n"
        )
