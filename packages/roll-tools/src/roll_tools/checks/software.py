"""Checks of the software: the interpreter and roll-core's requirements."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.errors import install_command
from roll_core.plugins.requirements import core_requirements
from roll_core.spec.diagnostics import CheckResult
from roll_core.spec.platform import torch_build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext, Level

PYTHON = (3, 11)
SHOWN = ("torch", "transformers")
"""Packages whose version is always shown; others are shown only if there is a problem with them."""
EXTRAS: tuple[tuple[str, Level], ...] = (("", "error"), ("train", "warning"))
"""Extras of roll-core, and the level of a finding if one of their packages is missing. `check`, `plan` need none."""
BUILT_FOR_TORCH = ("torchvision", "torchaudio")
"""Packages that transformers and engines import if installed, and that fail with a torch they were not built for."""


def python(_: CheckContext) -> Iterator[CheckResult]:
    """Check the version of the Python interpreter."""
    status = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    expected = f"{PYTHON[0]}.{PYTHON[1]} or newer"
    if sys.version_info[:2] < PYTHON:
        remedy = f"create an environment with it: uv venv --python {PYTHON[0]}.{PYTHON[1]}"
        yield CheckResult(level="error", found=status, wanted=expected, remedy=remedy)
    else:
        yield CheckResult(level="ok", found=status, wanted=expected)


def libraries(_: CheckContext) -> Iterator[CheckResult]:
    """Check roll-core's own requirements: for every command and for runs."""
    for extra, level in EXTRAS:
        for requirement in core_requirements(extra):
            name, expected = requirement.name, str(requirement.specifier) or "any version"
            remedy = install_command(f"roll-core[{extra}]" if extra else f"{name}{requirement.specifier}")
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                yield CheckResult(level=level, subject=name, found="not installed", wanted=expected, remedy=remedy)
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                yield CheckResult(level="error", subject=name, found=version, wanted=expected, remedy=remedy)
            elif name in SHOWN:
                build = torch_build() if name == "torch" else None
                status = str(build) if build is not None else version
                yield CheckResult(level="ok", subject=name, found=status, wanted=expected)
    yield from _built_for_another_torch()


def _built_for_another_torch() -> Iterator[CheckResult]:
    build = torch_build()
    for name in BUILT_FOR_TORCH:
        spec = importlib.util.find_spec(name) if build is not None else None
        if build is None or spec is None or spec.origin is None:
            continue
        try:
            text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        version = re.search(r"^__version__ = '(.+?)'$", text, re.MULTILINE)
        cuda = re.search(r"\+cu(\d+)\d$", version[1]) if version else None
        if version and cuda and cuda[1] != build.cuda.partition(".")[0]:
            remedy = f"pip uninstall -y {' '.join(BUILT_FOR_TORCH)} torchcodec: nothing here needs them"
            expected = f"none, or one built for {build}"
            yield CheckResult(level="error", subject=name, found=version[1], wanted=expected, remedy=remedy)
