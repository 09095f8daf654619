"""The conformance kit. On a host with the devices it also computes on them."""

from roll_testing import PlatformConformance


class TestCuda(PlatformConformance):
    name = "cuda"
