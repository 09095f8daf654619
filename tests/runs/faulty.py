"""A plugin whose parts are wrong, each in the way that its config says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from roll_core.builtin.cpu import CpuPlatform
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.spec.hooks import hookimpl
from roll_core.spec.pipeline import Tracker
from roll_core.spec.providers import (
    AdvantageProvider,
    InferProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
    TrackerProvider,
    TrainProvider,
)
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_infer_hf.plugin import CAPABILITIES
from roll_strategy_hf.plugin import HF_TRAIN
from roll_strategy_hf.train import HFTrainStrategy

ROLL_HOOK_API = 1


class FaultyEngineConfig(HFInferConfig):
    """As the embedded engine's."""

    fault: Literal["few", "list", "nan", "raise", "receipt"]


class FaultyEngine(HFInferStrategy):
    async def generate(self, request):
        found = await super().generate(request)
        if self.config.fault == "raise":
            raise KeyError("boom")
        if self.config.fault == "few":
            return replace(found, outputs=found.outputs[:-1])
        first = found.outputs[0]
        wrong = first.logprobs.tolist() if self.config.fault == "list" else np.full_like(first.logprobs, np.nan)
        return replace(found, outputs=(replace(first, logprobs=wrong), *found.outputs[1:]))

    async def update_weights(self, *args, **given):
        receipt = await super().update_weights(*args, **given)
        return None if self.config.fault == "receipt" else receipt


class FaultyTrain(HFTrainStrategy):
    def optimizer_step(self):
        raise KeyError("boom")


class FaultyPipeline(RLVRPipeline):
    def prepare(self, run):
        raise KeyError("boom")


class ForgetfulPipeline(RLVRPipeline):
    def roles(self):
        return [role for role in super().roles() if role.kind != "reward"]


class UncountedPipeline(RLVRPipeline):
    def prepare(self, run):
        super().prepare(run)


class NumpyPipeline(RLVRPipeline):
    def state(self):
        return {**super().state(), "best": np.float32(1.0)}


class LoggingPipeline(RLVRPipeline):
    async def evaluate(self, run):
        run.log({"val/odd": 1.0 + run.step})


class FaultyTracker(Tracker):
    def log(self, step, metrics):
        raise KeyError("boom")

    def close(self):
        pass


class FaultyPlatform(CpuPlatform):
    name = "faulty"

    def environment(self, kind, local_indices):
        raise KeyError("boom")


def faulty_estimator(*args, **given):
    raise KeyError("boom")


def faulty_loss(*args, **given):
    raise KeyError("boom")


@hookimpl
def roll_run_started(run):
    if run.config.exp_name == "faulty_hook":
        raise KeyError("boom")


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    yield TrainProvider(
        name="faulty_train",
        target="roll_faulty:FaultyTrain",
        config="roll_strategy_hf.config:HFTrainConfig",
        summary="Raises",
        capabilities=HF_TRAIN.capabilities,
    )


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    for name, target in (
        ("faulty_pipeline", "FaultyPipeline"),
        ("forgetful_pipeline", "ForgetfulPipeline"),
        ("logging_pipeline", "LoggingPipeline"),
        ("uncounted_pipeline", "UncountedPipeline"),
        ("numpy_pipeline", "NumpyPipeline"),
    ):
        yield PipelineProvider(
            name=name,
            target=f"roll_faulty:{target}",
            config="roll_core.pipelines.config:RLVRConfig",
            summary="Raises",
        )


@hookimpl
def roll_trackers() -> Iterator[TrackerProvider]:
    yield TrackerProvider(name="faulty_tracker", target="roll_faulty:FaultyTracker", summary="Raises")


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    yield PlatformProvider(name="faulty", target="roll_faulty:FaultyPlatform", summary="Raises", priority=-1)


@hookimpl
def roll_advantage_estimators() -> Iterator[AdvantageProvider]:
    yield AdvantageProvider(name="faulty_estimator", target="roll_faulty:faulty_estimator", summary="Raises")


@hookimpl
def roll_policy_losses() -> Iterator[PolicyLossProvider]:
    yield PolicyLossProvider(name="faulty_loss", target="roll_faulty:faulty_loss", summary="Raises")


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    yield InferProvider(
        name="faulty_engine",
        target="roll_faulty:FaultyEngine",
        config="roll_faulty:FaultyEngineConfig",
        summary="Returns what is no completion",
        capabilities=CAPABILITIES,
    )
