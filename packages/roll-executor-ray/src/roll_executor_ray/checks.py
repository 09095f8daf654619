"""Checks of what `executor: ray` uses: the cluster at `RAY_ADDRESS`, and roles' Python environments."""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING

from roll_core.errors import PythonEnvironmentError
from roll_core.spec.diagnostics import CheckResult
from roll_executor_ray.python_environments.prepare import prepare
from roll_executor_ray.python_environments.spec import environment_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.diagnostics import CheckContext

CONNECT_S = 5.0


def environments(context: CheckContext) -> Iterator[CheckResult]:
    """Check roles' existing Python environments. Environments that uv will install are reported as a note."""
    for role, environment in context.environments.items():
        if environment.config.packages:
            packages = ", ".join(environment.config.packages)
            status = f"uv installs {packages} when the role first starts"
            yield CheckResult(level="note", subject=role, found=status)
            continue
        try:
            python = prepare(environment_spec(environment), role)
        except PythonEnvironmentError as error:
            problem, _, command = str(error).partition(". Run: ")
            remedy = command or f"set {role}.environment to another one"
            yield CheckResult(level="error", subject=role, found=problem, remedy=remedy)
        else:
            yield CheckResult(level="ok", subject=role, found=str(python))


def ray_cluster(_: CheckContext) -> Iterator[CheckResult]:
    """Check that `RAY_ADDRESS` accepts connections. Yields nothing if the run would start its own Ray."""
    address = os.environ.get("RAY_ADDRESS", "")
    match = re.fullmatch(r"(?:ray://)?\[?(?P<host>.+?)\]?:(?P<port>\d{1,5})", address)
    if not address or address == "local":
        return
    if match is None:
        yield CheckResult(level="note", found=f"RAY_ADDRESS={address}", wanted="host:port")
        return
    try:
        socket.create_connection((match["host"], int(match["port"])), timeout=CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: invalid port or host name
        remedy = "start it, correct RAY_ADDRESS, or unset it so that runs start their own Ray"
        status = f"RAY_ADDRESS={address} refuses connections: {error}"
        yield CheckResult(level="error", found=status, wanted="a Ray cluster", remedy=remedy)
    else:
        yield CheckResult(level="ok", found=f"RAY_ADDRESS={address} accepts connections")
