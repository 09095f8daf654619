"""The conformance tests of platforms, which run without a device too."""

from roll_testing import PlatformConformance


class TestAcmePlatform(PlatformConformance):
    """`acme` on this host."""

    name = "acme"
