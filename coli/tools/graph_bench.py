"""`coli graph bench`: the same prompts with and without the graph's drafts, in turn, in the figures of the graph tool.

Reading the prompt is timed apart: drafts have no part in it. Called by the command line.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coli.errors import ColiError
from coli.generation import GenerationResult
from coli.llm import LLM
from coli.options import DraftOptions, GenerateOptions

WARMUP_TOKENS = 8
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Way:
    """All answers of one way of decoding. Seconds are sums over prompts of the median round's."""

    prefill_s: float
    decode_s: float
    prompt_tokens: int
    decode_tokens: int  # the first token of each answer belongs to the prefill
    forwards: int
    judged_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.decode_tokens / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways. identical: every answer had the same ids with and without drafts, in every round."""

    native: Way
    drafted: Way
    identical: bool
    prompts: int
    rounds: int

    @property
    def speedup(self) -> float:
        """Of decoding; the time per token counts, as answers under --accept rejection differ in length."""
        return self.drafted.tokens_per_s / self.native.tokens_per_s if self.native.tokens_per_s else 0.0


def compare(
    llm: LLM,
    prompts: Sequence[str],
    options: GenerateOptions,
    drafts: DraftOptions,
    *,
    rounds: int,
    raw: bool = False,
    progress: Progress = lambda line: None,
) -> Comparison:
    """Answer each prompt `rounds` times each way. options.sampler.seed must be set for answers to be the same.

    Raises what generating raises.
    """
    plain = DraftOptions(enabled=False)
    ids = [llm.prompt_ids(prompt, raw=raw) for prompt in prompts]
    llm.new_session(max(map(len, ids)) + options.max_tokens, drafts=drafts)  # opens the graph, then loads the model
    short = replace(options, max_tokens=min(WARMUP_TOKENS, options.max_tokens))
    for way in (plain, drafts):
        _ = llm.generate(ids[0], short, way).result
    found: tuple[list[list[GenerationResult]], ...] = ([[] for _ in ids], [[] for _ in ids])
    for number in range(rounds):
        for at, prompt_ids in enumerate(ids):
            progress(f"round {number + 1} of {rounds}, prompt {at + 1} of {len(ids)}")
            order = (0, 1) if (number + at) % 2 == 0 else (1, 0)  # neither is always first
            for which in order:
                found[which][at].append(llm.generate(prompt_ids, options, (plain, drafts)[which]).result)
    identical = all(
        len({result.token_ids for result in (*native, *drafted)}) == 1 for native, drafted in zip(*found, strict=True)
    )
    if not identical and drafts.accept == "match":
        raise ColiError("graph bench: an answer with drafts differs from the one without: please report this")
    return Comparison(_way(found[0]), _way(found[1]), identical, len(ids), rounds)


def _way(results: Sequence[Sequence[GenerationResult]]) -> Way:
    """results: per prompt and round."""
    firsts = [rounds[0] for rounds in results]
    counts = [result.report["drafts"].get("graph", {}) for result in firsts]
    return Way(
        prefill_s=sum(statistics.median(map(_prefill_s, rounds)) for rounds in results),
        decode_s=sum(statistics.median(map(_decode_s, rounds)) for rounds in results),
        prompt_tokens=sum(result.report["prompt_tokens"] for result in firsts),
        decode_tokens=sum(max(len(result.token_ids) - 1, 0) for result in firsts),
        forwards=sum(result.report["forwards"] for result in firsts),
        judged_at=_summed([count.get("judged_at", ()) for count in counts]),
        accepted_at=_summed([count.get("accepted_at", ()) for count in counts]),
    )


def _prefill_s(result: GenerationResult) -> float:
    rate: float = result.report["prefill_tps"]
    return result.report["prompt_tokens"] / rate if rate else 0.0


def _decode_s(result: GenerationResult) -> float:
    rate: float = result.report["decode_tps"]
    return (result.report["generated_tokens"] - 1) / rate if rate else 0.0


def _summed(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*lists, strict=True)))


def facts(comparison: Comparison) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "prompts": comparison.prompts,
        "rounds": comparison.rounds,
        "identical": comparison.identical,
        "speedup": round(comparison.speedup, 4),
        **{
            name: {
                "time_s": round(way.decode_s, 6),
                "tokens_per_s": round(way.tokens_per_s, 3),
                "prefill_s": round(way.prefill_s, 6),
                "prompt_tokens": way.prompt_tokens,
                "tokens": way.decode_tokens,
                "forwards": way.forwards,
                "tokens_per_forward": round(way.tokens_per_forward, 4),
                "judged_at": list(way.judged_at),
                "accepted_at": list(way.accepted_at),
            }
            for name, way in (("native", comparison.native), ("speculative", comparison.drafted))
        },
    }


def lines(comparison: Comparison) -> list[str]:
    """What the graph tool prints, and what it does not: the prompt's time, the other positions, tokens per forward."""
    native, drafted = comparison.native, comparison.drafted
    judged, accepted = sum(drafted.judged_at), sum(drafted.accepted_at)
    found = [
        "Native decoding:",
        *_times(native),
        "",
        "Speculative decoding:",
        *_times(drafted),
        f"  Draft acceptance rate: {_percent(accepted, judged)}",
        *(
            f"  Position {at} acceptance: {right}/{compared} ({_percent(right, compared)})"
            for at, (right, compared) in enumerate(zip(drafted.accepted_at, drafted.judged_at, strict=True))
        ),
        f"  Tokens/forward: {drafted.tokens_per_forward:.2f}",
        "",
        "=" * 60,
    ]
    speedup = comparison.speedup
    pace = f"{speedup:.2f}x faster" if speedup >= 1 else f"{speedup:.2f}x of the speed, slower"
    same = "the same answers" if comparison.identical else "answers of the same law"
    found.append(
        f"Speedup: {pace} than native decoding ({comparison.prompts} prompts, {comparison.rounds} rounds, {same})"
    )
    return [*found, "=" * 60]


def _times(way: Way) -> list[str]:
    return [
        f"  Time: {way.decode_s:.2f}s",
        f"  Tokens/sec: {way.tokens_per_s:.2f}",
        f"  Reading the prompts, apart: {way.prefill_s:.2f}s for {way.prompt_tokens} tokens",
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "0.00%"
