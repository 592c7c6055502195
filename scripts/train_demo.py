"""Train the demo model from scratch: python scripts/train_demo.py FOLDER (extra `train`; resumes from FOLDER/state.pt).

Two processes of one thread each share parameters, gradients and optimizer state (small matrix products gain nothing
from more threads). Every step is a function of (seed, step), so a stopped run continues as if it had not been stopped.
The last part of the run computes with q4 experts and q8 dense matrices (gradients go straight through). SIGTERM and
SIGINT finish the step, save and leave. The budget is steps; CPU seconds are counted and printed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import demo_data
import torch
import torch.nn.functional as F
from demo_model import Model, Packed, Shape, Weights, initialize, parameter_count, quantized, views
from demo_optimizer import Optimizer
from demo_tokenizer import ASSISTANT, END, USER, train_tokenizer, write_tokenizer_config
from tokenizers import Tokenizer
from torch import Tensor

SYSTEM = ("You are a helpful assistant.", "Answer in JSON.", "Be brief.", "You extract records.")


@dataclass(frozen=True)
class Plan:
    """Everything that decides the weights besides the data generators."""

    seed: int = 7
    processes: int = 2
    steps: int = 2700
    tokens: int = 1200  # per process and step
    rate: float = 3e-3
    warmup: int = 100
    decay_from: float = 0.55  # share of the run after which the rate falls to `floor`
    floor: float = 0.02
    quantize_from: float = 0.65
    balance: float = 0.01
    copying_steps: int = 300  # share of copying samples falls from 0.6 to 0.03 over these

    def rate_at(self, step: int) -> float:
        progress = step / self.steps
        fall = max(0.0, (progress - self.decay_from) / (1 - self.decay_from))
        return self.rate * min(1.0, (step + 1) / self.warmup) * (1 - (1 - self.floor) * fall)

    def quantizes(self, step: int) -> bool:
        return step >= self.quantize_from * self.steps

    def copying_share(self, step: int) -> float:
        return max(0.03, 0.6 * (1 - step / self.copying_steps))

    def longest(self, step: int) -> int:
        """Most records of one NDJSON sample."""
        progress = step / self.steps
        return 1 if progress < 0.4 else 3 if progress < 0.6 else 5


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences packed one after the other, shortest first; `wanted` rows predict `targets`."""

    ids: Tensor
    packed: Packed
    wanted: Tensor
    targets: Tensor


def encode(tokenizer: Tokenizer, sample: demo_data.Sample, system: str = "") -> tuple[list[int], list[int]]:
    """Token ids of the prompt (as the chat template renders it) and of the answer with its end."""
    user, assistant, end = (tokenizer.token_to_id(text) for text in (USER, ASSISTANT, END))
    prompt = f"{system}\n{sample.prompt}" if system else sample.prompt
    return [user, *tokenizer.encode(prompt).ids, assistant], [*tokenizer.encode(sample.answer).ids, end]


def pack(sequences: list[tuple[list[int], list[bool]]]) -> Batch:
    """(token ids, which of them to predict) of each sequence -> one batch, shortest sequence first."""
    sequences = sorted(sequences, key=lambda pair: len(pair[0]))
    ids = torch.tensor([token for sequence, _ in sequences for token in sequence])
    targets = torch.tensor([flag for _, flags in sequences for flag in flags]).nonzero().squeeze(1)
    return Batch(ids, Packed([len(sequence) for sequence, _ in sequences]), targets - 1, ids[targets])


def make_batch(tokenizer: Tokenizer, plan: Plan, step: int, rank: int) -> Batch:
    rng = Random(f"train {plan.seed} {step} {rank}")
    sequences: list[tuple[list[int], list[bool]]] = []
    total = 0
    while total < plan.tokens:
        turns = 2 if rng.random() < 0.04 else 1
        ids: list[int] = []
        learn: list[bool] = []
        for _ in range(turns):
            copying = rng.random() < plan.copying_share(step)
            sample = demo_data.copying(rng) if copying else demo_data.sample(rng, plan.longest(step))
            system = rng.choice(SYSTEM) if not ids and rng.random() < 0.03 else ""
            prompt, answer = encode(tokenizer, sample, system)
            ids += prompt + answer
            learn += [False] * len(prompt) + [True] * len(answer)
        sequences.append((ids, learn))
        total += len(ids)
    return pack(sequences)


@dataclass(slots=True)
class Shared:
    """Tensors both processes see. `run` is what the forward uses: `flat` itself, or its fake-quantized values."""

    flat: Tensor
    run: Tensor
    gradients: Tensor  # (processes, parameters)
    momentum: Tensor
    second: Tensor
    losses: Tensor  # (processes, 2): answer loss, balance loss of the last step
    stop: Tensor  # (1,) int


def leaves(run: Tensor, gradient: Tensor, shape: Shape) -> Weights:
    """Weights that accumulate their gradients straight into views of `gradient`."""
    found = {}
    into = views(gradient, shape)
    for name, weight in views(run, shape).items():
        leaf = weight.detach().requires_grad_()
        leaf.grad = into[name]
        found[name] = leaf
    return found


def work(
    rank: int, shape: Shape, plan: Plan, shared: Shared, barrier: Any, first: int, folder: Path, used: float
) -> None:
    """One process: its batch of every step, and the update of its share of the parameters."""
    torch.set_num_threads(1)
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model, optimizer = Model(shape), Optimizer(shape, rank, plan.processes, shared.momentum, shared.second)
    weights = leaves(shared.run, shared.gradients[rank], shape)
    flat, run = views(shared.flat, shape), views(shared.run, shape)
    started, seen = time.time(), 0
    mean: float | None = None
    for step in range(first, plan.steps):
        batch = make_batch(tokenizer, plan, step, rank)
        shared.gradients[rank].zero_()
        logits, balance = model.forward(weights, batch.ids, batch.packed, batch.wanted)
        loss = F.cross_entropy(logits, batch.targets)
        (loss + plan.balance * balance).backward()
        shared.losses[rank, 0], shared.losses[rank, 1] = loss.item(), balance.item()
        barrier.wait()
        names = optimizer.step(shared.flat, shared.gradients, plan.rate_at(step), step + 1)
        mine = {name: flat[name] for name in names}
        for name, value in (quantized(mine) if plan.quantizes(step + 1) else mine).items():
            run[name].copy_(value)
        seen += len(batch.ids)
        if rank == 0:
            now = shared.losses[:, 0].mean().item()
            mean = now if mean is None else 0.95 * mean + 0.05 * now
            if not math.isfinite(now):
                raise SystemExit(f"train_demo: loss {now} at step {step}")
            if step % 25 == 0:
                cpu = used + plan.processes * time.process_time()
                print(
                    f"step {step} loss {mean:.4f} balance {shared.losses[:, 1].mean():.3f} cpu {cpu:.0f} s "
                    f"tok/s {plan.processes * seen / (time.time() - started):.0f}",
                    flush=True,
                )
        barrier.wait()
        last = bool(shared.stop[0]) or step + 1 == plan.steps
        if rank == 0 and (last or (step + 1) % 200 == 0):
            save(folder, shape, plan, shared, step + 1, used + plan.processes * time.process_time())
        barrier.wait()
        if last:
            return


def save(folder: Path, shape: Shape, plan: Plan, shared: Shared, step: int, cpu: float) -> None:
    state = {
        "shape": asdict(shape),
        "plan": asdict(plan),
        "step": step,
        "cpu_seconds": cpu,
        "flat": shared.flat,
        "momentum": shared.momentum,
        "second": shared.second,
    }
    torch.save(state, folder / "state.tmp")
    os.replace(folder / "state.tmp", folder / "state.pt")


def prepare_tokenizer(folder: Path, seed: int) -> None:
    if (folder / "tokenizer.json").exists():
        return
    rng = Random(f"tokenizer {seed}")
    samples = [demo_data.sample(rng) for _ in range(30000)]
    tokenizer = train_tokenizer(text for sample in samples for text in (sample.prompt, sample.answer))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder)


def start(folder: Path, shape: Shape, plan: Plan) -> None:
    """Train in `folder` until plan.steps, from the state saved there if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare_tokenizer(folder, plan.seed)
    count = parameter_count(shape)
    shared = Shared(
        flat=torch.zeros(count).share_memory_(),
        run=torch.zeros(count).share_memory_(),
        gradients=torch.zeros(plan.processes, count).share_memory_(),
        momentum=torch.zeros(count).share_memory_(),
        second=torch.zeros(count).share_memory_(),
        losses=torch.zeros(plan.processes, 2).share_memory_(),
        stop=torch.zeros(1, dtype=torch.int64).share_memory_(),
    )
    first, used = 0, 0.0
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt", weights_only=True)
        if state["shape"] != asdict(shape):
            raise SystemExit(f"train_demo: {folder}/state.pt is of another shape: {state['shape']}")
        first, used = state["step"], state["cpu_seconds"]
        shared.flat.copy_(state["flat"])
        shared.momentum.copy_(state["momentum"])
        shared.second.copy_(state["second"])
    else:
        initialize(shared.flat, shape, plan.seed)
    weights = views(shared.flat, shape)
    for name, value in (quantized(weights) if plan.quantizes(first) else weights).items():
        views(shared.run, shape)[name].copy_(value)
    print(f"{count / 1e6:.2f} M weights, from step {first} of {plan.steps}, {plan}", flush=True)

    def ask_to_stop(*_: object) -> None:
        shared.stop[0] = 1

    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(plan.processes, timeout=900)
    run: Callable[..., None] = work
    others = [
        context.Process(target=run, args=(rank, shape, plan, shared, barrier, first, folder, used), daemon=True)
        for rank in range(1, plan.processes)
    ]
    for process in others:
        process.start()
    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    work(0, shape, plan, shared, barrier, first, folder, used)
    for process in others:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--tokens", type=int, default=Plan.tokens, help="per process and step")
    options = parser.parse_args()
    plan = Plan(steps=options.steps, seed=options.seed, rate=options.rate, tokens=options.tokens)
    start(options.folder, Shape(), plan)


if __name__ == "__main__":
    main()
