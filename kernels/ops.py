"""The operations of `simd`, `transcendental` and `philox`, for modules whose functions are compiled only when they are
not in the code cache: `from coli.kernels.ops import load_f32` imports none of the three."""

from importlib import import_module
from typing import Any

from coli.kernels.deferred import Deferred

_MODULES = ("simd", "transcendental", "philox")


def stack(size: int) -> Deferred:
    """An operation () -> address of `size` bytes of the caller's stack frame (simd.stack)."""
    return Deferred(lambda: import_module("coli.kernels.simd").stack(size))


def _find(name: str) -> Any:
    modules = [import_module(f"coli.kernels.{module}") for module in _MODULES]
    return next(vars(module)[name] for module in modules if name in vars(module))


def __getattr__(name: str) -> Deferred:
    if name.startswith("_"):
        raise AttributeError(name)
    return Deferred(lambda: _find(name))
