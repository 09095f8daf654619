"""Compiles extensions when a wheel is built, as a build hook of hatchling.

    [build-system]
    requires = ["hatchling>=1.27", "roll-kernels"]

    [tool.hatch.build.targets.wheel.hooks.roll-extensions]
    extensions = ["acme.kernels:FAST"]

    BUILD_EXT=1 pip wheel --no-build-isolation .

Without `BUILD_EXT=1` the wheel contains only the sources, which are compiled on first use. Compiled libraries fit the
torch, processor and GPUs of the build host. Other hosts ignore them and compile the sources.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.plugin import hookimpl

if TYPE_CHECKING:
    from roll_kernels.extensions import Extension

SWITCH = "BUILD_EXT"


class ExtensionHook(BuildHookInterface):  # type: ignore[misc]  # hatchling has no types
    """Build hook that puts shared libraries where `Extension.library` looks first."""

    PLUGIN_NAME = "roll-extensions"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the extensions before the wheel is written.

        Raises `ExtensionError` if this fails, and `RuntimeError` if an extension cannot be imported.
        """
        if os.environ.get(SWITCH, "0") in ("", "0") or version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="roll-extensions-"))
        for target in self.config["extensions"]:
            extension, root = self._load(target)
            library = extension.build_ahead(self._folder)
            beside = extension.ahead_folder().relative_to(root) / library.relative_to(self._folder)
            build_data["force_include"][str(library)] = str(beside)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete temporary files after the wheel is written."""
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)

    def _load(self, target: str) -> tuple[Extension, Path]:
        """Extension named by `module:attribute`, and the directory from which its package is imported."""
        module_name, _, attribute = target.partition(":")
        for package in self.build_config.packages:
            sys.path.insert(0, str(Path(self.root, package).parent))
        try:
            module = import_module(module_name)
        except ImportError as error:
            raise RuntimeError(
                f"{SWITCH}=1: cannot import {target} ({error}). Extensions are compiled against torch of the build"
                " environment: install the package's requirements there, and use --no-build-isolation"
            ) from error
        package = import_module(module_name.partition(".")[0])
        return getattr(module, attribute), Path(str(package.__file__)).parents[1]


@hookimpl  # type: ignore[untyped-decorator]
def hatch_register_build_hook() -> type[ExtensionHook]:
    """Build hook for hatchling, found by the entry point `hatch`."""
    return ExtensionHook
