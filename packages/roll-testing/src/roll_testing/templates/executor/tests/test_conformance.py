"""The conformance tests of executors."""

from roll_testing import ExecutorConformance


class TestAcmeExecutor(ExecutorConformance):
    """`acme`, with two workers."""

    name = "acme"
