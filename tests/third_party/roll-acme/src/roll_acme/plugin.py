"""What Acme offers. Imports nothing heavy."""

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import (
    AdvantageProvider,
    InferCapabilities,
    InferProvider,
    PipelineProvider,
    PlatformProvider,
    RewardProvider,
    TrainCapabilities,
    TrainProvider,
)

ROLL_HOOK_API = 1
TRAIN = TrainCapabilities(dtypes=("fp32",), weight_transports=("shared", "shm", "collective"))
INFER = InferCapabilities(dtypes=("fp32",), free_seeds=True, weight_transports=("shared", "shm", "collective"))


@hookimpl
def roll_platforms():
    yield PlatformProvider(
        name="acme_board", target="roll_acme.platform:AcmeBoard", summary="Acme's board", priority=-1
    )


@hookimpl
def roll_train_strategies():
    yield TrainProvider(
        name="acme_train",
        target="roll_acme.bigram:BigramTrainStrategy",
        config="roll_acme.config:AcmeConfig",
        summary="A bigram table, trained",
        capabilities=TRAIN,
        platforms=("acme_board",),
    )


@hookimpl
def roll_infer_strategies():
    yield InferProvider(
        name="acme_infer",
        target="roll_acme.bigram:BigramInferStrategy",
        config="roll_acme.config:AcmeConfig",
        summary="A bigram table, sampled",
        capabilities=INFER,
    )


@hookimpl
def roll_pipelines():
    yield PipelineProvider(
        name="acme_bandit",
        target="roll_acme.pipeline:BanditPipeline",
        config="roll_acme.config:BanditConfig",
        summary="REINFORCE with the batch's mean as baseline",
    )


@hookimpl
def roll_rewards():
    yield RewardProvider(
        name="acme_share",
        target="roll_acme.reward:ShareOfLetter",
        config="roll_acme.config:ShareConfig",
        summary="Share of one letter in the answer",
    )


@hookimpl
def roll_advantage_estimators():
    yield AdvantageProvider(
        name="acme_relative",
        target="roll_acme.credit:relative_to_group",
        summary="Reward relative to the other samples of the prompt",
        needs_groups=True,
        normalise="group",
    )


@hookimpl
def roll_run_finished(run, error):
    (run.dir / "acme.txt").write_text("failed" if error else "fine", encoding="utf-8")
