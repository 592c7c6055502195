"""Kernels are configured once per test run; COLI_SIMD and COLI_KERNEL_CACHE choose the path and the cache folder.

Whatever the machine has in store is kept out: proxies, ignored signals, a clock or a die in generated examples.
"""

import os
import signal

import hypothesis

from coli.kernels import runtime

runtime.configure(
    os.environ.get("COLI_SIMD", "auto"),
    os.environ.get("COLI_KERNEL_CACHE"),
)

for name in ("NO_PROXY", "no_proxy"):  # tests speak to servers of their own, also where a proxy leads outside
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

# the same examples at every run, however long one takes on a busy machine
hypothesis.settings.register_profile(
    "coli", deadline=None, derandomize=True, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("coli")

# a test run in the background inherits ignored interrupts, and would pass that on to the commands it interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):  # and one under nohup ignored hang-ups
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
