"""Checks that `roll-core doctor` runs if a run would use the platform `cuda`."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from roll_core.errors import install_command
from roll_core.spec.diagnostics import CheckResult
from roll_core.spec.platform import torch_build
from roll_platform_cuda.nvml import NoDriverError, dotted, survey

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext, Level
    from roll_platform_cuda.nvml import NvidiaDevice

CUDA = (12, 4)
PASCAL, AMPERE = (6, 0), (8, 0)
TOOL_S = 10.0
"""Time limit in seconds for a program that prints its version."""
LIBRARIES = ("cudnn", "nccl")
FLOORS = {"cudnn": (9, 1)}
"""Minimum versions, which flash attention needs."""


def driver(_: CheckContext) -> Iterator[CheckResult]:
    """Check that the driver supports the CUDA version that torch was built with."""
    try:
        seen = survey()
    except NoDriverError as error:
        remedy = "install NVIDIA's driver; in a container: docker run --gpus all"
        yield CheckResult(level="error", found=f"no driver ({error})", wanted="a driver", remedy=remedy)
        return
    status = f"driver {seen.driver}, for CUDA up to {dotted(seen.cuda)}"
    build = torch_build()
    built = parse(build.cuda) if build is not None else None
    if built is None:
        expected = f"CUDA {dotted(CUDA)} or newer"
        good = seen.cuda >= CUDA
        remedy = "" if good else "install a newer driver"
        yield CheckResult(level="ok" if good else "warning", found=status, wanted=expected, remedy=remedy)
        return
    level = "ok" if seen.cuda >= built else compared(seen.cuda, built)
    remedy = f"install a newer driver, or a torch for CUDA {dotted(seen.cuda)}"
    expected = f"CUDA {dotted(built)}, which torch was built for"
    yield CheckResult(level=level, found=status, wanted=expected, remedy="" if level == "ok" else remedy)
    if built < CUDA:
        remedy = f"install a torch for CUDA {dotted(CUDA)} or newer, and a newer driver if that torch requires it"
        status, expected = (
            f"torch was built for CUDA {dotted(built)}",
            f"CUDA {dotted(CUDA)} or newer, like engines",
        )
        yield CheckResult(level="warning", subject="torch", found=status, wanted=expected, remedy=remedy)


def toolkit(_: CheckContext) -> Iterator[CheckResult]:
    """Check that the CUDA toolkit (`CUDA_HOME`, nvcc) matches torch; it is needed only to compile kernels."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else shutil.which("nvcc")
    build = torch_build()
    built = parse(build.cuda) if build is not None else None
    expected = f"CUDA {dotted(built)}, like torch" if built is not None else ""
    right = f"the toolkit of CUDA {dotted(built)}" if built is not None else "a CUDA toolkit"
    if nvcc is None and home:
        remedy = f"set CUDA_HOME to the folder of {right}, or unset it"
        status = f"CUDA_HOME={home} has no bin/nvcc"
        yield CheckResult(level="warning", found=status, wanted=expected, remedy=remedy)
        return
    if nvcc is None:
        yield CheckResult(level="note", found="no nvcc; it is needed only to compile kernels", wanted=expected)
        return
    output = output_of([nvcc, "--version"])
    match = re.search(r"release (\d{1,3})\.(\d{1,3})\b", output)
    if match is None:
        status = f"{nvcc} --version prints no version: {' '.join(output.split())[:80] or 'no output'}"
        remedy = f"reinstall {right}, or set CUDA_HOME to another one"
        yield CheckResult(level="warning", found=status, wanted=expected, remedy=remedy)
        return
    version = (int(match[1]), int(match[2]))
    level: Level = compared(version, built) if built is not None else "ok"
    remedy = "" if level == "ok" else f"install {right}, and set CUDA_HOME to its folder"
    yield CheckResult(level=level, found=f"CUDA {dotted(version)} ({nvcc})", wanted=expected, remedy=remedy)


def libraries(_: CheckContext) -> Iterator[CheckResult]:
    """Check cuDNN and NCCL against torch's metadata.

    A torch build whose metadata does not list them contains its own copies.
    """
    try:
        texts = importlib.metadata.requires("torch") or ()
    except importlib.metadata.PackageNotFoundError:
        return  # roll-core's own check reports it
    needs = [Requirement(text) for text in texts if text.startswith("nvidia-")]
    for library in LIBRARIES:
        requirements = [requirement for requirement in needs if requirement.name.startswith(f"nvidia-{library}")]
        active = [
            requirement
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
        if not active:
            yield CheckResult(
                level="note", subject=library, found="torch does not require a version and contains its own copy"
            )
        for need in active:
            yield _library(library, need)


def compute_capability(_: CheckContext) -> Iterator[CheckResult]:
    """Check that every device is Pascal or newer; bf16 needs Ampere or newer."""
    for index, device in enumerate(_survey_devices()):
        subject, status = f"cuda:{index}", f"{device.name}, {dotted(device.capability)}"
        expected = f"{dotted(AMPERE)} for bf16, {dotted(PASCAL)} at least"
        if device.capability < PASCAL:
            remedy = "use another device: CUDA_VISIBLE_DEVICES"
            yield CheckResult(level="error", subject=subject, found=status, wanted=expected, remedy=remedy)
        elif device.capability < AMPERE:
            remedy = "set model_args.dtype: fp16 (if the strategy supports it) or fp32"
            yield CheckResult(level="warning", subject=subject, found=status, wanted=expected, remedy=remedy)
        else:
            yield CheckResult(level="ok", subject=subject, found=status, wanted=expected)


def arch_list(_: CheckContext) -> Iterator[CheckResult]:
    """Check that kernels compiled for `TORCH_CUDA_ARCH_LIST` run on this host's devices."""
    value = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not value:
        return
    entries = re.findall(r"(\d{1,3})\.(\d)([af]?)(\+PTX)?", value)
    for device in dict.fromkeys((device.name, device.capability) for device in _survey_devices()):
        name, capability = device
        status = f"TORCH_CUDA_ARCH_LIST={value}"
        if any(
            _runs_on(capability, (int(major), int(minor)), kind, ptx=bool(ptx)) for major, minor, kind, ptx in entries
        ):
            yield CheckResult(level="ok", subject=name, found=status, wanted=dotted(capability))
        else:
            remedy = f"unset it, or add {dotted(capability)}"
            yield CheckResult(level="warning", subject=name, found=status, wanted=dotted(capability), remedy=remedy)


# -- helpers -----------------------------------------------------------------------------------------------------------


def parse(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as `12.8`; None if it is not a version."""
    match = re.match(r"(\d{1,3})\.(\d{1,3})", version)
    return (int(match[1]), int(match[2])) if match is not None else None


def compared(installed: tuple[int, int], expected: tuple[int, int]) -> Level:
    """Level of a version mismatch: a different major version is an error, a different minor version a warning."""
    if installed[0] != expected[0]:
        return "error"
    return "ok" if installed == expected else "warning"


def _runs_on(device: tuple[int, int], built: tuple[int, int], kind: str, *, ptx: bool) -> bool:
    """True if kernels built for compute capability `built` run on a device.

    By NVIDIA's rules, machine code runs on the same major and an equal or higher minor version, and PTX on everything
    newer. With the suffix (`kind`) `a` they run only on exactly `built`, with `f` only within the major version.
    """
    if kind == "a":
        return device == built
    same_major = device[0] == built[0] and device[1] >= built[1]
    return same_major or (ptx and not kind and device >= built)


def output_of(command: list[str]) -> str:
    """Output (stdout and stderr) of a program; empty if it cannot be started or times out."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=TOOL_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return (done.stdout + done.stderr).decode(errors="replace")


def _library(library: str, need: Requirement) -> CheckResult:
    expected = str(need.specifier) or "any version"
    remedy = install_command(f"{need.name}{need.specifier}")
    try:
        version = importlib.metadata.version(need.name)
    except importlib.metadata.PackageNotFoundError:
        status = f"{need.name} is not installed"
        return CheckResult(level="error", subject=library, found=status, wanted=expected, remedy=remedy)
    status = f"{need.name} {version}"
    floor = FLOORS.get(library)
    if not need.specifier.contains(version, prereleases=True):
        return CheckResult(level="warning", subject=library, found=status, wanted=expected, remedy=remedy)
    if floor is not None and (parse(version) or floor) < floor:
        remedy = "install a newer torch, or do not use flash attention"
        return CheckResult(level="warning", subject=library, found=status, wanted=dotted(floor), remedy=remedy)
    return CheckResult(level="ok", subject=library, found=status, wanted=expected)


def _survey_devices() -> tuple[NvidiaDevice, ...]:
    try:
        return survey().devices
    except NoDriverError:  # the check `driver` reports it
        return ()
