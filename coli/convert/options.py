"""What conversion is asked to do and what it reports, as plain values."""

from dataclasses import dataclass
from pathlib import Path

from coli.convert.importance import Calibration
from coli.errors import OptionError
from coli.processors import usable_cores
from coli.store.layout import KINDS, Kind

DEFAULT_EXPERTS = Kind.Q4
DEFAULT_DENSE = Kind.Q8


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to store the weights: `quant` sets both, `experts` and `dense` one; each "f32", "q8" or "q4".

    Unset, weights that the source holds as q4 or q8, and experts in MXFP4, stay as they are and others become q4
    experts and q8 dense matrices. Routers, norms and biases are float32 always.
    """

    quant: str | None = None
    experts: str | None = None
    dense: str | None = None
    threads: int | None = None  # of quantization; None: the cores this process may use
    simd: str = "auto"
    kernel_cache: Path | None = None
    calibration: Calibration | None = None  # weights the error of q4 scales; None: all columns count the same

    def expert_kind(self, native: Kind | None = None) -> Kind:
        """The kind of expert matrices that the source holds as `native`; OptionError if the name is unknown."""
        return _kind("experts", self.experts or self.quant, native or DEFAULT_EXPERTS)

    def dense_kind(self, native: Kind | None = None) -> Kind:
        """The kind of dense matrices that the source holds as `native`; OptionError if the name is unknown."""
        return _kind("dense", self.dense or self.quant, native if native in (Kind.Q4, Kind.Q8) else DEFAULT_DENSE)

    def num_threads(self) -> int:
        """Threads to quantize with."""
        if self.threads is not None:
            return self.threads
        return usable_cores()


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did."""

    path: Path
    source_bytes: int  # of the tensors read
    container_bytes: int  # of all files written
    files: int
    resumed_files: int  # weight files kept from an interrupted run
    seconds: float
    peak_memory_bytes: int  # highest resident size of this process so far


def _kind(option: str, name: str | None, default: Kind) -> Kind:
    if name is None:
        return default
    allowed = {label: kind for label, kind in KINDS.items() if kind is not Kind.MXFP4}  # which is kept, never made
    if name not in allowed:
        raise OptionError(f"{option}: unknown quantization {name!r}; allowed: {', '.join(sorted(allowed))}")
    return allowed[name]
