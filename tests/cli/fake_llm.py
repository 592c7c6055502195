"""Stands in for coli.llm: a model that says what it was asked, one word at a time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coli.errors import NotConvertedError

REPORT: dict[str, Any] = {
    "finish_reason": "stop",
    "seed": 7,
    "prompt_tokens": 3,
    "generated_tokens": 4,
    "forwards": 3,
    "tokens_per_forward": 1.3333,
    "ttft_s": 0.25,
    "prefill_tps": 12.0,
    "decode_tps": 34.5,
    "expert_hit_rate": 0.985,
    "pinned_hit_rate": 0.0,
    "expert_bytes_read": 4_000_000,
    "bytes_per_token": 1_000_000,
    "reads": 9,
    "prefetch": {"reads": 0, "used": 0},
    "major_faults": 0,
    "peak_memory_bytes": 2_000_000_000,
    "memory_budget_bytes": 6_000_000_000,
    "time_s": {},
    "drafts": {},
    "gate": "seed",
}


@dataclass
class Behaviour:
    """What the fake does; tests change it."""

    pieces: list[str] = field(default_factory=lambda: ["Paris", " is", " é🙂"])
    template: Any = field(default_factory=lambda: SimpleNamespace(knows_thinking=False))
    error: BaseException | None = None  # raised after the first piece
    endless: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Any] = field(default_factory=dict)


behaviour = Behaviour()


class Generation:
    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids

    def __iter__(self):
        for piece in behaviour.pieces:
            yield piece
            if behaviour.error is not None:
                raise behaviour.error
        while behaviour.endless:
            yield "more "

    @property
    def result(self) -> SimpleNamespace:
        text = "".join(behaviour.pieces)
        return SimpleNamespace(
            text=text,
            token_ids=(10, 11, 12, 13),
            prompt_ids=tuple(self.prompt_ids),
            report={"text": text, "token_ids": [10, 11, 12, 13], **REPORT, **behaviour.report},
            lines=("corpus drafts: 90% acceptance (9/10 proposed from 96 frozen ids)",),
        )


class LLM:
    spec = SimpleNamespace(vocab_size=100)

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, options: Any, notice: Any, tokenizer: Any, trace: Any = None):
        behaviour.calls.update(path=path, engine=options)
        if not (path / "coli.json").exists():
            raise NotConvertedError(f"{path}: not converted; type: coli convert {path} {path}-coli")
        notice("opened")
        yield cls()

    @property
    def chat_template(self) -> Any:
        return behaviour.template

    def prompt_ids(self, text: str, *, raw: bool, system: str | None, think: bool | None) -> list[int]:
        behaviour.calls.update(text=text, raw=raw, system=system, think=think)
        return [1, 2, 3]

    def generate(self, prompt_ids: list[int], options: Any, drafts: Any) -> Generation:
        behaviour.calls.update(prompt_ids=prompt_ids, generate=options, drafts=drafts)
        return Generation(prompt_ids)
