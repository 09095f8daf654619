"""The conformance tests of weight transports."""

from roll_testing import WeightTransportConformance


class TestAcmeTransport(WeightTransportConformance):
    """`acme`, with both endpoints in this process."""

    name = "acme"
