"""The conformance tests of environments, with replies that solve an episode."""

import random

from roll_core.spec.providers import EnvironmentProvider
from roll_testing import EnvironmentConformance, PackagingConformance


class TestAcmeEnvironment(EnvironmentConformance):
    """`acme` with its default configuration."""

    name = "acme"

    def replies(self, seed):
        """A wrong guess, then the number of this seed."""
        number = random.Random(seed).randint(0, 31)
        return [str((number + 1) % 32), f"Then it is {number}"]


class TestAcmePackage(PackagingConformance, kind=EnvironmentProvider):
    """Its record, its configuration and its imports."""

    name = "acme"
