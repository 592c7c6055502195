"""Kernels are configured once per test run; COLI_SIMD and COLI_KERNEL_CACHE choose the path and the cache folder."""

import os

from coli.kernels import runtime

runtime.configure(
    os.environ.get("COLI_SIMD", "auto"),
    os.environ.get("COLI_KERNEL_CACHE"),
)
