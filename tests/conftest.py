"""Kernels are configured once per test run; COLI_SIMD and COLI_KERNEL_CACHE choose the path and the cache folder."""

import os
import signal

from coli.kernels import runtime

runtime.configure(
    os.environ.get("COLI_SIMD", "auto"),
    os.environ.get("COLI_KERNEL_CACHE"),
)

# a test run in the background inherits ignored interrupts, and would pass that on to the commands it interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):  # and one under nohup ignored hang-ups
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
