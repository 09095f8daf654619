"""What holds for all tests."""

from __future__ import annotations

import os

# Under `uv run pytest` Ray would give every worker an environment resolved anew, from a copy of the working directory.
# It reads this once, when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
