"""`coli plan`: what a model needs, what fits this machine, and how fast it may run, before anything is converted."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coli.cli.flags import MODEL, OUTPUT, settings_options
from coli.cli.json_output import STDOUT, write_json
from coli.cli.model_path import model_path
from coli.cli.report_lines import size
from coli.cli.streams import Streams, one_line, write_output
from coli.cli.tables import as_text
from coli.errors import CheckpointError, MemoryBudgetError, OptionError, ReadError, TokenizerError
from coli.options import Resolved, kernel_cache, resolve

if TYPE_CHECKING:
    from coli.store.limits import ProcessMemory
    from coli.tools.probe import DiskSpeed
    from coli.tools.sizes import ModelSizes

ENGINE = ("ram", "ctx", "kv", "threads", "simd", "kernel_cache")
CONTEXT = 4096  # positions, unless --ctx or the model says less
UNLIMITED = 1 << 60
# What a run has in memory before it plans and this command has not: compiled kernels, and a tokenizer where
# none can be loaded.
KERNELS_BYTES = 6_000_000
TOKENIZER_BYTES_PER_TOKEN = 1000


@click.command("plan")
@click.argument("model_argument", metavar="MODEL", required=False, type=str)
@click.option("--probe/--no-probe", default=True, help="measure disk and memory for the forecast, some seconds  [on]")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead")
@settings_options(*MODEL, *ENGINE, *OUTPUT)
def command(model_argument: str | None, probe: bool, as_json: bool, **flags: Any) -> None:
    """Show what MODEL needs and how fast it may run here.

    MODEL is a container, a GGUF file, a Hugging Face folder, or a folder with nothing but its config.json; what is not
    converted counts as `coli convert` would write it. Nothing is written, and of the weights only the probe reads some.
    """
    settings = resolve(flags, names=(*MODEL, *ENGINE, *OUTPUT))
    streams = Streams(settings["quiet"], settings["verbose"], settings["color"])
    for notice in settings.notices:
        streams.notice(notice)
    if model_argument is not None and settings.values["model"].origin == "flag":
        raise OptionError("--model: there is a MODEL argument too; give one of the two")
    path = model_path(settings, streams.notice, model_argument)
    from coli.tools.sizes import model_sizes

    sizes = model_sizes(path)
    facts = {"path": str(path), **describe(sizes, settings, _process_of_a_run(path, sizes))}
    facts["forecasts"] = None
    if probe:
        facts |= _forecasts(sizes, facts, settings, streams)
    if as_json:
        write_json(STDOUT, facts)
        return
    for line in plan_lines(facts):
        write_output(one_line(line).encode("utf-8", "replace") + b"\n")
    if facts["forecasts"]:
        write_output(_table(facts).encode())


def _process_of_a_run(path: Path, sizes: ModelSizes) -> ProcessMemory:
    """Memory of a process that is about to load the model."""
    import coli.llm  # noqa: F401  # its code counts too
    from coli.store.limits import process_memory
    from coli.text.tokenizer import Tokenizer

    tokenizer = None
    with contextlib.suppress(TokenizerError, CheckpointError):  # `coli info` tells what is wrong with it
        tokenizer = Tokenizer.load(path)
    now = process_memory()
    absent = KERNELS_BYTES + (TOKENIZER_BYTES_PER_TOKEN * sizes.spec.vocab_size if tokenizer is None else 0)
    return replace(now, anonymous_bytes=now.anonymous_bytes + absent)


def describe(sizes: ModelSizes, settings: Resolved, process: ProcessMemory) -> dict[str, Any]:
    """Sizes in bytes, and the budgets that matter: of the whole process, as --ram takes them."""
    from coli.loading import PREFILL_CHUNK, working_bytes
    from coli.model.kv_cache import kv_bytes, kv_bytes_per_token
    from coli.processors import usable_cores
    from coli.store.memory import PROCESS_VARIES_BYTES, MemoryNeeds, plan_memory

    spec = sizes.spec
    context = settings["ctx"] or min(CONTEXT, spec.max_position_embeddings)
    kv = "f16" if settings["kv"] == "auto" else settings["kv"]
    per_token = kv_bytes_per_token(spec, kv)
    threads = settings["threads"] or usable_cores()
    needs = MemoryNeeds(
        sizes.dense_bytes,
        kv_bytes(spec, kv, context),
        working_bytes(spec, min(PREFILL_CHUNK, context), context, threads),
    )
    smallest = max(sizes.record_bytes.values(), default=0) * spec.num_experts_per_tok
    whole = plan_memory(
        needs,
        ram=UNLIMITED,
        smallest_experts_bytes=smallest,
        all_experts_bytes=sizes.experts_bytes,
        levels=[],
        process=process,
    )
    fixed = (
        PROCESS_VARIES_BYTES
        + whole.process_bytes
        + needs.dense_bytes
        + needs.kv_bytes
        + needs.working_bytes
        + whole.slack_bytes
    )
    fits: dict[str, Any]
    try:
        here = plan_memory(
            needs,
            ram=settings["ram"],
            smallest_experts_bytes=smallest,
            all_experts_bytes=sizes.experts_bytes,
            process=process,
        )
        fits = {"fits": True, "budget_bytes": here.budget_bytes, "budget_from": here.source,
                "experts_bytes": here.experts_bytes, "arithmetic": here.arithmetic()}  # fmt: skip
    except MemoryBudgetError as error:
        fits = {"fits": False, "budget_bytes": None, "budget_from": None, "experts_bytes": 0, "arithmetic": str(error)}
    return {
        "source": sizes.source,
        "model_type": spec.model_type,
        "dense_bytes": sizes.dense_bytes,
        "dense_bytes_per_token": sizes.dense_read_bytes,
        "experts_bytes": sizes.experts_bytes,
        "moe_layers": len(spec.moe_layers),
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "record_bytes": max((sizes.record_bytes[i] for i in spec.moe_layers), default=0),
        "mtp_record_bytes": 0 if spec.mtp is None else sizes.record_bytes[spec.mtp.layer_idx],
        "bytes_per_token_cycle": sizes.cycle_bytes,
        "context": context,
        "kv": kv,
        "kv_bytes_per_token": per_token,
        "kv_bytes": needs.kv_bytes,
        "threads": threads,
        "process_bytes": whole.process_bytes,
        "buffers_bytes": needs.working_bytes,
        "slack_bytes": whole.slack_bytes,
        "smallest_budget_bytes": fixed + smallest,
        "cliff_budget_bytes": fixed + min(sizes.cycle_bytes, sizes.experts_bytes),
        "everything_budget_bytes": fixed + sizes.experts_bytes,
        "this_machine": fits,
    }


def plan_lines(facts: dict[str, Any]) -> list[str]:
    """The plan in sentences."""
    here = facts["this_machine"]
    lines = [
        f"{facts['path']}: {facts['model_type']}, {facts['source']}",
        f"dense weights {size(facts['dense_bytes'])}, of which one token reads {size(facts['dense_bytes_per_token'])}",
    ]
    if facts["experts_bytes"]:
        lines += [
            f"experts {size(facts['experts_bytes'])}: {facts['moe_layers']} layers of {facts['num_experts']} records "
            f"of {size(facts['record_bytes'])}; one token uses {facts['num_experts_per_tok']} a layer, "
            f"{size(facts['bytes_per_token_cycle'])} in all (a token cycle)",
        ]
    if facts["mtp_record_bytes"]:
        mtp = facts["mtp_record_bytes"]
        lines.append(f"MTP head included: one more layer of records of {size(mtp)}; --no-mtp does without its memory")
    lines += [
        f"KV cache {size(facts['kv_bytes_per_token'])} a token ({facts['kv']}), "
        f"{size(facts['kv_bytes'])} for {facts['context']} positions (--ctx)",
        f"--ram {_gb(facts['smallest_budget_bytes'])} is the smallest that runs, "
        f"{_gb(facts['cliff_budget_bytes'])} the smallest above the cliff (a token cycle of experts in memory), "
        f"{_gb(facts['everything_budget_bytes'])} keeps everything",
        f"this machine: {here['arithmetic']}",
    ]
    if here["fits"] and facts["experts_bytes"]:
        lines.append(f"here {here['experts_bytes'] / facts['experts_bytes']:.0%} of the experts fit in memory")
    if facts.get("disk"):
        how = "read past the page cache" if facts["disk"]["direct"] else "through the page cache: may be too good"
        lines.append(
            f"probe: disk {size(facts['disk']['bytes_per_s'])}/s ({how}), memory "
            f"{size(facts['memory_bytes_per_s'])}/s on {facts['threads']} threads"
        )
    elif facts.get("probe_failed"):
        lines.append(f"no forecast: {facts['probe_failed']}")
    return lines


def _gb(count: int) -> str:
    """As --ram takes it, rounded up."""
    return f"{-(-count // 10_000_000) / 100:.2f}"


def _forecasts(sizes: ModelSizes, facts: dict[str, Any], settings: Resolved, streams: Streams) -> dict[str, Any]:
    from coli.kernels import runtime
    from coli.loading import prepare_kernels
    from coli.tools.forecast import forecast
    from coli.tools.probe import disk_speed, memory_speed

    if not sizes.files:
        return {"probe_failed": "there are no weights to probe the disk with"}
    runtime.configure(settings["simd"], kernel_cache(settings), settings["threads"])
    prepare_kernels(streams.notice)
    streams.progress("probing disk and memory")
    disk: DiskSpeed | None
    try:
        disk = disk_speed(sizes.files, facts["record_bytes"] or 1 << 20)
    except ReadError as error:
        return {"probe_failed": str(error)}
    memory = memory_speed(facts["threads"])
    streams.clear_progress()
    fixed = facts["everything_budget_bytes"] - sizes.experts_bytes
    budgets = {
        "smallest that runs": facts["smallest_budget_bytes"],
        "above the cliff": facts["cliff_budget_bytes"],
        "half the experts": fixed + sizes.experts_bytes // 2,
        "everything": facts["everything_budget_bytes"],
    }
    if facts["this_machine"]["fits"]:
        budgets["this machine"] = fixed + facts["this_machine"]["experts_bytes"]
    found = []
    for name, budget in sorted(budgets.items(), key=lambda item: item[1]):
        one = forecast(sizes, budget - fixed, disk.bytes_per_s, memory)
        found.append({
            "budget": name, "budget_bytes": budget, "experts_bytes": one.experts_bytes,
            "tps": [round(one.slow_tps, 3), round(one.fast_tps, 3)],
            "hit_rate": [round(one.slow_hit_rate, 4), round(one.fast_hit_rate, 4)],
        })  # fmt: skip
    return {
        "disk": {"bytes_per_s": round(disk.bytes_per_s), "direct": disk.direct},
        "memory_bytes_per_s": round(memory),
        "forecasts": found,
    }


def _table(facts: dict[str, Any]) -> str:
    rows = [
        [
            one["budget"],
            _gb(one["budget_bytes"]),
            size(one["experts_bytes"]),
            f"{one['hit_rate'][0]:.0%} .. {one['hit_rate'][1]:.0%}",
            f"{one['tps'][0]:.3g} .. {one['tps'][1]:.3g}",
        ]
        for one in facts["forecasts"]
    ]
    note = "forecast, one token at a time without drafts (what is assumed: docs/streaming.md):\n"
    return note + as_text(["", "--ram", "for experts", "hit rate", "tok/s"], rows)
