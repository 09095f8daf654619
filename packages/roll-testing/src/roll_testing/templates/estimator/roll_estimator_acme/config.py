"""Options of `acme`. Imports nothing heavy."""

from roll_core.spec.config import Config, PositiveFloat


class AcmeEstimatorOptions(Config):
    """`adv_options` of `adv_estimator: acme`."""

    scale: PositiveFloat = 1.0
    """Factor on the advantages."""
