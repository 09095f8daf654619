"""Checks that `roll-core doctor` runs if a run would use the platform `npu`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.spec.diagnostics import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext

HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def cann(_: CheckContext) -> Iterator[CheckResult]:
    """Check that CANN's set_env.sh was sourced; without it torch-npu does not find its libraries."""
    homes = {name: os.environ[name] for name in HOMES if os.environ.get(name)}
    expected = f"{HOMES[0]}, which CANN's set_env.sh sets"
    if not homes:
        yield CheckResult(level="error", found="CANN's variables are not set", wanted=expected, remedy=SET_ENV)
    for name, home in homes.items():
        if Path(home).is_dir():
            yield CheckResult(level="ok", found=f"{name}={home}", wanted=expected)
        else:
            status = f"{name}={home}, which is not a directory"
            yield CheckResult(level="error", found=status, wanted=expected, remedy=SET_ENV)
