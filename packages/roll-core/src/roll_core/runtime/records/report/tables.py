"""Table rows of the report: memory, guards, weight sync, checkpoints, config, plugins, host."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.checkpoints import CheckpointStore
from roll_core.runtime.records.jsonlines import finite_number
from roll_core.runtime.records.report.charts import figure
from roll_core.runtime.records.report.reading import as_dicts, as_pairs, date, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.records.run_dir import RunDir


def memory_rows(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Predicted and measured memory of each process, on host and device."""
    rows = []
    for row in as_dicts(record.get("memory")):
        roles = row.get("roles")
        for where, prefix in (("host", ""), ("device", "device_")):
            measured = finite_number(row.get(f"{prefix}measured_bytes"))
            predicted = finite_number(row.get(f"{prefix}predicted_bytes"))
            if measured is None:
                continue
            rows.append(
                {
                    "roles": ", ".join(map(str, roles)) if isinstance(roles, list) else "",
                    "process": f"{row.get('pid', '?')} on {row.get('host', '?')}",
                    "where": where,
                    "predicted": "not known" if predicted is None else _mib(predicted),
                    "measured": _mib(measured),
                    "error": f"{predicted / measured - 1:+.0%}" if predicted is not None and measured > 0 else "",
                }
            )
    return rows


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def guard_row(event: Mapping[str, Any]) -> dict[str, Any]:
    """Row of one guard event."""
    when = finite_number(event.get("time"))
    return {
        "guard": str(event.get("guard", "")),
        "action": str(event.get("action", "")),
        "message": str(event.get("message", "")),
        "step": event.get("step", ""),
        "time": date(when) if when is not None else "",
    }


def proofs(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """Count, last value and range of each `weight_sync/` metric over the run."""
    names = sorted({name for row in metrics for name in row if name.startswith("weight_sync/")})
    rows = []
    for name in names:
        values = [row[name] for row in metrics if name in row]
        finite = [value for value in values if math.isfinite(value)]
        rows.append(
            {
                "name": name.partition("/")[2],
                "count": str(len(values)),
                "last": figure(values[-1]),
                "low": figure(min(finite)) if finite else "",
                "high": figure(max(finite)) if finite else "",
            }
        )
    return rows


def checkpoint_rows(run_dir: RunDir) -> list[dict[str, str]]:
    """Step, path, size, file count and date of each complete checkpoint."""
    rows = []
    for checkpoint in CheckpointStore(run_dir.checkpoints).list():
        files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
        rows.append(
            {
                "step": str(checkpoint.step),
                "path": str(checkpoint.path.relative_to(run_dir.path)),
                "size": size(sum(path.stat().st_size for path in files)),
                "files": str(len(files)),
                "written": date(checkpoint.path.stat().st_mtime),
            }
        )
    return rows


def yaml_lines(text: str) -> list[tuple[str, str]]:
    """Split each line into key and rest, for syntax colouring."""
    lines = []
    for line in text.splitlines():
        key, colon, rest = line.partition(":")
        is_key = colon and (not rest or rest[0] == " ") and not key.lstrip(" -").startswith(("#", '"', "'"))
        lines.append((key + colon, rest) if is_key else ("", line))
    return lines


def plugin_row(plugin: Mapping[str, Any]) -> dict[str, str]:
    """Row of a plugin: what it provides, or the error with which it failed to load."""
    provides = plugin.get("provides")
    offers = []
    if isinstance(provides, dict):
        offers = [
            f"{kind}: {', '.join(map(str, names))}" for kind, names in provides.items() if isinstance(names, list)
        ]
    return {
        "name": str(plugin.get("package") or plugin.get("name") or ""),
        "version": str(plugin.get("version") or ""),
        "hook_api": str(plugin.get("hook_api") or ""),
        "state": str(plugin.get("state") or ""),
        "provides": "; ".join(offers),
        "error": str(plugin.get("error") or ""),
    }


def environment_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and value of host, git state, the roles' Python environments, and the command."""
    rows = []
    host = record.get("host")
    if isinstance(host, dict):
        rows += [(key, str(host[key])) for key in ("name", "system", "cpu", "cores", "executable") if host.get(key)]
        memory = finite_number(host.get("memory_bytes"))
        if memory is not None:
            rows.append(("memory", size(memory)))
    git = record.get("git")
    if isinstance(git, dict):
        dirty = " with uncommitted changes" if git.get("dirty") else ""
        rows.append(("git", f"{str(git.get('commit', ''))[:12]} on {git.get('branch')}{dirty}"))
    environments = record.get("environments")
    for role, found in environments.items() if isinstance(environments, dict) else ():
        rows.append((f"Python of {role}", ", ".join(f"{name} {version}" for name, version in as_pairs(found))))
    if isinstance(record.get("argv"), list):
        rows.append(("command", " ".join(str(part) for part in record["argv"])))
    if record.get("cwd"):
        rows.append(("directory", str(record["cwd"])))
    return rows
