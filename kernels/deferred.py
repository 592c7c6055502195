"""What only the compiler needs of kernel modules: named when a module is imported, made when something is compiled.

So a process whose kernels are all in the code cache imports neither numba nor anything that describes code to LLVM. The
jitted functions see the real objects: `resolve` puts them into the modules' namespaces before a function is compiled.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


class Deferred:
    """Stands for an object in the namespace of jitted functions. `namespace`: of the jitted function it will be, which
    has to be resolved too. `name`: module.name of what is taken from a module."""

    __slots__ = ("_made", "_make", "name", "namespace")

    def __init__(self, make: Callable[[], Any], namespace: dict[str, Any] | None = None, name: str = "") -> None:
        self._make: Callable[[], Any] | None = make
        self._made: Any = None
        self.namespace, self.name = namespace, name

    @property
    def made(self) -> Any:
        """The object itself, the same one at every call."""
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made


def later(module: str, name: str) -> Deferred:
    """`name` of `coli.kernels.MODULE`, which is imported when something is compiled."""
    return Deferred(lambda: getattr(import_module(f"coli.kernels.{module}"), name), name=f"{module}.{name}")


def resolve(namespace: dict[str, Any]) -> None:
    """Replace what was deferred in a module's namespace and in those its jitted functions come from."""
    for name, value in list(namespace.items()):
        if isinstance(value, Deferred):
            namespace[name] = value.made
            if value.namespace is not None:
                resolve(value.namespace)
