"""The Ray that an executor works with: the user's if there is one, else one of our own that nobody else sees.

Ray is the user's if this process is connected already, or if `RAY_ADDRESS` says where it is. Ours lets in
only who knows its secret, keeps its files in a scratch directory of its own, and ends with the executor, or with the
driver however that dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from roll_core.errors import PlacementError
from roll_core.host import usable_cores
from roll_core.runtime.cluster.executors import orphan_cleanup
from roll_core.runtime.cluster.executors.environment import EnvironmentChange
from roll_core.runtime.cluster.executors.sigterm_mask import children_deaf_to

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable

    from roll_core.spec.platform import Platform

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 512 * 1024**2
"""Of our own instance. Weights do not go through it, only batches and their results."""
REACH_S = 10.0
"""How long the user's Ray may take to take a connection."""
START_ATTEMPTS = 3
TOO_SLOW = "node timed out during startup"
"""What Ray says when its daemon takes more than 30 s to register; that limit cannot be set."""
STATE_KEEPERS = ("gcs_server", "raylet")
"""Ray's processes without which a driver cannot take its leave."""
LONGEST_SCRATCH = 40
"""Ray puts sockets below its directory, and the path of a socket is at most 107 bytes long."""


class RayInstance:
    """Connects to Ray or starts it, and undoes exactly that."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.mark = secrets.token_hex(4)
        self.scratch = _scratch_directory(self.mark)
        self.single_host = False
        """Whether it is an instance of our own, which has no other host."""
        self._connected_by_us = False
        self._helpers: list[psutil.Process] = []
        """Of an instance of our own: its logs, its monitors."""
        self._reaper: subprocess.Popen[bytes] | None = None
        self._environment = EnvironmentChange()

    @property
    def is_open(self) -> bool:
        """Whether Ray can be asked anything."""
        return self._reaper is not None and "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())

    def open(self) -> None:
        """Connect. Blocks. Call it from the thread that lives as long as the instance: Ray asks Linux to end its
        processes together with the thread that started them."""
        address = os.environ.get("RAY_ADDRESS", "").removeprefix("local")
        _check_reachable(address)
        with children_deaf_to(signal.SIGTERM):
            self._watch()
        self._set_environment(alone=not address)
        import ray

        if ray.is_initialized():
            del os.environ[orphan_cleanup.MARK]
            return
        sigterm = signal.getsignal(signal.SIGTERM)
        self._connected_by_us = True
        try:
            if address:
                ray.init(address=address, namespace=f"roll-{self.mark}", logging_level=logging.WARNING)
            else:
                self.single_host = True
                with children_deaf_to(signal.SIGTERM):
                    self._start()
        except Exception as error:  # Ray raises whatever its parts raise
            what = f"joined at RAY_ADDRESS={address}" if address else "started on this host"
            raise PlacementError(f"Ray could not be {what}: {error}{_about_tokens(address)}") from error
        finally:
            # What else the driver starts is not ours to end.
            del os.environ[orphan_cleanup.MARK]
            if sigterm is not None:
                signal.signal(signal.SIGTERM, sigterm)

    def close(self) -> None:
        """Disconnect, end what is ours, and sweep up. Blocks; may be called several times."""
        if self._connected_by_us:
            import ray

            self._connected_by_us = False
            self._end_helpers()
            ray.shutdown()
        if self._reaper is not None:
            left = orphan_cleanup.sweep(self.mark, self.scratch)
            if left:
                log.debug("%d processes had to be killed at the end", left)
            orphan_cleanup.dismiss(self._reaper)
            self._reaper = None
        self._environment.undo()

    def _start(self) -> None:
        before = set(psutil.Process().children())
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                self._start_once()
                break
            except Exception as error:  # Ray has no type of its own for it
                if TOO_SLOW not in str(error) or not attempts_left:
                    raise
                log.warning("Ray did not come up in its 30 s, as on a host that is busy; it is tried again")
                _kill(set(psutil.Process().children()) - before)
        started = set(psutil.Process().children()) - before
        self._helpers = [process for process in started if process.name() not in STATE_KEEPERS]

    def _start_once(self) -> None:
        import ray

        _provide_secret()
        platform = self._platform
        slots: dict[str, Any] = {}
        if platform.ray_resource == "GPU":
            slots["num_gpus"] = platform.device_count()
        elif platform.ray_resource != "CPU":
            slots["resources"] = {platform.ray_resource: platform.device_count()}
        ray.init(
            address="local",
            namespace=f"roll-{self.mark}",
            num_cpus=usable_cores(),
            object_store_memory=_object_store_bytes(),
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.scratch / "ray"),
            **slots,
        )

    def _end_helpers(self) -> None:
        """Ray would ask each in turn by SIGTERM, to which they are deaf, and wait a second for each to end."""
        helpers, self._helpers = self._helpers, []
        _kill(helpers)

    def _watch(self) -> None:
        self.scratch.mkdir(mode=0o700)
        self._reaper = orphan_cleanup.watch_over(self.mark, self.scratch)

    def _set_environment(self, *, alone: bool) -> None:
        """What Ray reads when it is imported and started, and what its processes inherit. The user's settings stay."""
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Workers use the driver's interpreter as it is: do not resolve an environment anew for each of them.
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            # We say which devices a worker sees, also where it asks Ray for none.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # As many processes as there are cores would start, of which we need a few.
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
            # With a worker Ray would kill the trackers that unlink its shared memory. What it started ends with us.
            "RAY_kill_child_processes_on_worker_exit": "0",
            "RAY_process_group_cleanup_enabled": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            # Ray's default of 15 lets anything else on the host run before the workers.
            "RAY_worker_niceness": "0",
            # We say that a worker died, and in fewer words.
            "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing",
            "RAY_COLOR_PREFIX": "" if sys.stderr.isatty() else "0",
        }
        if alone:
            # Ray for one host, as on macOS and Windows: its processes listen on the loopback address only.
            settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        else:
            # Attempts to reach the user's Ray, 40 s each. With Ray's default of 20 a start blocks for 13 minutes.
            settings["RAY_gcs_server_port_wait_time_s"] = "1"
        env = {name: value for name, value in settings.items() if name not in os.environ}
        env[orphan_cleanup.MARK] = self.mark
        self._environment.make(env)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _check_reachable(address: str) -> None:
    """Raise `PlacementError` at once where Ray would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?(?P<host>.+?)\]?:(?P<port>\d+)", address)
    if match is None:
        return
    try:
        socket.create_connection((match["host"], int(match["port"])), timeout=REACH_S).close()
    except OSError as error:
        raise PlacementError(
            f"no Ray answers at RAY_ADDRESS={address}: {error}. Start it, mend RAY_ADDRESS, or unset it to let the run"
            " start a Ray of its own"
        ) from error


def _about_tokens(address: str) -> str:
    """`ray start` asks for tokens wherever it finds one, and a driver sends one only where it is told to."""
    if not address or "RAY_AUTH_MODE" in os.environ:
        return ""
    return (
        ". If `ray start` said there that token authentication is enabled, set RAY_AUTH_MODE=token for the run, too,"
        " and have the same token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _provide_secret() -> None:
    """Give Ray a secret, unless the user has one, so that it writes none into the user's home.

    It stays in the environment: Ray reads it once for each process, and a later instance must have the same.
    """
    default = Path.home() / ".ray" / "auth_token"
    if not ({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()) and not default.exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _scratch_directory(mark: str) -> Path:
    directory = Path(tempfile.gettempdir())
    return (directory if len(str(directory)) <= LONGEST_SCRATCH else Path("/tmp")) / f"roll-{mark}"


def _object_store_bytes() -> int:
    """At most half of what shared memory has: containers often give very little."""
    if not orphan_cleanup.SHM.is_dir():
        return OBJECT_STORE_BYTES
    return max(80 * 1024**2, min(OBJECT_STORE_BYTES, shutil.disk_usage(orphan_cleanup.SHM).free // 2))
