"""`coli replay`: what other cache policies and budgets would have read for a recorded run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli import charts
from coli.cli.flags import settings_options
from coli.cli.json_output import STDOUT, write_json
from coli.cli.report_lines import percent, size
from coli.cli.streams import Streams, write_output
from coli.cli.tables import as_text
from coli.errors import MemoryBudgetError, OptionError
from coli.options import resolve
from coli.setting_values import parse_size

if TYPE_CHECKING:
    from coli.tools.charts import Chart
    from coli.tools.replay import Replay
    from coli.tools.trace import Trace

SETTINGS = ("color", "quiet", "verbose", "debug")
SHARES = "10%,20%,30%,40%,50%,60%,70%,80%,90%"


@click.command("replay")
@click.argument("trace_file", metavar="TRACE", type=click.Path(path_type=Path))
@click.option(
    "--policies", default=None, metavar="LIST", help="of lru, slru, lfru, clock, pinned, belady  [default: all]"
)
@click.option("--budgets", default=SHARES, show_default=True, metavar="LIST", help="sizes, or shares of all experts")
@click.option("--warmup", default=0.5, show_default=True, type=click.FloatRange(0, 0.95), help="share not counted")
@click.option("--per-layer", is_flag=True, help="slots of every layer's own instead of shared ones")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help=charts.HELP)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@settings_options(*SETTINGS)
def command(
    trace_file: Path,
    policies: str | None,
    budgets: str,
    warmup: float,
    per_layer: bool,
    plot: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Replay TRACE, which `coli trace` wrote, with the engine's own policies at other budgets.

    A budget is the memory for experts alone. belady knows the future: no policy can do better. The first part of the
    trace only fills the cache (--warmup), and teaches `pinned` what to pin.
    """
    settings = resolve(flags, names=SETTINGS)
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    charts.check_picture(plot)
    if as_json and plot == charts.TERMINAL:
        raise OptionError("--plot: standard output is taken by --json; give a file")
    from coli.tools.replay import POLICIES, replay, replay_setup
    from coli.tools.trace import Trace

    if not 0 <= warmup <= 0.95:  # not a number passes click's range
        raise OptionError(f"--warmup: expected a share from 0 to 0.95, found {warmup}")
    names = POLICIES if policies is None else tuple(name.strip() for name in policies.split(","))
    for name in names:
        if name not in POLICIES:
            raise OptionError(f"--policies: expected some of {', '.join(POLICIES)}, found {name!r}")
    trace = Trace.read(trace_file)
    capacities = [_budget(text.strip(), trace) for text in budgets.split(",")]
    again = replay_setup(trace, trace.setup)
    if again != trace.counts:
        streams.notice(
            f"{trace_file}: replaying its own setup does not give its own counts: the policy has changed since"
        )
    try:
        found = [replay(trace, name, n, per_layer=per_layer, warmup=warmup) for n in capacities for name in names]
    except MemoryBudgetError as error:
        raise OptionError(f"--budgets: {str(error).removesuffix(': raise --ram')}: give a larger budget") from None
    if as_json:
        write_json(STDOUT, _facts(trace, found))
    else:
        write_output(_table(trace, found, names).encode())
    if plot is not None:
        charts.show(_charts(trace, found, names), plot)


def _budget(text: str, trace: Trace) -> int:
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise OptionError(f"--budgets: expected a share above 0% and up to 100%, found {text!r}")
        return int(share * trace.model.experts_bytes)
    try:
        return parse_size(text)
    except ValueError:
        raise OptionError(f"--budgets: expected sizes like 2GB or shares like 25%, found {text!r}") from None


def _facts(trace: Trace, found: list[Replay]) -> dict[str, Any]:
    model = trace.model
    return {
        "fingerprint": model.fingerprint,
        "experts_bytes": model.experts_bytes,
        "bytes_per_token_cycle": model.cycle_bytes,
        "rows": trace.tokens,
        "recorded_hit_rate": trace.counts.hit_rate,
        "replays": [
            {
                "policy": one.policy,
                "capacity_bytes": one.capacity_bytes,
                "hit_rate": one.counts.hit_rate,
                "pinned_hits": one.counts.pinned_hits,
                "bytes_read": one.bytes_read,
                "bytes_per_token": round(one.bytes_per_token),
                "tokens": one.tokens,
            }
            for one in found
        ],
    }


def _charts(trace: Trace, found: list[Replay], names: tuple[str, ...]) -> list[Chart]:
    """Hits and bytes by budget, a line for each policy."""
    from coli.tools.charts import Chart

    def series(value: Callable[[Replay], float]) -> dict[str, list[tuple[float | str, float]]]:
        share = 100 / trace.model.experts_bytes
        return {
            name: [(round(one.capacity_bytes * share, 1), value(one)) for one in found if one.policy == name]
            for name in names
        }

    budget = f"memory for experts, % of {size(trace.model.experts_bytes)}"
    return [
        Chart("hit rate of decode unions", budget, "hits", series(lambda one: one.counts.hit_rate), percent=True),
        Chart("read per token", budget, "MB", series(lambda one: one.bytes_per_token / 1e6)),
    ]


def _table(trace: Trace, found: list[Replay], names: tuple[str, ...]) -> str:
    model = trace.model
    by_budget: dict[int, dict[str, Replay]] = {}
    for one in found:
        by_budget.setdefault(one.capacity_bytes, {})[one.policy] = one
    lines = [
        f"{trace.tokens} decode rows; experts {size(model.experts_bytes)}, one token uses {size(model.cycle_bytes)}; "
        f"the run itself hit {percent(trace.counts.hit_rate)}",
        "hit rate of decode unions, and bytes read per token, by memory for experts:",
    ]
    rows = [
        [f"{size(capacity)} ({capacity / model.experts_bytes:.0%})"]
        + [f"{percent(one[name].counts.hit_rate)} {size(one[name].bytes_per_token)}" for name in names]
        for capacity, one in by_budget.items()
    ]
    return "\n".join(lines) + "\n" + as_text(["budget", *names], rows)
