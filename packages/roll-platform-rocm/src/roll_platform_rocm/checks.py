"""Checks that `roll-core doctor` runs if a run would use the platform `rocm`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.spec.diagnostics import CheckResult
from roll_core.spec.platform import torch_build
from roll_platform_rocm.kfd import CUDA_VISIBLE, HIP_VISIBLE, ROCR_VISIBLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext

ROCM = Path("/opt/rocm")


def visible_devices(_: CheckContext) -> Iterator[CheckResult]:
    """Check that the three variables that restrict visible devices agree; Ray requires it."""
    hip, cuda, rocr = (os.environ.get(name) for name in (HIP_VISIBLE, CUDA_VISIBLE, ROCR_VISIBLE))
    if rocr is not None and hip is None:
        remedy = f"unset {ROCR_VISIBLE}, and set {HIP_VISIBLE}={rocr} instead"
        status = f"{ROCR_VISIBLE}={rocr}, with which Ray does not start"
        yield CheckResult(level="error", found=status, wanted=HIP_VISIBLE, remedy=remedy)
    elif hip is not None and cuda is not None and hip != cuda:
        status = f"{HIP_VISIBLE}={hip}, but {CUDA_VISIBLE}={cuda}"
        remedy = f"unset {CUDA_VISIBLE}"
        yield CheckResult(level="error", found=status, wanted="one value", remedy=remedy)
    else:
        shown = f"{HIP_VISIBLE}={hip}" if hip is not None else f"{CUDA_VISIBLE}={cuda}" if cuda is not None else "all"
        yield CheckResult(level="ok", found=shown)


def toolkit(_: CheckContext) -> Iterator[CheckResult]:
    """Check that the host's ROCm has the major version of torch's ROCm.

    It is needed only to compile kernels. A compiler of another major version produces incompatible code.
    """
    home = Path(os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH") or ROCM)
    build = torch_build()
    built = re.match(r"\d{1,3}", build.hip) if build is not None else None
    expected = f"ROCm {built[0]}, like torch" if built is not None else ""
    try:
        text = (home / ".info" / "version").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        yield CheckResult(
            level="note", found=f"no ROCm in {home}; it is needed only to compile kernels", wanted=expected
        )
        return
    version = re.match(r"(\d{1,3})\.\d", text)
    if version is None:
        remedy = "reinstall ROCm, or set ROCM_HOME to another one"
        status = f"{home}/.info/version contains {text[:40]!r}"
        yield CheckResult(level="warning", found=status, wanted=expected, remedy=remedy)
    elif built is not None and version[1] != built[0]:
        remedy = f"install ROCm {built[0]}, or a torch for ROCm {version[1]}"
        yield CheckResult(level="error", found=f"ROCm {text[:40]} ({home})", wanted=expected, remedy=remedy)
    else:
        yield CheckResult(level="ok", found=f"ROCm {text[:40]} ({home})", wanted=expected)
