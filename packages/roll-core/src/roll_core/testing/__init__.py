"""For the tests of plugins and of the core: the conformance kit, its reference, tiny models, and processes as ranks."""

from roll_core.testing.bench import Case, Split, Step
from roll_core.testing.conformance import TrainStrategyConformance
from roll_core.testing.ranks import RankHost, RanksFailedError
from roll_core.testing.reference import ReferenceModel, TransformersModel

__all__ = [
    "Case",
    "RankHost",
    "RanksFailedError",
    "ReferenceModel",
    "Split",
    "Step",
    "TrainStrategyConformance",
    "TransformersModel",
]
