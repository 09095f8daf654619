"""Known errors of Ray, each with its cause in a run and a remedy."""

from __future__ import annotations

from roll_core.spec.diagnostics import KnownError

KNOWN_ERRORS = (
    KnownError(
        id="ray_start",
        pattern=r"node timed out during startup|Failed to (connect to|start) (GCS|the dashboard|Ray)"
        r"|Could not find any running Ray instance|ray\.init\(\) timed out",
        cause="Ray did not start, or nothing accepts connections at the configured address.",
        remedy="run `roll-core doctor`; unset RAY_ADDRESS so that the run starts its own Ray, or start one (`ray"
        " start --head`); remove the remains of a killed Ray (`ray stop --force`, /tmp/ray)",
    ),
)
