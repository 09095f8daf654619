"""The conformance kit, on simulated devices."""

from typing import ClassVar

from sim_process import ENVIRONMENT

from roll_testing import PlatformConformance


class TestSim(PlatformConformance):
    name = "sim"
    environment: ClassVar = ENVIRONMENT
