"""Configuration of `acme`. Imports nothing heavy."""

from roll_core.spec.config import Config


class AcmeTrackerConfig(Config):
    """`tracker_kwargs.acme`."""

    file: str = "acme.sqlite"
    """Database, in the run directory unless the path is absolute."""
