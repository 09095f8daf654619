"""The executors of roll-wrong under the kit."""

from __future__ import annotations

from roll_wrong.plugin import EXECUTORS, IN_PROCESS

from roll_testing import ExecutorConformance

for _name in EXECUTORS:
    _settings = {"name": _name}
    if not _name.startswith("right"):  # what never comes is not awaited for long
        _settings |= {"timeout_s": 4.0} if _name in IN_PROCESS else {}
        _settings |= {} if _name == "loses_another" else {"exit_s": 1.0}
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (ExecutorConformance,), _settings)
