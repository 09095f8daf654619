"""ROLL's platform `sim`: simulated devices in the host's memory, for tests of device code."""

import os


def autoload() -> None:
    """Register the simulated devices of the environment with torch, which calls this when it is imported.

    Does nothing, and imports nothing, unless `ROLL_SIM_DEVICES` is set.
    """
    if os.environ.get("ROLL_SIM_DEVICES", "0") != "0":
        from roll_platform_sim.device import register

        register()
