"""`Kit`: base class of the conformance kits. It finds the part under test in the plugin registry, as a run does."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from roll_core.errors import MissingRequirementError
from roll_core.plugins.registry import load_registry
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import PlatformProvider, Provider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.plugins.registry import Registry
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.platform import Platform
    from roll_testing.reference import ReferenceModel

REQUIRE_VARIABLE = "ROLL_CONFORMANCE"
"""Environment variable. With the value `full`, a missing engine fails the tests instead of skipping them."""

DEFAULT_VARIANTS: Mapping[str, Mapping[str, Any]] = {"default": {}}


class Kit:
    """One plugin part under test. Authors override class attributes and methods without a leading underscore."""

    name: ClassVar[str] = ""
    """Name of the part as configs write it: `my_train` or `my-package/my_train`."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = DEFAULT_VARIANTS
    """`strategy_config`s by a name for test ids. Every test that computes runs once for each of them."""
    platform: ClassVar[str] = ""
    """Platform name. Default: the first platform of the record that is found on this host, otherwise the one that a run
    selects."""
    timeout_s: ClassVar[float] = 120.0
    """Time limit in seconds for each call that a test makes to its ranks, its engine or a subprocess."""

    _kind: ClassVar[type[Provider]] = TrainProvider
    _shared: ClassVar[dict[str, dict[Any, Any]]] = {}

    @pytest.fixture
    def strategy_config(self, variant: str) -> Mapping[str, Any]:
        """The strategy's own configuration, as in `strategy_args.strategy_config`."""
        return self.variants[variant]

    @pytest.fixture(autouse=True)
    def _no_collection_before_the_report(self) -> Iterator[None]:
        """Disable garbage collection until pytest has reported the test.

        Python 3.11 parses source to show a traceback. A collection during the parse may finalize an object that formats
        a traceback itself, such as a task whose exception was never retrieved. pytest then ends with `SystemError: AST
        constructor recursion depth mismatch` instead of the failure.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()

    def reference_model(self, spec: ModelSpec) -> ReferenceModel:
        """Return an independent implementation of the model. Default: transformers."""
        from roll_testing.reference import TransformersModel

        return TransformersModel(spec)

    @cached_property
    def provider(self) -> Any:
        """The part's record. Raises `UnknownProviderError` if no installed plugin has it."""
        return registry().find(self._kind, self.name)

    def platform_here(self) -> Platform:
        """Return the platform that the tests run on."""
        from roll_core.runtime.cluster.platform import select_platform

        if self.platform:
            return select_platform(registry(), self.platform)
        for name in self.provider.platforms:
            if not any(provider.name == name for provider in registry().providers(PlatformProvider)):
                continue
            platform: Platform = load_target(registry().find(PlatformProvider, name).target, owner=f"platform {name}")()
            if platform.probe().found:
                return platform
        return select_platform(registry(), None)

    def dtypes(self) -> tuple[str, ...]:
        """Return the dtypes that both the strategy and the platform support."""
        known = self._once("dtypes")
        if self.name not in known:
            platform = self.platform_here()
            known[self.name] = tuple(
                dtype for dtype in self.provider.capabilities.dtypes if not platform.supports(dtype)
            )
        supported: tuple[str, ...] = known[self.name]
        return supported

    def need(self, has: bool, what: str) -> None:
        """Skip the test if `has` is False, because the part does not declare `what`."""
        if not has:
            pytest.skip(f"{self.name} does not declare {what}")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _refuse_silent_overrides(cls)
        cls._shared = {}

    def _engine_or_skip(self) -> None:
        """Skip the test if a requirement of the record is not installed. Fail instead if `ROLL_CONFORMANCE=full`."""
        if missing := self._missing_engine():
            if os.environ.get(REQUIRE_VARIABLE) == "full":
                pytest.fail(missing)
            pytest.skip(missing)

    def _missing_engine(self) -> str:
        """Return which requirement of the record is not installed; empty if all are."""
        messages = self._once("missing")
        if self.name not in messages:
            messages[self.name] = ""
            try:
                check_requirements(self.provider, owner=self.name)
            except MissingRequirementError as error:
                messages[self.name] = str(error)
        missing: str = messages[self.name]
        return missing

    @classmethod
    def _once(cls, what: str) -> dict[Any, Any]:
        """Return the cache named `what`, which all tests of this class share.

        pytest creates a new instance for each test.
        """
        return cls._shared.setdefault(what, {})


@cache
def registry() -> Registry:
    """Return the registry of the installed plugins, loaded once."""
    return load_registry()


def _refuse_silent_overrides(cls: type[Kit]) -> None:
    """Raise `TypeError` if a class overrides a standard test without a strict xfail that states the reason."""
    for standard in cls.__mro__[1:]:
        if not standard.__module__.startswith("roll_testing."):
            continue
        for name, test in vars(standard).items():
            if not name.startswith("test_") or getattr(cls, name) is test:
                continue
            marks = getattr(getattr(cls, name), "pytestmark", ())
            if not any(
                mark.name == "xfail" and mark.kwargs.get("reason") and mark.kwargs.get("strict") for mark in marks
            ):
                raise TypeError(
                    f"{cls.__name__} overrides {name}, a standard test of the conformance kit, without saying why:"
                    " mark it with @pytest.mark.xfail(reason=..., strict=True)"
                )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread inside the block.

    Small matrix products are slower on several threads, which compete with each other and with those of ranks and
    engines.
    """
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def run_tests(module: str, expression: str) -> int:
    """Run the tests of a module's text with pytest in a child process. Returns 1 if a test fails, otherwise 0."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="roll-plugin-") as folder:
        file = Path(folder, "test_plugin.py")
        file.write_text(module, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--rootdir", folder]
        command += [
            "-c",
            "/dev/null",
            "--import-mode=importlib",
            *(["-k", expression] if expression else []),
            str(file),
        ]
        return 1 if subprocess.run(command, check=False).returncode else 0
