"""What the draft gate of an opened model knows: its costs, the file they are kept in, the bytes its store has read.

The only place where drafts meet the loaded model; neither knows the other. Called by `llm`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coli.builtin import is_builtin
from coli.drafts.costs import RowCosts
from coli.drafts.gate_file import GateFile
from coli.drafts.gated import TreeSources
from coli.errors import OptionError
from coli.loading import USAGE_FILE, LoadedModel
from coli.options import EngineOptions
from coli.processors import processor_name
from coli.store.container import Container

GATE_FILE = "gate.json"

Notice = Callable[[str], None]


class Gating:
    """One opened model's costs, shared by its responses: read before the first that needs them, saved at the end."""

    def __init__(self, container: Container, options: EngineOptions, notice: Notice) -> None:
        self._container, self._options, self._notice = container, options, notice
        self._costs: RowCosts | None = None
        self._file: GateFile | None = None

    def join(self, drafter: object, loaded: LoadedModel) -> None:
        """Give the response's sources, if they have a gate, what the model knows. Raises OptionError."""
        if not isinstance(drafter, TreeSources):
            return
        if loaded.store is not None:
            store = loaded.store
            drafter.expert_bytes = lambda: store.bytes_read
        if drafter.gate is not None:
            if self._costs is None:
                self._costs = self._read(loaded)
            drafter.gate.costs = self._costs

    def close(self) -> None:
        """Save what was measured, unless told not to."""
        if self._costs is None or self._file is None or not (self._options.gate_save and self._options.usage_save):
            return
        named = self._options.gate_file or self._options.usage
        if named is None and is_builtin(self._container.path):
            return
        try:
            self._file.save(self._costs)
        except (OSError, OptionError) as error:
            if self._options.gate_file is not None:  # a model folder that cannot be written is nobody's mistake
                self._notice(f"the gate's costs are not written: {error}")

    def _read(self, loaded: LoadedModel) -> RowCosts:
        container, options = self._container, self._options
        one_each = sum(container.expert_layout(i).record_bytes for i in container.moe_layers)
        costs = RowCosts(one_each * loaded.spec.num_experts_per_tok)
        self._file = GateFile(gate_path(options, container.path), container.fingerprint, machine_line(loaded))
        try:
            self._file.read_into(costs)
        except OptionError as error:
            if options.gate_file is not None:
                raise
            self._notice(f"{error}; not used")  # found beside the model, not named: do without
            self._file = None
        return costs


def machine_line(loaded: LoadedModel) -> str:
    """What makes costs differ: processor, threads, instruction set, cache type, read mode and share of experts held."""
    parts = [processor_name(), *(f"{name} {value}" for name, value in loaded.machine().items())]
    if loaded.store is not None:
        total = sum(loaded.container.expert_layout(i).record_bytes for i in loaded.container.moe_layers)
        held = loaded.store.stats().capacity_bytes / (total * loaded.spec.num_experts)
        parts.append(f"experts held {10 * round(10 * min(held, 1.0))} %")
    return ", ".join(parts)


def gate_path(options: EngineOptions, model: Path) -> Path:
    """Where the costs of the model in folder `model` are kept: as told, else beside the usage history."""
    return options.gate_file or (options.usage or model / USAGE_FILE).parent / GATE_FILE
