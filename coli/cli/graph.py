"""`coli graph`: n-grams of the user's own text to draft from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli.flags import OUTPUT, settings_options
from coli.cli.index_commands import KINDS, StageProgress, index_group, model_tokenizer, open_settings
from coli.cli.json_output import STDOUT, write_json
from coli.cli.streams import Streams

if TYPE_CHECKING:
    from coli.tools.graph_calibrate import Score

command = index_group(
    "graph",
    "Make and inspect n-gram graphs for --graph from text of the kind the model will write.",
    draft_special=False,
)


@command.command("view")
@click.argument("graph", metavar="GRAPH", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="HTML file")
@click.option("--max-nodes", default=100, show_default=True, type=click.IntRange(2, 1000), help="nodes at most")
@click.option("--min-weight", default=0.1, show_default=True, type=click.FloatRange(0, 1), help="least likely edge")
@settings_options("model", *OUTPUT)
def view(graph: Path, output: Path, max_nodes: int, min_weight: float, **flags: Any) -> None:
    """Draw the most frequent contexts of GRAPH as one HTML page without scripts."""
    from coli.drafts.ngram_index import NgramIndex
    from coli.tools.corpus_shards import write_error
    from coli.tools.graph_view import page

    settings, streams = open_settings(flags)
    tokenizer, vocab_size = model_tokenizer(settings, streams)
    index = NgramIndex.open(graph, vocab_size=vocab_size, tokenizer=tokenizer.fingerprint)
    text = page(index, lambda ids: tokenizer.decode(list(ids)), max_nodes, min_weight)
    temporary = output.with_name(output.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(output, error) from None
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
    scores = fit(index, text.ids.tolist(), k, StageProgress(streams))
    streams.clear_progress()
    if as_json:
        write_json(STDOUT, {"k": k, "scores": [_facts(entry) for entry in scores]})
    else:
        _show(scores, k, streams)


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
