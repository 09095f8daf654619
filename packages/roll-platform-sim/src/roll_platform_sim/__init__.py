"""ROLL's platform `sim`: simulated accelerators in the host's memory, for tests of device code."""
