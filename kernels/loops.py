"""The inner loops as routines other kernels call by address; they are written in LLVM IR, which nobody needs who
finds them compiled."""

from coli.kernels.deferred import later
from coli.kernels.runtime import Routine, caller

TILE, call_tile = Routine(later("microkernel", "run_tile"), 8), caller(8)
OUTER, call_outer = Routine(later("outer", "run_outer"), 14), caller(14)
OUTER16, call_outer16 = Routine(later("outer16", "run_outer16"), 13), caller(13)
SCORES, SUMS, MORE = 0, 1, 2  # what OUTER16 makes of its integers (outer16.py)
PANEL, call_panel = Routine(later("panel", "run_panel"), 11), caller(11)
has_panel = later("panel", "has_panel")
MOST_BLOCKS = 8  # of 16 vectors, in one call of PANEL
