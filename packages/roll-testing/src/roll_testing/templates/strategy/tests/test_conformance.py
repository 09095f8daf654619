"""The conformance tests of train strategies: outputs, gradients, steps, checkpoints and exports."""

from roll_testing import TrainStrategyConformance


class TestAcmeStrategy(TrainStrategyConformance):
    """`acme` compared with plain torch and transformers."""

    name = "acme"
    preload = (*TrainStrategyConformance.preload, "roll_strategy_acme.strategy")
