"""What holds for all tests, of the core and of the plugins."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Under `uv run pytest` Ray would give every worker an environment resolved anew, from a copy of the working directory.
# It reads this once, when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# How long an example takes says how busy the host is. What else is set, as by Hypothesis itself under CI, stays.
settings.register_profile("untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
