"""The report of one run, with the field names scripts depend on.

Turns counters into one JSON-ready dict; prints nothing. Called by `llm` when a response is over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coli.engine.stats import RunStats
from coli.process_use import ProcessUse


@dataclass(frozen=True, slots=True)
class StoreCounters:
    """What the expert store counted during one run; all zero for a dense model. Times in seconds, sizes in bytes."""

    hits: int = 0
    misses: int = 0
    pinned_hits: int = 0
    bytes_read: int = 0
    reads: int = 0
    wait_s: float = 0.0
    reading_s: float = 0.0
    prefetched: int = 0
    prefetch_hits: int = 0

    def hit_rate(self) -> float | None:
        """Share of distinct experts found in memory; None when no expert was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def pinned_hit_rate(self) -> float | None:
        asked = self.hits + self.misses
        return self.pinned_hits / asked if asked else None

    def since(self, earlier: "StoreCounters") -> "StoreCounters":
        """What was counted after `earlier`."""
        return StoreCounters(
            *(getattr(self, name) - getattr(earlier, name) for name in StoreCounters.__dataclass_fields__)
        )


def run_report(
    *,
    text: str,
    token_ids: list[int],
    seed: int,
    stats: RunStats,
    store: StoreCounters,
    phases: dict[str, float],
    cache: str,
    drafts: dict[str, dict[str, Any]],
    gate: str,
    drafting: dict[str, Any],
    memory_budget_bytes: int,
    faults_before: int,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """One JSON-ready object; `phases` are seconds of forwards by phase, `cache` what was in memory at the start;
    `settings` is added by the command line, which knows where each came from."""
    use = ProcessUse.now()
    tokens = stats.generated_tokens
    time_s = _time_shares(stats.prefill_s + stats.decode_s, store.wait_s, phases)
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": stats.finish_reason,
        "seed": seed,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": tokens,
        "forwards": stats.forwards,
        "tokens_per_forward": round(stats.tokens_per_forward, 4),
        "ttft_s": round(stats.ttft_s, 6),
        "prefill_tps": round(stats.prefill_tps, 3),
        "decode_tps": round(stats.decode_tps, 3),
        "expert_hit_rate": store.hit_rate(),
        "pinned_hit_rate": store.pinned_hit_rate(),
        "expert_bytes_read": store.bytes_read,
        "bytes_per_token": round(store.bytes_read / tokens) if tokens else 0,
        "reads": store.reads,
        "prefetch": {"reads": store.prefetched, "used": store.prefetch_hits},
        "cache": cache,
        "major_faults": use.major_faults - faults_before,
        "peak_memory_bytes": use.peak_memory_bytes,
        "memory_budget_bytes": memory_budget_bytes,
        "time_s": time_s,
        "disk_bytes_per_s": round(store.bytes_read / max(stats.prefill_s + stats.decode_s, 1e-9)),
        "reading_bytes_per_s": round(store.bytes_read / store.reading_s) if store.reading_s else 0,
        "bottleneck": bottleneck(time_s, machine.get("threads", 1), memory_budget_bytes),
        "drafts": drafts,
        "gate": gate,
        "drafting": drafting,
        "machine": machine,
    }


def _time_shares(total_s: float, wait_s: float, phases: dict[str, float]) -> dict[str, float]:
    """disk_wait, experts, attention; other is the rest of the whole."""
    named = {"disk_wait": wait_s, "experts": phases["experts"], "attention": phases["attention"]}
    named["other"] = max(0.0, total_s - sum(named.values()))
    return {name: round(seconds, 6) for name, seconds in named.items()}


def bottleneck(time_s: Mapping[str, float], threads: int, memory_budget_bytes: int) -> str:
    """What most of the time went into, and the setting that would change it most; "" for a run too short to say."""
    total = sum(time_s.values())
    if total < _SHORTEST_S:
        return ""
    name = max(time_s, key=lambda each: time_s[each])
    what, knob = _BOTTLENECKS[name]
    knob = knob.format(threads=threads, budget=f"{memory_budget_bytes / 1e9:.2f} GB")
    return f"{what}, {time_s[name] / total:.0%} of the time: {knob}"


_SHORTEST_S = 0.5
_BOTTLENECKS = {
    "disk_wait": (
        "waiting for experts from the disk",
        "more memory helps most (--ram, now {budget}), then a faster disk or drafts that are mostly right",
    ),
    "experts": (
        "computing experts",
        "drafts save forwards (--draft, --corpus, --grammar, --graph); --threads is {threads}",
    ),
    "attention": (
        "attention and its projections",
        "a shorter context helps (so does --kv f16 for a float32 cache), drafts save forwards; --threads is {threads}",
    ),
    "other": (
        "dense matrices, the output matrix and sampling",
        "drafts save forwards (--draft, --corpus, --grammar, --graph); --threads is {threads}",
    ),
}
