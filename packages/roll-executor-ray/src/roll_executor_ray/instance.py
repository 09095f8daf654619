"""Connection to Ray: the user's instance if there is one, otherwise a private one.

Ray is the user's if this process is already connected, or if `RAY_ADDRESS` is set. A private instance accepts only
clients that know its secret, and keeps its files in its own scratch directory. It ends with the executor, or with the
driver, however the driver exits.

SIGTERM and SIGHUP must not reach Ray and the workers, even if every process of a group or job receives them, as from a
closed terminal. Only the driver handles them: it ends the step in progress, for which it needs its workers, and then
Ray.

    driver ── starts, with both blocked ─────► Ray's processes ──► workers' processes: they inherit the block
                                                                       └─ `ignore_stop_signals`: ignore both, and lift
                                                                          the block, which children would inherit
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
from roll_core.runtime.cluster.platform import EnvironmentChange
from roll_executor_ray import orphan_cleanup

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Iterator

    from roll_core.spec.platform import Platform

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 512 * 1024**2
"""Object store of a private instance. Weights do not pass through it, only batches and their results."""
REACH_S = 10.0
"""Seconds to connect to the user's Ray."""
START_ATTEMPTS = 3
TOO_SLOW = "node timed out during startup"
"""Ray's message if its daemon takes more than 30 s to register. That limit cannot be configured."""
STATE_KEEPERS = ("gcs_server", "raylet")
"""Ray processes that a driver needs in order to disconnect cleanly."""
LONGEST_SCRATCH = 25
"""Maximum bytes of the temporary directory's path.

Ray puts sockets below its directory, and the path of a socket has at most 107 bytes. Of these, `roll-XXXXXXXX` and
Ray's own part have up to 82, with process ids of seven digits.
"""


class RayInstance:
    """Connects to Ray or starts it, and undoes exactly that."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.mark = secrets.token_hex(4)
        self.scratch = _scratch_directory(self.mark)
        self.single_host = False
        """True for a private instance, which has only this host."""
        self._connected_by_us = False
        self._gcs: psutil.Process | None = None
        """Control service (GCS) of a private instance."""
        self._helpers: list[psutil.Process] = []
        """Auxiliary processes of a private instance: logs and monitors."""
        self._reaper: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        """Descriptor of the lock by which other runs know that the scratch directory is in use."""
        self._environment = EnvironmentChange()

    @property
    def gcs_exited(self) -> bool:
        """True if the control service of a private instance exited. Ray ends this process 60 s later."""
        if self._gcs is None:
            return False
        try:
            return bool(self._gcs.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    @property
    def is_open(self) -> bool:
        """True if Ray is connected."""
        return self._reaper is not None and "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())

    def open(self) -> None:
        """Connect to Ray or start it. Blocks.

        Call it from a thread that lives as long as the instance: Ray makes Linux end its processes together with the
        thread that started them. Raises `PlacementError`.
        """
        address = os.environ.get("RAY_ADDRESS", "")
        if address == "local":  # as in `ray.init`: a Ray of this process's own
            address = ""
        _check_reachable(address)
        orphan_cleanup.remove_abandoned(self.scratch.parent)
        self.scratch.mkdir(mode=0o700)
        self._lock = orphan_cleanup.lock(self.scratch)
        with stop_signals_blocked_in_children():
            self._reaper = orphan_cleanup.start_reaper(self.mark, self.scratch)
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
                with stop_signals_blocked_in_children():
                    self._start()
        except Exception as error:  # Ray raises many exception types
            what = f"connecting to Ray at RAY_ADDRESS={address}" if address else "starting Ray on this host"
            raise PlacementError(f"{what} failed: {error}{_token_hint(address)}") from error
        finally:
            # Other processes that the driver starts do not belong to this instance.
            del os.environ[orphan_cleanup.MARK]
            if sigterm is not None:
                signal.signal(signal.SIGTERM, sigterm)

    def close(self) -> None:
        """Disconnect, end the private instance, and clean up. Blocks; may be called several times."""
        if self._connected_by_us:
            import ray

            self._connected_by_us = False
            self._gcs = None
            # Ray itself would send them SIGTERM, which they ignore, and wait a second for each.
            helpers, self._helpers = self._helpers, []
            _kill(helpers)
            ray.shutdown()
        if self._reaper is not None:
            left = orphan_cleanup.sweep(self.mark, self.scratch)
            if left:
                log.debug("killed %d remaining processes", left)
            orphan_cleanup.stop_reaper(self._reaper)
            self._reaper = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._environment.undo()

    def _start(self) -> None:
        before = set(psutil.Process().children())
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                self._start_once()
                break
            except Exception as error:  # Ray has no exception type for it
                if TOO_SLOW not in str(error) or not attempts_left:
                    raise
                log.warning("Ray did not start within its 30 s, probably because the host is busy; starting it again")
                _kill(set(psutil.Process().children()) - before)
        started = set(psutil.Process().children()) - before
        living = (process for process in started if process.status() != psutil.STATUS_ZOMBIE)
        self._gcs = next((process for process in living if process.name() == "gcs_server"), None)
        self._helpers = [process for process in started if process.name() not in STATE_KEEPERS]

    def _start_once(self) -> None:
        import ray

        _provide_secret()
        platform = self._platform
        slots: dict[str, Any] = {}
        if platform.resource_name == "GPU":
            slots["num_gpus"] = platform.device_count()
        elif platform.resource_name != "CPU":
            slots["resources"] = {platform.resource_name: platform.device_count()}
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

    def _set_environment(self, *, alone: bool) -> None:
        """Set the variables that Ray reads at import and start, and that its processes inherit.

        The user's settings win.
        """
        settings = {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Workers use the driver's interpreter as it is: do not resolve an environment for each of them.
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            # ROLL sets the devices that a worker sees, even if it requests none from Ray.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Otherwise Ray starts one process per core, of which ROLL needs only a few.
            "RAY_prestart_worker_first_driver": "0",
            "RAY_enable_worker_prestart": "0",
            # Otherwise Ray kills, with a worker, the trackers that unlink its shared memory. ROLL ends these processes
            # itself.
            "RAY_kill_child_processes_on_worker_exit": "0",
            "RAY_process_group_cleanup_enabled": "0",
            "RAY_SCHEDULER_EVENTS": "0",
            # Ray's default niceness of 15 lets any other process on the host run before the workers.
            "RAY_worker_niceness": "0",
            # ROLL reports exits of workers itself, in fewer words.
            "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed while executing",
            "RAY_COLOR_PREFIX": "" if sys.stderr.isatty() else "0",
        }
        if alone:
            # Single-host Ray, as on macOS and Windows: its processes listen only on the loopback address.
            settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        else:
            # Attempts to connect to the user's Ray, 40 s each. With Ray's default of 20 a start blocks for 13 minutes.
            settings["RAY_gcs_server_port_wait_time_s"] = "1"
        env = {name: value for name, value in settings.items() if name not in os.environ}
        env[orphan_cleanup.MARK] = self.mark
        self._environment.make(env)


@contextlib.contextmanager
def stop_signals_blocked_in_children() -> Iterator[None]:
    """Block both signals in processes that this thread starts within the `with` statement, and in their descendants."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _check_reachable(address: str) -> None:
    """Raise `PlacementError` at once if no Ray listens at `address`; Ray itself would retry for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?(?P<host>.+?)\]?:(?P<port>\d+)", address)
    if match is None:
        return
    try:
        socket.create_connection((match["host"], int(match["port"])), timeout=REACH_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: invalid port or host name
        raise PlacementError(
            f"no Ray is reachable at RAY_ADDRESS={address}: {error}. Start it, correct RAY_ADDRESS, or unset it to let"
            " the run start its own Ray"
        ) from error


def _token_hint(address: str) -> str:
    """Hint about token authentication, for the error message of a failed connection.

    `ray start` requires tokens wherever it finds one, but a driver sends one only if `RAY_AUTH_MODE` is set.
    """
    if not address or "RAY_AUTH_MODE" in os.environ:
        return ""
    return (
        ". If `ray start` printed that token authentication is enabled, set RAY_AUTH_MODE=token for the run too, with"
        " the same token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    )


def _provide_secret() -> None:
    """Set a secret for Ray unless the user has one, so that Ray writes none into the user's home.

    It stays in the environment: Ray reads it once per process, and a later instance must use the same one.
    """
    default = Path.home() / ".ray" / "auth_token"
    if not ({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()) and not default.exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _scratch_directory(mark: str) -> Path:
    directory = Path(tempfile.gettempdir())
    return (directory if len(os.fsencode(directory)) <= LONGEST_SCRATCH else Path("/tmp")) / f"roll-{mark}"


def _object_store_bytes() -> int:
    """Size of the object store: at most half of the free shared memory, of which containers often have little."""
    if not orphan_cleanup.SHM.is_dir():
        return OBJECT_STORE_BYTES
    return max(80 * 1024**2, min(OBJECT_STORE_BYTES, shutil.disk_usage(orphan_cleanup.SHM).free // 2))
