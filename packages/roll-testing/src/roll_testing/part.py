"""What the kits for strategies and platforms share: the part under test, found as a run finds it."""

from __future__ import annotations

import gc
import os
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from roll_core.errors import MissingRequirementError
from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import load_registry
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import PlatformProvider, Provider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.plugins.loader import Plugin
    from roll_core.plugins.registry import Registry
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.platform import Platform
    from roll_testing.reference import ReferenceModel

REQUIRE_VARIABLE = "ROLL_CONFORMANCE"
"""With the value `full`, an engine that is not installed is a failure and no skip."""

HF_PACKAGES = "roll-infer-hf,roll-strategy-hf"
"""Value of `ROLL_PLUGINS`: the core with the strategies of the quick start."""

DEFAULT_VARIANTS: Mapping[str, Mapping[str, Any]] = {"default": {}}


class Part:
    """One part under test. Class attributes and methods without an underscore are for authors to override."""

    name: ClassVar[str] = ""
    """Of the part, as configs write it: `my_train` or `my-package/my_train`."""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = DEFAULT_VARIANTS
    """`strategy_config`s by a name for test ids; every test that computes runs for each of them."""
    platform: ClassVar[str] = ""
    """Name of the platform; else the first that the record names and that is here, or the one that a run would take."""
    timeout_s: ClassVar[float] = 120.0
    """For everything that a test does with the strategy."""

    _kind: ClassVar[type[Provider]] = TrainProvider
    _shared: ClassVar[dict[str, dict[Any, Any]]] = {}

    @pytest.fixture
    def strategy_config(self, variant: str) -> Mapping[str, Any]:
        """The strategy's own configuration, as `strategy_args.strategy_config` has it."""
        return self.variants[variant]

    @pytest.fixture(autouse=True)
    def _no_collection_before_the_report(self) -> Iterator[None]:
        """Collect no garbage until pytest has reported the test.

        Python 3.11 parses source to show a traceback. If a collection during that finalizes something that itself shows
        a traceback (a task whose exception nobody retrieved), pytest ends with `SystemError: AST constructor recursion
        depth mismatch` instead of the failure.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()

    def reference_model(self, spec: ModelSpec) -> ReferenceModel:
        """What computes the same by other means. transformers by default."""
        from roll_testing.reference import TransformersModel

        return TransformersModel(spec)

    @cached_property
    def provider(self) -> Any:
        """The record. Raises `UnknownProviderError`."""
        return registry().find(self._kind, self.name)

    def platform_here(self) -> Platform:
        """The platform that the tests run on."""
        from roll_core.runtime.cluster.platform import select_platform

        if self.platform:
            return select_platform(registry(), self.platform)
        for name in self.provider.platforms:
            if not any(each.name == name for each in registry().providers(PlatformProvider)):
                continue
            found: Platform = load_target(registry().find(PlatformProvider, name).target, owner=f"platform {name}")()
            if found.probe().found:
                return found
        return select_platform(registry(), None)

    def dtypes(self) -> tuple[str, ...]:
        """What strategy and platform both compute in."""
        platform = self.platform_here()
        return tuple(each for each in self.provider.capabilities.dtypes if not platform.supports(each))

    def need(self, has: bool, what: str) -> None:
        """Skip what is not declared."""
        if not has:
            pytest.skip(f"{self.name} does not declare {what}")

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        _refuse_silent_overrides(cls)
        cls._shared = {}

    def _engine_or_skip(self) -> None:
        """What computes needs what the record says it needs: skip without it, or fail where an engine is promised."""
        try:
            check_requirements(self.provider, owner=self.name)
        except MissingRequirementError as error:
            if os.environ.get(REQUIRE_VARIABLE) == "full":
                pytest.fail(str(error))
            pytest.skip(str(error))

    @classmethod
    def _once(cls, what: str) -> dict[Any, Any]:
        """What the tests of this class share; pytest makes a new instance for each of them."""
        return cls._shared.setdefault(what, {})


@cache
def registry() -> Registry:
    """The installed plugins."""
    return load_registry()


def _refuse_silent_overrides(cls: type[Part]) -> None:
    """A standard test that an author replaces must say, by an xfail with a reason, what the strategy does not keep."""
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


def hf_plugins() -> tuple[Plugin, ...]:
    """roll-core and the two hf packages, whatever else is installed."""
    found = load_plugins(environ={"ROLL_PLUGINS": HF_PACKAGES})
    return tuple(each for each in found if each.state == "loaded")
