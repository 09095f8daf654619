"""Checks of the machine: its operating system, and the resources that this process may use."""

from __future__ import annotations

import os
import platform
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.host import usable_cores
from roll_core.openmp import environment, wanted_threads
from roll_core.spec.diagnostics import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext

GIB = 1024**3
KERNEL = (5, 15)
WSL_1 = "-Microsoft"
"""Suffix of the kernel release in WSL 1; in WSL 2 it is `-microsoft-standard-WSL2`."""
SHM = Path("/dev/shm")
SHM_BYTES = 1 * GIB
"""Recommended free space in /dev/shm, in bytes. Docker's default size is 64 MiB."""
DISK_BYTES = 50 * GIB
"""Recommended free disk space in bytes, for checkpoints and data of a small model."""
DISK_LEAST_BYTES = 1 * GIB
OPEN_FILES = 8192
"""Recommended limit of open files: each worker has sockets to Ray, to its peers and to the engines."""


def operating_system(_: CheckContext) -> Iterator[CheckResult]:
    """Check that the system is Linux with a recent kernel, or WSL 2 on Windows."""
    name, release = platform.system(), platform.release()
    if name == "Windows":
        remedy = "use WSL 2 (wsl --install), and install the GPU's driver in Windows"
        yield CheckResult(level="error", found=f"Windows {release}", wanted="Linux", remedy=remedy)
        return
    if name != "Linux":
        remedy = "use it for small runs on the CPU; GPUs need Linux"
        yield CheckResult(level="warning", found=f"{name} {release}", wanted="Linux", remedy=remedy)
        return
    if release.endswith(WSL_1):
        remedy = "in Windows: wsl --set-version DISTRIBUTION 2, and install the GPU's driver in Windows"
        status = f"Linux {release} in WSL 1, which has no Linux kernel and no GPU support"
        yield CheckResult(level="error", found=status, wanted="WSL 2", remedy=remedy)
        return
    status = f"Linux {release}{' in WSL 2' if 'microsoft' in release.lower() else ''}"
    version = re.match(r"(\d{1,4})\.(\d{1,4})", release)
    expected = f"kernel {KERNEL[0]}.{KERNEL[1]} or newer"
    if version is None or (int(version[1]), int(version[2])) < KERNEL:
        remedy = "update the kernel if drivers or many processes fail"
        yield CheckResult(level="warning", found=status, wanted=expected, remedy=remedy)
    else:
        yield CheckResult(level="ok", found=status, wanted=expected)


def shared_memory(_: CheckContext) -> Iterator[CheckResult]:
    """Check the free space in /dev/shm."""
    if not SHM.is_dir():
        yield CheckResult(level="note", found=f"this system has no {SHM}; the weight transport shm is not available")
        return
    yield _space(
        SHM,
        least=0,
        enough=SHM_BYTES,
        remedy="docker run --shm-size=10g (or --ipc=host); in Kubernetes an emptyDir of medium Memory; otherwise delete"
        " files that killed programs left there",
    )


def threads(_: CheckContext) -> Iterator[CheckResult]:
    """Check the number of OpenMP threads, their spin settings, and the load of other programs."""
    cores, threads_set = usable_cores(), wanted_threads(os.environ)
    spinning = ", ".join(f"{name}={value}" for name, value in environment(os.environ).items())
    number = f"OMP_NUM_THREADS={threads_set}" if threads_set else "OMP_NUM_THREADS not set"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    status = f"{cores} usable cores, load {busy:.1f}; {number}; waiting threads: {spinning}"
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        remedy = "unset OMP_WAIT_POLICY: a single busy program can slow steps down tenfold"
        yield CheckResult(level="warning", found=status, wanted="threads that do not spin", remedy=remedy)
    elif threads_set > cores:
        remedy = "unset OMP_NUM_THREADS, or set it to the number of cores"
        yield CheckResult(level="warning", found=status, wanted=f"at most {cores} threads", remedy=remedy)
    elif busy > cores:
        yield CheckResult(level="note", found=f"{status}; other programs use the cores, so steps on a CPU are slower")
    else:
        yield CheckResult(level="ok", found=status)


def open_files(_: CheckContext) -> Iterator[CheckResult]:
    """Check the soft limit of open file descriptors."""
    try:
        import resource
    except ImportError:
        yield CheckResult(level="note", found="this system has no such limit")
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    status = "unlimited" if unlimited else f"{soft}"
    if unlimited or soft >= OPEN_FILES:
        yield CheckResult(level="ok", found=status, wanted=f"{OPEN_FILES} or more")
        return
    enough = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
    more = f"ulimit -n {OPEN_FILES}" if enough else f"raise nofile in /etc/security/limits.conf: at most {hard} now"
    yield CheckResult(level="warning", found=status, wanted=f"{OPEN_FILES} or more", remedy=more)


def disk(context: CheckContext) -> Iterator[CheckResult]:
    """Check the free space on the disk of `output_dir`."""
    folder = Path(context.config.output_dir if context.config is not None else ".").expanduser()
    yield _space(
        existing(folder),
        least=DISK_LEAST_BYTES,
        enough=DISK_BYTES,
        remedy="free space, change output_dir, or keep fewer checkpoints (max_ckpt_to_keep)",
    )


def existing(folder: Path) -> Path:
    """The folder if it exists, otherwise its nearest existing parent."""
    above = (folder.absolute(), *folder.absolute().parents)
    return next((directory for directory in above if directory.exists()), Path("/"))


def _space(folder: Path, *, least: int, enough: int, remedy: str) -> CheckResult:
    free = shutil.disk_usage(folder).free
    status, floor = f"{free / GIB:.1f} GiB free in {folder}", f"{enough / GIB:.0f} GiB or more"
    if free >= enough:
        return CheckResult(level="ok", found=status, wanted=floor)
    return CheckResult(level="error" if free < least else "warning", found=status, wanted=floor, remedy=remedy)
