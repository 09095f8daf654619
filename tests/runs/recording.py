"""A plugin whose strategies write down what is asked of them, and refuse what cannot be done with what they have.

They are the built-in ones otherwise, so that runs really train.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pydantic import Field

from roll_core.builtin.cpu import CpuPlatform
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferProvider, PlatformProvider, TrainProvider
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_infer_hf.plugin import CAPABILITIES
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.plugin import HF_TRAIN
from roll_strategy_hf.train import HFTrainStrategy

ROLL_HOOK_API = 1


class TrainConfig(HFTrainConfig):
    journal: str = Field(default="")


class InferConfig(HFInferConfig):
    journal: str = Field(default="")


def note(path: str, line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{line}\n".encode())
    os.close(file)


class RecordingTrain(HFTrainStrategy):
    away: frozenset[str] = frozenset()

    def _does(self, what: str, *needs: str) -> None:
        if missing := self.away.intersection(needs):
            raise AssertionError(f"{self._mesh.role} {what}: {missing} are away")
        if self._mesh.rank == 0:
            note(self.config.journal, f"{self._mesh.role} {what}")

    def forward_all(self, micros, want) -> Iterator:
        self._does("scores", "weights")
        return super().forward_all(micros, want)

    def forward_backward(self, micros, loss) -> list:
        self._does("trains", "weights", "grads", "optimizer")
        return super().forward_backward(micros, loss)

    def export_weights(self) -> Iterator:
        self._does("exports", "weights")
        return super().export_weights()

    def export_model(self, path) -> None:
        self._does("exports a model", "weights", "grads", "optimizer")
        super().export_model(path)

    def save(self, path) -> None:
        self._does("saves", "weights", "grads", "optimizer")
        self._quietly("save", path)

    def load(self, path) -> None:
        self._does("loads", "weights", "grads", "optimizer")
        self._quietly("load", path)

    def _quietly(self, method: str, path) -> None:
        """What the built-in strategy exports in order to save is not worth a line."""
        does, self._does = self._does, lambda *what: None
        getattr(super(), method)(path)
        self._does = does

    def offload(self, parts) -> None:
        self._does(f"offloads {'+'.join(parts)}")
        self.away |= set(parts)
        super().offload(parts)

    def onload(self, parts) -> None:
        self._does(f"onloads {'+'.join(parts)}")
        self.away -= set(parts)
        super().onload(parts)


class RecordingEngine(HFInferStrategy):
    awake = True

    def _does(self, what: str) -> None:
        if not self.awake and what not in ("wakes", "sleeps"):
            raise AssertionError(f"{self._mesh.role} {what} in its sleep")
        if self._mesh.rank == 0:
            note(self.config.journal, f"{self._mesh.role} {what}")

    async def generate(self, request):
        self._does("generates")
        return await super().generate(request)

    async def update_weights(self, version, manifest, tensors: Iterable, *, shared=False):
        self._does("is updated")
        return await super().update_weights(version, manifest, tensors, shared=shared)

    async def sleep(self) -> None:
        self._does("sleeps")
        self.awake = False
        await super().sleep()

    async def wake(self) -> None:
        self._does("wakes")
        self.awake = True
        await super().wake()


class Board(CpuPlatform):
    """A CPU that says that its slots have memory of their own."""

    name = "board"
    slots_share_cores = False

    def device_count(self) -> int:
        return 3


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    yield PlatformProvider(name="board", target="roll_recording:Board", summary="A CPU by another name", priority=-1)


@hookimpl
def roll_train_strategies() -> Iterator[TrainProvider]:
    for name, forward_only in (("recording_train", False), ("recording_infer", True)):
        yield TrainProvider(
            name=name,
            target="roll_recording:RecordingTrain",
            config="roll_recording:TrainConfig",
            summary="Writes down what is asked of it",
            capabilities=HF_TRAIN.capabilities,
            forward_only=forward_only,
        )
    yield TrainProvider(
        name="still_train",
        target="roll_recording:RecordingTrain",
        config="roll_recording:TrainConfig",
        summary="Says that it cannot move anything",
        capabilities=replace(HF_TRAIN.capabilities, offload=False),
    )


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    yield InferProvider(
        name="recording_engine",
        target="roll_recording:RecordingEngine",
        config="roll_recording:InferConfig",
        summary="Writes down what is asked of it",
        capabilities=CAPABILITIES,
    )
