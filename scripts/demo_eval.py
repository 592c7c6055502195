"""Exact match and router skew of an exported demo model: python scripts/demo_eval.py FOLDER [--samples N] [--seed S].

Greedy decoding gives the expected answer exactly when every token of that answer, its end included, is the argmax
after the ones before it: so one forward pass over prompt and answer decides, without generating. Weights are used as
exported (already quantized values), activations are rounded to int8 groups as the engine does.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import demo_data
import torch
from demo_export import load_checkpoint
from demo_model import Model, Weights
from tokenizers import Tokenizer
from torch import Tensor
from train_demo import encode, pack

BATCH = 16


@dataclass(frozen=True, slots=True)
class Failure:
    sample: demo_data.Sample
    right: str  # the answer up to the first wrong token
    wrong: str  # that token


@torch.no_grad()
def failures(
    model: Model, weights: Weights, tokenizer: Tokenizer, samples: list[demo_data.Sample], counts: Tensor
) -> list[Failure]:
    """The samples not answered exactly. Adds how often each expert was chosen on answers to `counts` (L, E)."""
    found = []
    for first in range(0, len(samples), BATCH):
        encoded = [(*encode(tokenizer, sample), sample) for sample in samples[first : first + BATCH]]
        encoded.sort(key=lambda item: len(item[0]) + len(item[1]))
        batch = pack([(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer, _ in encoded])
        model.chosen = []
        logits, _ = model.forward(weights, batch.ids, batch.packed, batch.wanted)
        for layer, expert_ids in enumerate(model.chosen):
            answered = expert_ids[batch.wanted].reshape(-1)
            counts[layer] += torch.bincount(answered, minlength=counts.shape[1])
        predicted = logits.argmax(-1).split([len(answer) for _, answer, _ in encoded])
        for (_, answer, sample), guess in zip(encoded, predicted, strict=True):
            bad = (guess != torch.tensor(answer)).nonzero()
            if len(bad):
                place = int(bad[0])
                right = tokenizer.decode(answer[:place])
                found.append(Failure(sample, right, tokenizer.decode([int(guess[place])], skip_special_tokens=False)))
    return found


def skew(counts: Tensor) -> str:
    """Per layer: share of the busiest quarter of the experts, and unused experts."""
    shares = counts / counts.sum(1, keepdim=True)
    ranked = shares.sort(1, descending=True).values
    quarter = counts.shape[1] // 4
    return "  ".join(
        f"L{layer}: {ranked[layer, :quarter].sum():.0%}, {int((counts[layer] == 0).sum())} unused"
        for layer in range(len(counts))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=100, help="per task")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--show", type=int, default=2, help="failures printed per task")
    parser.add_argument("--float", action="store_true", help="float activations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape, weights = load_checkpoint(options.folder)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    model = Model(shape, int8_activations=not options.float)
    counts = torch.zeros(shape.num_hidden_layers, shape.num_experts, dtype=torch.int64)
    for task, make in demo_data.TASKS.items():
        rng = Random(f"eval {options.seed} {task}")
        samples = [make(rng) for _ in range(options.samples)]
        wrong = failures(model, weights, tokenizer, samples, counts)
        print(f"{task:9} {1 - len(wrong) / len(samples):7.1%}", flush=True)
        for failure in wrong[: options.show]:
            print(f"    {failure.sample.prompt!r}\n    {failure.sample.answer!r}")
            print(f"    {failure.right!r} then {failure.wrong!r}")
        places = Counter(failure.right.rpartition('"')[0].rpartition('"')[2] for failure in wrong)
        if options.show and places:
            print("    after", dict(places.most_common(6)))
    print("router, share of the busiest quarter:", skew(counts))


if __name__ == "__main__":
    main()
