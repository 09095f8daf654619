"""What the benchmarks share: the machine's description, result files, environments for peers.

Results are ratios measured within one run, because timings differ from machine to machine and from minute to minute.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.append(str(REPOSITORY / "tools"))
from environments import environment  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results"

peer_python = environment
"""The interpreter of an environment for a peer, which must not meet our versions."""


def machine() -> dict[str, Any]:
    """What the numbers were measured on; no names, no paths."""
    versions = {}
    for name in ("torch", "transformers", "ray", "numpy", "pydantic"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def write_result(name: str, result: Mapping[str, Any], table: str = "") -> Path:
    """Write `benchmarks/results/<name>.json`, and `<name>.md` with `table` for readers. Returns the former's path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n", encoding="utf-8")
    if table:
        here = machine()
        versions = ", ".join(f"{k} {v}" for k, v in here["versions"].items())
        where = f"{here['cpu']}, {here['cores']} cores, {here['system']}, Python {here['python']}; {versions}."
        (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{where}\n\n{table.rstrip()}\n", encoding="utf-8")
    return path


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor()
    return platform.processor()
