"""Which experts a run asked for, in order, as one compact file: what a replay needs and nothing of weights or text."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from coli.errors import CheckpointError
from coli.store.container import Container
from coli.store.policy import PoolSize, ResidencyPolicy
from coli.store.safetensors_file import DOWNLOAD_AGAIN, read_header
from coli.store.strict_json import parse_object

_FORMAT = "coli-trace 1"
_EXPECTED = "name a file that `coli trace` wrote"
_DECODE, _PREFILL, _SETTLE = 0, 1, 2
# Far above any model; a damaged trace must not ask a replay for more memory than this.
_MOST_LAYERS, _MOST_EXPERTS, _MOST_KEYS, _MOST_BYTES = 1 << 16, 1 << 16, 1 << 24, 1 << 50


@dataclass(frozen=True, slots=True)
class TracedModel:
    """What a replay has to know of a model; `record_bytes` by layer index, of layers with routed experts."""

    fingerprint: str
    num_layers: int
    num_experts: int
    num_experts_per_tok: int
    record_bytes: dict[int, int]

    @property
    def experts_bytes(self) -> int:
        return sum(self.record_bytes.values()) * self.num_experts

    @property
    def cycle_bytes(self) -> int:
        return sum(self.record_bytes.values()) * self.num_experts_per_tok


def traced_model(container: Container, num_layers: int, num_experts_per_tok: int) -> TracedModel:
    """What a trace says of the model of an open container."""
    records = {layer_idx: container.expert_layout(layer_idx).record_bytes for layer_idx in container.moe_layers}
    num_experts = container.manifest.num_experts
    return TracedModel(container.fingerprint, num_layers, num_experts, num_experts_per_tok, records)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a policy was set up: pools, pins."""

    pool_of_layer: tuple[int | None, ...]
    pool_sizes: tuple[PoolSize, ...]
    pinned: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HitCounts:
    """Distinct experts per union, summed; hits include pinned hits."""

    hits: int = 0
    pinned_hits: int = 0
    misses: int = 0
    prefill_hits: int = 0
    prefill_pinned_hits: int = 0
    prefill_misses: int = 0

    @staticmethod
    def of(policy: ResidencyPolicy) -> "HitCounts":
        decode, prefill = policy.counts, policy.prefill_counts
        return HitCounts(
            decode.hits, decode.pinned_hits, decode.misses, prefill.hits, prefill.pinned_hits, prefill.misses
        )

    @property
    def hit_rate(self) -> float:
        """Of decode unions."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True, slots=True)
class Union:
    """One layer's request: expert_ids (S, A)."""

    layer_idx: int
    expert_ids: NDArray[np.int64]
    prefill: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a forward: the rows that were kept."""

    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded run; `setup` and `counts` are its own."""

    model: TracedModel
    setup: Setup
    counts: HitCounts
    events: NDArray[np.int32]  # (n, 3): kind, layer index, rows
    numbers: NDArray[np.uint16]  # expert ids of unions and rows of commits, in the order of the events

    def __iter__(self) -> Iterator[Union | Commit]:
        A, at = self.model.num_experts_per_tok, 0
        for kind, layer_idx, rows in self.events.tolist():
            count = rows if kind == _SETTLE else rows * A
            piece = self.numbers[at : at + count].astype(np.int64)
            at += count
            yield Commit(piece) if kind == _SETTLE else Union(layer_idx, piece.reshape(rows, A), kind == _PREFILL)

    @property
    def tokens(self) -> int:
        """Committed rows of decode forwards."""
        return int(self.events[self.events[:, 0] == _SETTLE, 2].sum())

    @staticmethod
    def read(path: Path) -> "Trace":
        """Raises CheckpointError for a file that is no trace, or a damaged one."""
        try:
            metadata = read_header(path).metadata
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{path}: ").removesuffix(f": {DOWNLOAD_AGAIN}")
            raise CheckpointError(f"{path}: cannot be read as a trace ({reason}); {_EXPECTED}") from None
        if metadata.get("format") != _FORMAT:
            found = metadata.get("format", "another kind of file")[:40]
            raise CheckpointError(f"{path}: expected a trace ({_FORMAT}), found {found}; {_EXPECTED}")
        try:
            with safe_open(path, "numpy") as file:
                events, numbers = file.get_tensor("events"), file.get_tensor("numbers")
            model, run = (parse_object(metadata[name].encode(), name) for name in ("model", "run"))
            traced = _model(model)
            trace = Trace(traced, _setup(run, traced), _counts(run["counts"]), events, numbers)
            trace._check()
        except (OSError, SafetensorError, KeyError, TypeError, AttributeError):
            reason = "not all of it is what a trace holds"
        except (ValueError, CheckpointError) as error:
            reason = f"{error!s:.120}"
        else:
            return trace
        raise CheckpointError(f"{path}: damaged trace: {reason}; record it again")

    def _check(self) -> None:
        A, misfit = self.model.num_experts_per_tok, ValueError("its events do not fit the model it names")
        if self.events.dtype != np.int32 or self.events.ndim != 2 or self.events.shape[1] != 3:
            raise misfit
        if self.numbers.dtype != np.uint16 or self.numbers.ndim != 1:
            raise misfit
        kinds, layers, rows = self.events.astype(np.int64).T
        settles = kinds == _SETTLE
        least = np.where(settles, 0, 1)
        if ((kinds < 0) | (kinds > _SETTLE) | (rows < least) | (rows > len(self.numbers))).any():
            raise misfit
        per_event = np.where(settles, rows, rows * A)
        if per_event.max(initial=0) > len(self.numbers) or per_event.sum() != len(self.numbers):
            raise misfit
        ids = np.repeat(~settles, per_event)
        unions = set(layers[~settles].tolist())
        if (self.numbers[ids] >= self.model.num_experts).any() or not unions <= set(self.model.record_bytes):
            raise misfit
        layer_idx, most = -1, _MOST_EXPERTS  # of the forward that runs: its last layer and fewest rows
        for event in self:
            if isinstance(event, Commit):
                if event.rows.max(initial=0) >= most:
                    raise ValueError("a commit keeps a row that its forward does not have")
                layer_idx, most = -1, _MOST_EXPERTS
                continue
            if event.layer_idx <= layer_idx:
                layer_idx, most = -1, _MOST_EXPERTS
            if not event.prefill:
                layer_idx, most = event.layer_idx, min(most, len(event.expert_ids))


class TraceRecorder:
    """A store's TraceSink: keeps every union and commit, two bytes a selection."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int]] = []
        self._numbers: list[NDArray[np.uint16]] = []

    def union(self, layer_idx: int, expert_ids: NDArray[np.int64], *, prefill: bool) -> None:
        self._events.append((_PREFILL if prefill else _DECODE, layer_idx, len(expert_ids)))
        self._numbers.append(expert_ids.astype(np.uint16).ravel())

    def settled(self, committed_rows: int | Sequence[int] | NDArray[np.int64]) -> None:
        if isinstance(committed_rows, (int, np.integer)):
            committed_rows = range(int(committed_rows))
        rows = np.asarray(committed_rows)
        self._events.append((_SETTLE, 0, len(rows)))
        self._numbers.append(rows.astype(np.uint16).ravel())

    def trace(self, model: TracedModel, policy: ResidencyPolicy) -> Trace:
        """What was recorded so far, with the setup and the counts of the policy that served it."""
        sizes = tuple(PoolSize(pool.slots, pool.transient_slots) for pool in policy.pools)
        return Trace(
            model,
            Setup(tuple(policy.pool_of_layer), sizes, tuple(sorted(policy.pinned))),
            HitCounts.of(policy),
            np.array(self._events, np.int32).reshape(-1, 3),
            np.concatenate([np.empty(0, np.uint16), *self._numbers]),
        )


def _model(data: Mapping[str, Any]) -> TracedModel:
    L = _whole(data["num_layers"], _MOST_LAYERS, 1)
    E = _whole(data["num_experts"], min(_MOST_EXPERTS, _MOST_KEYS // L), 1)
    A = _whole(data["num_experts_per_tok"], E, 1)
    records = {int(i): _whole(size, _MOST_BYTES, 1) for i, size in data["record_bytes"].items()}
    if not records or min(records) < 0 or max(records) >= L:
        raise ValueError(f"its records are of layers {sorted(records)[:4]}, the model has {L}")
    return TracedModel(str(data["fingerprint"])[:80], L, E, A, records)


def _setup(run: Mapping[str, Any], model: TracedModel) -> Setup:
    pools = tuple(
        PoolSize(_whole(slots, _MOST_BYTES, 1), _whole(transient, _MOST_BYTES)) for slots, transient in run["pools"]
    )
    pool_of_layer = tuple(None if i is None else _whole(i, len(pools) - 1) for i in run["pool_of_layer"])
    if len(pools) > model.num_layers or any(pool_of_layer[i : i + 1] in ((), (None,)) for i in model.record_bytes):
        raise ValueError("its pools do not fit the model it names")
    return Setup(
        pool_of_layer, pools, tuple(_whole(key, model.num_layers * model.num_experts - 1) for key in run["pinned"])
    )


def _counts(data: Mapping[str, Any]) -> HitCounts:
    return HitCounts(**{name: _whole(count, _MOST_BYTES) for name, count in data.items()})


def _whole(value: Any, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number from {least} to {most}, found {value!r:.40}")
    return value


def write_trace(path: Path, trace: Trace) -> None:
    """Write `trace` whole or not at all."""
    run = {
        "pool_of_layer": trace.setup.pool_of_layer,
        "pools": [[size.slots, size.transient_slots] for size in trace.setup.pool_sizes],
        "pinned": trace.setup.pinned,
        "counts": asdict(trace.counts),
    }
    metadata = {"format": _FORMAT, "model": json.dumps(asdict(trace.model)), "run": json.dumps(run)}
    path = path.resolve()  # behind a link is the file that may be replaced
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(save({"events": trace.events, "numbers": trace.numbers}, metadata))
    temporary.replace(path)
