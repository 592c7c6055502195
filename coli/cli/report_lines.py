"""The end report as lines for people, from the fields of the JSON report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def report_lines(report: Mapping[str, Any], source_lines: tuple[str, ...], max_tokens: int) -> list[str]:
    """Speed beside tokens/forward, hit rate, bytes per token and memory; then the draft sources' own lines."""
    lines = [
        f"prompt: {report['prompt_tokens']} tokens, {report['prefill_tps']:.1f} tok/s, "
        f"first token after {report['ttft_s']:.2f} s",
        f"answer: {report['generated_tokens']} tokens, {report['decode_tps']:.2f} tok/s, "
        f"{report['tokens_per_forward']:.2f} tokens/forward, seed {report['seed']}, "
        f"ended by {ended_by(report, max_tokens)}",
    ]
    ahead = report["prefetch"]
    if report["expert_hit_rate"] is not None:
        lines.append(
            f"experts: {percent(report['expert_hit_rate'])} hit rate, {percent(report['pinned_hit_rate'])} pinned, "
            f"{size(report['bytes_per_token'])} read per token, {report['reads']} reads"
            + (f" ({ahead['reads']} ahead, {ahead['used']} of them used)" if ahead["reads"] else "")
            + (f", {report['cache']}" if report.get("cache") else "")
        )
    lines.append(
        f"memory: peak {size(report['peak_memory_bytes'])} of {size(report['memory_budget_bytes'])}, "
        f"{report['major_faults']} major faults"
    )
    if report.get("bottleneck"):
        shares = report["time_s"]
        total = sum(shares.values())
        lines.append(
            "time: "
            + ", ".join(f"{seconds / total:.0%} {name.replace('_', ' ')}" for name, seconds in shares.items())
            + (
                f"; {size(report['disk_bytes_per_s'])}/s read on average, "
                f"{size(report['reading_bytes_per_s'])}/s while reading"
                if shares["disk_wait"] > 0.01 * total
                else ""
            )
        )
        lines.append(f"bottleneck: {report['bottleneck']}")
    return [*lines, *source_lines]


def ended_by(report: Mapping[str, Any], max_tokens: int) -> str:
    """The finish reason, and which limit it was."""
    if report["finish_reason"] != "length":
        return str(report["finish_reason"])
    if report["generated_tokens"] >= max_tokens:
        return f"length (--ngen {max_tokens})"
    used = report["prompt_tokens"] + report["generated_tokens"]
    return f"length (context full: {report['prompt_tokens']} prompt tokens of {used})"


def percent(share: float | None) -> str:
    """0.985 -> 98.5%."""
    return "-" if share is None else f"{100 * share:.1f}%"


def size(count: float | None) -> str:
    """Bytes with a decimal unit: 1234567 -> 1.23 MB."""
    if count is None:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
