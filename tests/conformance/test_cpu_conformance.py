"""The built-in platform passes the kit, computing included."""

from roll_testing import PlatformConformance


class TestCpu(PlatformConformance):
    name = "cpu"
