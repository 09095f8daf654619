"""The platforms of roll-wrong under the kit."""

from __future__ import annotations

from roll_wrong.plugin import PLATFORMS

from roll_testing import PlatformConformance

for _name in PLATFORMS:
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (PlatformConformance,), {"name": _name})
