"""Which experts a model's past runs used: a small JSON file with the model's fingerprint, decaying, written atomically.

Whole turns go to one of two halves, so that what one half recommends can be judged on the other. Knows counts per
(layer, expert) and nothing of memory; `pins` turns a history into a pinned set.
"""

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.errors import CheckpointError, OptionError
from coli.impostors import open_regular
from coli.store.strict_json import parse_object

# Selections after which an old count weighs half: 10,000 tokens of a model with 48 layers and 8 experts per token.
HALF_LIFE_SELECTIONS = 4_000_000
_FORMAT, _VERSION = "coli-usage", 1
_MOST_BYTES = 64 << 20
_MOST_COUNT = 1e15


@dataclass(slots=True)
class UsageHistory:
    """Decayed selection counts of one model; `halves` (2, L, E) float64."""

    fingerprint: str
    num_layers: int
    num_experts: int
    halves: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.halves = np.zeros((2, self.num_layers, self.num_experts), np.float64)

    @property
    def counts(self) -> NDArray[np.float64]:
        """(L, E), both halves together."""
        total: NDArray[np.float64] = self.halves.sum(axis=0)
        return total

    @property
    def selections(self) -> float:
        return float(self.halves.sum())

    def add(self, counts: NDArray[np.int64], decay: float | None = None) -> None:
        """Add one turn's selections (L, E); older ones lose weight.

        Args:
            decay: factor on everything older; None: by the half-life.
        """
        selections = float(counts.sum())
        if not selections:
            return
        self.halves *= 0.5 ** (selections / HALF_LIFE_SELECTIONS) if decay is None else decay
        lighter = int(self.halves[1].sum() < self.halves[0].sum())
        self.halves[lighter] += counts

    def dump(self) -> str:
        """The file's text."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "fingerprint": self.fingerprint,
                "num_layers": self.num_layers,
                "num_experts": self.num_experts,
                "halves": [[[round(count, 2) for count in row] for row in half] for half in self.halves.tolist()],
            }
        )


def read_history(
    path: Path, fingerprint: str, num_layers: int, num_experts: int, *, any_model: bool = False
) -> UsageHistory:
    """The history in `path`; an absent or empty file is an empty history.

    Besides our own files, the sparse text of other engines is read (`layer expert count` per line) when `any_model`.

    Args:
        any_model: the user named the file to pin from it: another fingerprint is accepted, other dimensions never.

    Raises:
        OptionError: not a history, of another model, or of other dimensions.
    """
    history = UsageHistory(fingerprint, num_layers, num_experts)
    try:
        text = _read_text(path)
    except FileNotFoundError:
        return history
    if not text.strip():
        return history
    if not text.lstrip().startswith("{"):
        if not any_model:
            raise OptionError(f"{path}: not a usage history of coli; remove it or name another file with COLI_USAGE")
        history.halves[0] = _read_sparse(path, text, num_layers, num_experts)
        return history
    try:
        data = parse_object(text.encode(), "usage history")
        found = _Header(*(data[name] for name in _Header.__slots__))
        halves = np.array(data["halves"], np.float64)
    except (ValueError, KeyError, TypeError, OverflowError, CheckpointError) as error:
        raise OptionError(
            f"{path}: damaged usage history ({type(error).__name__}: {error!s:.120}); remove it"
        ) from None
    if (found.format, found.version) != (_FORMAT, _VERSION):
        raise OptionError(
            f"{path}: expected format {_FORMAT} {_VERSION}, found {found.format!s:.40} {found.version!s:.40}"
        )
    if (found.num_layers, found.num_experts) != (num_layers, num_experts) or halves.shape != history.halves.shape:
        raise OptionError(
            f"{path}: expected a history of {num_layers} layers x {num_experts} experts, "
            f"found {found.num_layers!s:.40} x {found.num_experts!s:.40}"
        )
    if found.fingerprint != fingerprint and not any_model:
        raise OptionError(
            f"{path}: learnt from another model (fingerprint {found.fingerprint!s:.80}, this one is {fingerprint}); "
            "name another file with COLI_USAGE"
        )
    if not ((halves >= 0) & (halves <= _MOST_COUNT)).all():
        raise OptionError(f"{path}: damaged usage history (negative or impossible counts); remove it")
    history.halves = halves
    return history


class UsageFile:
    """Where a model's history is kept; `save` merges what other processes wrote meanwhile."""

    def __init__(
        self, path: Path, fingerprint: str, num_layers: int, num_experts: int, *, decay: float | None = None
    ) -> None:
        self._path = path
        self._model = (fingerprint, num_layers, num_experts)
        self._decay = decay

    def read(self) -> UsageHistory:
        return read_history(self._path, *self._model)

    def save(self, counts: NDArray[np.int64]) -> None:
        """Add one turn's selections (L, E) to the file: temporary name, then rename.

        Raises:
            OptionError: the file that is there belongs to another model or is damaged.
            OSError: it cannot be written.
        """
        if not counts.any():
            return
        history = self.read()
        history.add(counts, self._decay)
        path = self._path.resolve()  # behind a link is the file that may be replaced
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(history.dump())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


@dataclass(frozen=True, slots=True)
class _Header:
    format: Any
    version: Any
    fingerprint: Any
    num_layers: Any
    num_experts: Any


def _read_text(path: Path) -> str:
    """Raises FileNotFoundError, and OptionError for whatever else keeps it from being a text of bearable size."""
    try:
        with open_regular(path) as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OptionError(f"{path}: more than {_MOST_BYTES} bytes are too many for a usage history")
        return data.decode()
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"{path}: cannot be read as a usage history: {reason}") from None


def _read_sparse(path: Path, text: str, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    """Records of three numbers: `-1 layers experts`, other negative ones are headers, else `layer expert count`."""
    counts = np.zeros((num_layers, num_experts), np.float64)
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        try:
            first, second, third = (int(word) for word in words) if words else (-9, 0, 0)
        except ValueError:
            if len(words) == 3 and words[0].startswith("-"):
                continue  # a header with an engine's hash in it
            raise OptionError(f"{path}: line {number}: expected three numbers, found {line.strip()!r:.80}") from None
        if first == -1 and (second, third) != (num_layers, num_experts):
            raise OptionError(
                f"{path}: expected a history of {num_layers} layers x {num_experts} experts, found {second} x {third}"
            )
        if first < 0:
            continue
        if first >= num_layers or not 0 <= second < num_experts:
            raise OptionError(f"{path}: line {number}: no expert {second!s:.40} of layer {first!s:.40} in this model")
        if not 0 <= third <= _MOST_COUNT:
            raise OptionError(f"{path}: line {number}: expected a count, found {third!s:.40}")
        counts[first, second] += third
    return counts
