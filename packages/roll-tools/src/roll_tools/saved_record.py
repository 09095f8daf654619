"""The fields of `run.json`, and the findings of `audit.json`, that the report shows.

A field of the wrong type is ignored, so that the rest is shown.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roll_core.host import hostname
from roll_core.runtime.records.record import read_record
from roll_core.runtime.records.tracking import read_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.runtime.records.run_dir import RunDir

AUDIT = "audit.json"
"""File of a run directory with the findings about its data."""
PREDICTION = "prediction.json"
"""File of a run directory with its predicted memory (`run_plan.prediction`)."""
_NOT_HASHED = ("output_dir:", "exp_name:", "resume_from_checkpoint:")
_Timestamp = Annotated[float, Field(ge=0, lt=253_402_214_400)]
"""Unix time in seconds that `datetime` can represent."""
_Amount = Annotated[float, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, coerce_numbers_to_str=True)


class _Error(_Part):
    type: str = "Error"
    message: str = ""
    advice: str = ""


class _GuardEvent(_Part):
    guard: str
    action: str = ""
    message: str = ""
    step: int | None = None
    time: _Timestamp | None = None


class _Guards(_Part):
    counts: dict[str, int] = {}
    events: list[_GuardEvent] = []


class StageTime(_Part):
    """Time of one stage: a row of the ledger."""

    stage: str
    seconds: _Amount
    entries: int = 0
    tokens: _Amount = 0


class _ProcessMemory(_Part):
    roles: list[str] = []
    host: str = "?"
    pid: int | None = None
    measured_bytes: _Amount | None = None
    device_measured_bytes: _Amount | None = None


class Prediction(_Part):
    """Predicted memory of a run, as `run_plan.prediction` describes it."""

    unknown: list[str] = []
    on_slots: bool = False
    phases: list[tuple[str, str, int, int]] = []

    def of(self, roles: Sequence[str]) -> dict[str, int | None]:
        """Predicted bytes of a process with one worker of each role: the maximum over all phases. None if unknown."""
        host: Counter[str] = Counter()
        device: Counter[str] = Counter()
        for phase, role, on_device, on_host in self.phases:
            if role in roles:
                host[phase] += on_host
                device[phase] += on_device
        known = bool(host) and not set(roles) & set(self.unknown)
        return {
            "predicted_bytes": max(host.values()) if known else None,
            "device_predicted_bytes": max(device.values()) if known and self.on_slots else None,
        }


class _Plugin(_Part):
    package: str = ""
    version: str | None = None
    hook_api: int | None = None
    state: str = ""
    provides: dict[str, list[str]] = {}
    error: str | None = None


class _BestCheckpoint(_Part):
    metric: str = ""
    value: float | None = None
    step: int | None = None
    path: str = ""


class _AuditFinding(_Part):
    check: str = ""
    subject: str = ""
    level: str = ""
    found: str = ""
    remedy: str = ""


class SavedRecord(_Part):
    """Record of a run; missing and invalid fields have their default."""

    name: str = ""
    pipeline: str = ""
    platform: str = ""
    executor: str = ""
    seed: int | None = None
    outcome: str = "unknown"
    error: _Error | None = None
    started: _Timestamp | None = None
    ended: _Timestamp | None = None
    steps_done: int = 0
    steps_asked: int | None = None
    resumed_from: str = ""
    resumed_step: int = 0
    weight_transports: dict[str, str] = {}
    guards: _Guards = _Guards()
    time: list[StageTime] | None = None
    memory: list[_ProcessMemory] | None = None
    best_checkpoint: _BestCheckpoint | None = None
    checkpoint_store: str = ""
    audit: list[_AuditFinding] = []
    versions: dict[str, str] = {}
    environments: dict[str, dict[str, str]] = {}
    git: dict[str, Any] | None = None
    host: dict[str, Any] = {}
    plugins: list[_Plugin] = []
    argv: list[str] = []
    cwd: str = ""

    @classmethod
    def of(cls, record: dict[str, Any]) -> SavedRecord:
        """The record without its invalid fields."""
        try:
            return cls.model_validate(record)
        except ValidationError as error:
            invalid = {mistake["loc"][0] for mistake in error.errors()}
            return cls.model_validate({name: value for name, value in record.items() if name not in invalid})


def read_findings(directory: Path) -> list[Any]:
    """Findings of the run's audit; empty if it has none."""
    findings = _read(directory / AUDIT)
    return findings if isinstance(findings, list) else []


def read_memory(run: RunDir) -> list[dict[str, Any]]:
    """Measured and predicted memory of the processes of a finished run."""
    try:
        prediction = Prediction.model_validate(_read(run.path / PREDICTION) or {})
    except ValidationError:
        prediction = Prediction()
    processes = SavedRecord.of(read_record(run.record)).memory or ()
    return [row.model_dump() | prediction.of(row.roles) for row in processes]


def _read(path: Path) -> Any:
    """The JSON of a file; None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def is_abandoned(record: Mapping[str, Any]) -> bool:
    """True if the outcome is `running` but the process, on this host, no longer exists. False for other hosts."""
    process = record.get("process")
    if record.get("outcome") != "running" or not isinstance(process, dict):
        return False
    if not isinstance(record.get("host"), dict) or record["host"].get("name") != hostname():
        return False
    try:
        created = psutil.Process(int(process["pid"])).create_time()
        return abs(created - float(process.get("created", created))) > 2.0  # another process now has the same id
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError, OverflowError):
        return True
    except psutil.AccessDenied:
        return False


def read_state(run: RunDir) -> tuple[SavedRecord, str]:
    """The record of a run, and its outcome: `killed` if its process exited without writing one."""
    saved = read_record(run.record)
    record = SavedRecord.of(saved)
    return record, "killed" if is_abandoned(saved) else record.outcome


def readable_metrics(run: RunDir) -> list[dict[str, float]]:
    """Metrics of a run; empty if they cannot be read, for example those of another user."""
    try:
        return read_metrics(run.metrics)
    except OSError:
        return []


def config_hash(path: Path) -> str:
    """First 8 hexadecimal digits of the hash of a resolved config; empty if it cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return ""
    hashed_lines = [line for line in lines if not line.decode(errors="replace").startswith(_NOT_HASHED)]
    return hashlib.sha256(b"\n".join(hashed_lines)).hexdigest()[:8]
