"""Test group *packaging*: discovery by name, light imports, and stated requirements."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from packaging.requirements import Requirement
from pydantic import ValidationError

from roll_core.config.loading import load
from roll_core.errors import ConfigError, MissingRequirementError
from roll_core.plugins.requirements import alternatives, check_requirements
from roll_core.plugins.targets import load_target
from roll_testing.kit import Kit, registry
from roll_testing.part_checks import check_part

if TYPE_CHECKING:
    from roll_core.spec.providers import Provider

DTYPES = ("fp32", "bf16", "fp16")
HEAVY = ("torch", "transformers", "ray", "datasets")
"""Modules that listing a plugin must not import, in addition to the engines that its record needs."""
LIST = """
import json, sys
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import {kind}
record = load_registry().find({kind}, {name!r})
if record.config:
    load_target(record.config, owner="the strategy")
print(json.dumps(sorted({{each.partition(".")[0] for each in sys.modules}})))
"""


OURS = ("roll_core", "roll_kernels", "roll_modeling", "roll_weight_transports")
"""Packages of ROLL of which a plugin may import public modules only."""
PUBLIC = (
    *("roll_core.errors", "roll_core.types", "roll_core.spec", "roll_core.algorithms", "roll_core.data"),
    *("roll_core.pipelines", "roll_core.host", "roll_core.openmp", "roll_core.field_docs"),
    *("roll_kernels", "roll_modeling", "roll_weight_transports"),
    *("roll_core.http_requests", "roll_core.reward_pool"),
)
"""Modules of ROLL that plugins may import, with their submodules."""


class PackagingTests(Kit):
    """These tests run without the engine, except for `test_the_class_implements_the_contract`."""

    _public: ClassVar[tuple[str, ...]] = PUBLIC

    def test_it_is_found_by_its_name(self) -> None:
        """The registry must find the part among the installed plugins by the name that configs use."""
        assert self.provider.name == self.name.rpartition("/")[2], (
            f"{self.name} was looked up, but {self.provider.name} was found"
        )

    def test_listing_it_imports_nothing_heavy(self) -> None:
        """Loading the record and its config schema must not import heavy modules.

        Such imports would slow down every command that lists plugins. Heavy are torch, transformers, ray, datasets, and
        the engines that the record needs.
        """
        path = os.pathsep.join(folder for folder in sys.path if folder)
        done = subprocess.run(
            [sys.executable, "-c", LIST.format(name=self.name, kind=self._kind.__name__)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=self.timeout_s,
            check=False,
        )
        assert not done.returncode, f"listing {self.name} in a new process failed:\n{done.stderr}"
        loaded = set(json.loads(done.stdout.splitlines()[-1]))
        if heavy := sorted(loaded & {*HEAVY, *self._engines()}):
            raise AssertionError(
                f"listing {self.name} imports {', '.join(heavy)}: move these imports to where they are used"
            )

    def test_it_imports_public_names_only(self) -> None:
        """The part's module may import only public modules of ROLL, and no name with a leading underscore.

        The same holds for modules of its package that it imports. docs/plugins.md lists public ones; others change in
        any release. Skipped for packages released with the core.
        """
        if registry().is_released_with_core(self.provider):
            pytest.skip(f"{self.name} is released with the core")
        if private := private_imports(self.provider.target.partition(":")[0], self._public):
            raise AssertionError(f"{self.name} imports {', '.join(private)}; public are {', '.join(self._public)}")

    def test_its_record_can_be_pickled(self) -> None:
        """The record must equal itself after pickling, because records are pickled on their way to the workers."""
        ours, theirs = multiprocessing.Pipe()
        with ours, theirs:
            ours.send(self.provider)
            assert theirs.recv() == self.provider, "the record does not equal itself after pickling"

    def test_the_class_implements_the_contract(self) -> None:
        """The class must implement every abstract method of its contract."""
        self._engine_or_skip()
        check_part(self.provider, owner=self.name)

    def test_an_unknown_key_is_refused(self) -> None:
        """The config schema must reject unknown keys, so that misspelled keys are not ignored."""
        if not self.provider.config:
            pytest.skip(f"{self.name} has no configuration")
        schema = load_target(self.provider.config, owner=self.name)
        try:
            schema.model_validate({"no_such_key": 1})
        except ValidationError as error:  # required keys are missing too
            if any("no_such_key" in (*problem["loc"], *problem["msg"].split()) for problem in error.errors()):
                return
        raise AssertionError(f"{self.provider.config} accepts the unknown key no_such_key")

    def test_its_needs_are_stated_as_requirements(self) -> None:
        """`needs` must be valid PEP 508 requirements.

        An error can then name a missing engine and the command to install it.
        """
        for need in self.provider.needs:
            for requirement in alternatives(need):
                Requirement(requirement)

    def test_a_missing_engine_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A `MissingRequirementError` must name each missing distribution and the pip command to install it."""
        needs = [Requirement(requirement) for need in self.provider.needs for requirement in alternatives(need)]
        needs = [need for need in needs if need.marker is None or need.marker.evaluate()]
        self.need(bool(needs), "needs")

        def nothing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", nothing)
        with pytest.raises(MissingRequirementError) as caught:
            check_requirements(self.provider, owner=self.name)
        for need in needs:
            if need.name not in str(caught.value) or "pip install" not in str(caught.value):
                raise AssertionError(f"the error lacks {need.name} or the pip command: {caught.value}")

    def _engines(self) -> set[str]:
        """Return the module names of the distributions that the record needs."""
        needs = [Requirement(requirement) for need in self.provider.needs for requirement in alternatives(need)]
        needed = {need.name.lower().replace("_", "-") for need in needs}
        modules = importlib.metadata.packages_distributions()
        return {
            module
            for module, packages in modules.items()
            if needed & {package.lower().replace("_", "-") for package in packages}
        } | {name.replace("-", "_") for name in needed}


def private_imports(module: str, public: tuple[str, ...]) -> list[str]:
    """Imports of ROLL's private modules and names, as `module:line name`.

    Looks at a part's module, and at the modules of its package that it imports, also within functions.
    """
    package, private, seen, pending = module.partition(".")[0], [], set(), [module]
    while pending:
        name = pending.pop()
        spec = importlib.util.find_spec(name) if name not in seen else None
        seen.add(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)):
            for imported in _imported_names(node, spec.parent or ""):
                root = imported.partition(".")[0]
                if root == package:
                    pending += [
                        candidate for candidate in (imported, imported.rpartition(".")[0]) if _is_module(candidate)
                    ]
                elif root in OURS:
                    known = any(f"{imported}.".startswith(f"{allowed}.") for allowed in public)
                    if not known or any(part.startswith("_") for part in imported.split(".")):
                        private.append(f"{name}:{node.lineno} {imported}")
    return sorted(private)


def _imported_names(node: ast.Import | ast.ImportFrom, package: str) -> list[str]:
    """Absolute names that a statement in a module of `package` imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    return [f"{origin}.{alias.name}" for alias in node.names]


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


class PackagingConformance(PackagingTests):
    """The tests of this group for a part of any kind.

    class TestMyPackage(PackagingConformance, kind=EnvironmentProvider):
        name = "my_environment"
    """

    def __init_subclass__(cls, kind: type[Provider] | None = None, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if kind is not None:
            cls._kind = kind


class RefusalTests(Kit):
    """Configs that `roll-core check` must refuse before a strategy starts. These tests need only the record."""

    _run: ClassVar[str]
    """Config template with the fields `platform`, `dtype` and `name`."""

    def test_an_undeclared_dtype_is_refused(self, tmp_path: Path) -> None:
        """`roll-core check` must refuse a dtype that the record does not declare, and name the declared ones."""
        declared = self.provider.capabilities.dtypes
        undeclared = [dtype for dtype in DTYPES if dtype not in declared]
        if not undeclared:
            pytest.skip(f"{self.name} declares every dtype")
        platform = next(iter(self.provider.platforms), "cpu")
        self._refused(tmp_path, undeclared[0], platform, *declared)

    def test_an_undeclared_platform_is_refused(self, tmp_path: Path) -> None:
        """`roll-core check` must refuse a platform that the record does not declare, and name the declared ones."""
        if not self.provider.platforms:
            pytest.skip(f"{self.name} declares every platform")
        self._refused(tmp_path, self.provider.capabilities.dtypes[0], "no_such_platform", *self.provider.platforms)

    def _refused(self, folder: Path, dtype: str, platform: str, *named: str) -> None:
        file = folder / "run.yaml"
        file.write_text(self._run.format(name=self.name, dtype=dtype, platform=platform), encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load(file, [], registry())
        said = str(caught.value)
        if self.provider.name not in said or any(name not in said for name in named):
            raise AssertionError(
                f"{self.name} with dtype {dtype} on platform {platform}: the error lacks a supported value:\n{said}"
            )
