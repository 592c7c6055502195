"""Counters of one response, filled by the engine and read by the report."""

from dataclasses import dataclass


@dataclass(slots=True)
class RunStats:
    """Token counts, forwards (decode only, prefill not counted) and seconds of one response."""

    prompt_tokens: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    finish_reason: str = "length"

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens per decode forward; 0 when no forward was needed."""
        return self.generated_tokens / self.forwards if self.forwards else 0.0

    @property
    def prefill_tps(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second of the decode steps; the first token belongs to the prefill."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s else 0.0
