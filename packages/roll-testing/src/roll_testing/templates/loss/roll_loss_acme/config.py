"""Options of `acme`. Imports nothing heavy."""

from roll_core.spec.config import Config, PositiveFloat


class AcmeLossOptions(Config):
    """`pg_options` of `pg_variant: acme`."""

    cap: PositiveFloat = 2.0
    """Maximum importance ratio."""
