"""Stand-ins for packages that the index has for CUDA alone and that SGLang or vLLM import on a CPU too.

Every name of such a package imports, and every attribute is there; whatever is called raises. So nothing is emulated: a
computation that needs one of them fails loudly instead of returning made-up numbers.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Missing:
    """A name of a package that is not there."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *arguments, **named):
        raise NotImplementedError(f"{self._name} was called, which is only stood in for on this host")

    def __or__(self, other):  # in annotations
        return self

    __ror__ = __or__


class Package(ModuleType):
    """A module of it."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")


class Finder(MetaPathFinder, Loader):
    """Finds whatever is asked for below a package."""

    def __init__(self, package):
        self._below = f"{package}."

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(self._below) else None

    def create_module(self, spec):
        return Package(spec.name)

    def exec_module(self, module):
        pass


def stand_in(package):
    """`__getattr__` of the package's own module."""
    sys.meta_path.append(Finder(package))

    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{package}.{name}")

    return get


class Changed(MetaPathFinder):
    """Changes an installed module when it is imported."""

    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self._change(module)

            spec.loader.exec_module = exec_module
        return spec


def change(name, change):
    """Have `change` called with the module of this name, after its import."""
    sys.meta_path.insert(0, Changed(name, change))
