"""ROLL's platform `sim`: simulated devices in the host's memory, for tests of device code."""

import logging
import os

failure = ""
"""Why torch could not load this process's devices. The probe reports it: a run then ends before it starts."""


def autoload() -> None:
    """Register the simulated devices of the environment with torch, which calls this when it is imported.

    Does nothing, and imports nothing, unless `ROLL_SIM_DEVICES` is set. Failures are logged.
    """
    global failure
    if os.environ.get("ROLL_SIM_DEVICES", "0") == "0":
        return
    from roll_core.errors import RollError
    from roll_platform_sim.device import register

    try:
        register()
    except RollError as error:
        failure = str(error)
        logging.getLogger(__name__).error("no simulated devices: %s", error)
