"""Stand-ins for packages that the index has for CUDA alone and that SGLang or vLLM import on a CPU too.

Every name of such a package imports, and every attribute is there; whatever is called raises. So nothing is emulated: a
computation that needs one of them fails loudly instead of returning made-up numbers.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class Missing:
    """A name of a package that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} was called, which is only stood in for on this host")

    def __or__(self, other: Any) -> Missing:  # in annotations
        return self

    __ror__ = __or__


class Package(ModuleType):
    """A module of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class Finder(MetaPathFinder, Loader):
    """Finds whatever is asked for below a package."""

    def __init__(self, package: str) -> None:
        self._below = f"{package}."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(self._below) else None

    def create_module(self, spec: ModuleSpec) -> Package:
        return Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(package: str) -> Callable[[str], Missing]:
    """`__getattr__` of the package's own module."""
    sys.meta_path.append(Finder(package))

    def get(name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{package}.{name}")

    return get


class Changed(MetaPathFinder):
    """Changes an installed module when it is imported."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._change(module)

            loader.exec_module = exec_module
        return spec


def change(name: str, change: Callable[[ModuleType], None]) -> None:
    """Have `change` called with the module of this name, after its import."""
    sys.meta_path.insert(0, Changed(name, change))
