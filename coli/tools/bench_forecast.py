"""What `coli plan` expects of the decoding tests of `coli bench`, to stand beside what is measured."""

from collections.abc import Mapping
from pathlib import Path

from coli.errors import ReadError
from coli.loading import LoadedModel
from coli.tools.bench import Ceiling, Test
from coli.tools.forecast import forecast
from coli.tools.probe import disk_speed
from coli.tools.sizes import model_sizes


class BenchForecast:
    """`forecast` with the memory that the opened model has for experts. The disk is probed when a first test needs it:
    where not all experts have room."""

    def __init__(self, path: Path, ceilings: Mapping[int, Ceiling]) -> None:
        """`ceilings` by number of threads; without a measured one there is no forecast."""
        self._sizes, self._ceilings = model_sizes(path), ceilings
        self._disk_bytes_per_s: float | None = None

    def __call__(self, loaded: LoadedModel, test: Test) -> tuple[float, float] | None:
        """Tokens per second at the slow and the fast end; None for prompts and where nothing was measured."""
        memory = self._ceilings.get(loaded.threads, Ceiling()).weights_bytes_per_s
        if not test.n_gen or not memory:
            return None
        room = min(loaded.plan.experts_bytes, self._sizes.experts_bytes)
        if room < self._sizes.experts_bytes and self._disk_bytes_per_s is None:
            try:
                self._disk_bytes_per_s = disk_speed(
                    self._sizes.files, max(self._sizes.record_bytes.values())
                ).bytes_per_s
            except ReadError:
                return None
        found = forecast(self._sizes, room, self._disk_bytes_per_s or 1.0, memory)  # 1.0: nothing will be read
        return round(found.slow_tps, 3), round(found.fast_tps, 3)
