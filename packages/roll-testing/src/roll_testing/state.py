"""Test group *state*: save and resume, weight export, offload."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from roll_core.errors import UnsupportedError
from roll_core.plugins.targets import load_target
from roll_core.spec.model import LoraSpec
from roll_core.spec.train import TrainStrategy, WantedOutputs
from roll_testing.bench import Step
from roll_testing.bounds import BOUNDS, check_names, check_rows, check_same, check_same_run, distance
from roll_testing.losses import LOSSES, OF_TASK, SPLITS, TRAINING
from roll_testing.programs import (
    compute_while_away,
    export_after_steps,
    offload_and_measure,
    offload_between,
    publish,
    resume,
    save_between,
    train,
)
from roll_testing.publishing import IN_ONE_PROCESS
from roll_testing.reference import Reference, TransformersModel
from roll_testing.train_kit import TrainKit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import Task
    from roll_core.spec.train import StateKind
    from roll_core.types import Floats
    from roll_testing.bench import Arrays, Case
    from roll_testing.programs import MemoryUsed, Raised, Trained

PARTS: dict[str, tuple[StateKind, ...]] = {
    "weights": ("weights",),
    "grads": ("grads",),
    "optimizer": ("optimizer",),
    "all": ("weights", "grads", "optimizer"),
}
ASKED = {
    "causal_lm": ("logprobs", WantedOutputs(logprobs=True)),
    "value": ("values", WantedOutputs(values=True)),
    "reward": ("values", WantedOutputs(values=True)),
}
"""Output to compare for a model of each task."""
MOVED = 1e-4
"""Minimum relative distance by which two steps of adapters change the weights."""
RETURNED = 0.9
"""Minimum share of the bytes reported by `memory()` that offloading must free."""


class StateTests(TrainKit):
    """Comparisons are bit for bit, unless a test states another bound."""

    # -- save and load -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("done", [0, 2])
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, case: Case, world_size: int, done: int, tmp_path: Path
    ) -> None:
        """A resumed run must equal an uninterrupted one bit for bit, on the same number of ranks and under a schedule.

        Loading must discard what the strategy computed before. The deferred write that `save` returns is executed two
        steps later and must still contain the state that was saved.
        """
        self.need_training()
        training = replace(TRAINING, lr_scheduler_type="linear", warmup_steps=1, num_steps=9)
        case, steps = case.with_(training=training), self._steps(done + 2)
        straight = self.run(save_between, case, steps, done, str(tmp_path))
        resumed = self.run(resume, case, self._steps(1, seed=50), steps[done:], str(tmp_path))
        for rank, (trained, expected) in enumerate(zip(resumed, straight, strict=True)):
            check_same(f"weights of rank {rank}, loaded after {done} steps", trained.before, expected.before)
            check_same_run(f"rank {rank}, resumed after {done} steps,", trained, expected)

    def test_saving_changes_nothing(self, case: Case, world_size: int, tmp_path: Path) -> None:
        """Saving must not change the weights after the following steps."""
        self.need_training()
        case, steps = case.with_(training=TRAINING), self._steps(3)
        saved: Trained = self.run(save_between, case, steps, 1, str(tmp_path))[0]
        never: Trained = self.run(train, case, steps)[0]
        check_same("weights after a save", saved.after, never.after)

    # -- export --------------------------------------------------------------------------------------------------------

    def test_exported_weights_are_those_that_compute(self, case: Case, world_size: int, tmp_path: Path) -> None:
        """After two steps, the reference with the exported weights must compute the strategy's logprobs."""
        self.need_training()
        held, logprobs, _ = self._exported(case, "causal_lm", tmp_path)
        reference = self.reference(case)
        reference.take(held)
        expected = reference.by_sequence(self.batch(), WantedOutputs(logprobs=True))
        check_rows("logprobs by exported weights", logprobs, expected["logprobs"], BOUNDS["fp32"].outputs)

    def test_an_exported_model_is_loaded_by_transformers(
        self, case: Case, task: Task, world_size: int, tmp_path: Path
    ) -> None:
        """transformers must load the model that is exported after two steps.

        It must have the weights of `export_weights`, equal outputs and the same tokenizer. For tasks other than
        `causal_lm`, `export_model` may raise `UnsupportedError` instead.
        """
        self.need_training()
        if load_target(self.provider.target, owner=self.name).export_model is TrainStrategy.export_model:
            pytest.skip(f"{self.name} does not implement export_model")
        held, outputs, error = self._exported(case, task, tmp_path)
        if error is not None:
            if error.is_a(UnsupportedError) and task != "causal_lm":
                return
            raise AssertionError(f"export_model raised {error}")
        loaded = Reference(TransformersModel(replace(case.model, path=str(tmp_path))), task)
        weights = loaded.weights()
        check_same("weights of the exported model", weights, {name: held[name] for name in weights if name in held})
        output, want = ASKED[task]
        expected = loaded.by_sequence(self.batch(), want)[output]
        check_rows(f"{output} of the exported model", outputs, expected, BOUNDS["fp32"].outputs)
        _same_tokenizer(tmp_path, case.model.tokenizer or case.model.path)

    def test_adapters_are_merged_on_export(self, case: Case, world_size: int, tmp_path: Path) -> None:
        """After two steps with LoRA on every linear layer, exported weights must differ from the initial ones.

        The reference with the exported weights must compute the strategy's logprobs. With `WantedOutputs.base`, the
        strategy must compute the logprobs of the untrained model.
        """
        self.need_training()
        self.need(self.can.lora, "lora")
        adapters = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)
        case = case.with_(model=replace(case.model, lora=adapters))
        held, logprobs, _ = self._exported(case, "causal_lm", tmp_path)
        _, found_base, _ = self._exported(case, "causal_lm", tmp_path, base=True)
        reference, want = self.reference(case), WantedOutputs(logprobs=True)
        untrained = reference.by_sequence(self.batch(), want)["logprobs"]
        check_rows("logprobs without adapters", found_base, untrained, BOUNDS["fp32"].outputs)
        assert distance(held, reference.weights()) >= MOVED, (
            "two steps with adapters hardly changed the exported weights"
        )
        reference.take(held)
        trained = reference.by_sequence(self.batch(), want)["logprobs"]
        check_rows("logprobs by merged weights", logprobs, trained, BOUNDS["fp32"].outputs)

    @pytest.mark.parametrize("transport", IN_ONE_PROCESS)
    def test_a_receiver_gets_the_published_weights(self, case: Case, world_size: int, transport: str) -> None:
        """After each of two steps, the digests of a receiver must equal those of the exported weights.

        The second publish must differ from the first.
        """
        self.need_training()
        self.need(transport in self.can.weight_transports, f"the transport {transport}")
        answers = self.run(publish, case.with_(training=TRAINING), self._steps(2), transport)
        (sent,) = [answer for answer in answers if answer]
        for version, (held, exported) in enumerate(sent, 1):
            check_names(held, exported)
            if odd := sorted(name for name in exported if held[name] != exported[name]):
                raise AssertionError(f"version {version}: {odd[0]} of the receiver is not the exported one")
        assert sent[0][0] != sent[1][0], "the second publish had the weights of the first, despite a step between them"

    # -- offload -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("parts", PARTS)
    def test_offload_and_onload_change_no_number(self, case: Case, world_size: int, parts: str) -> None:
        """Offload and onload must not change any number.

        They run before each step, and between backward and the optimizer step.
        """
        self.need_training()
        self.need(self.can.offload, "offload")
        case, steps = case.with_(training=TRAINING), self._steps(2)
        moved: Trained = self.run(offload_between, case, steps, PARTS[parts])[0]
        check_same_run(f"steps with {parts} moved away and back", moved, self.run(train, case, steps)[0])

    @pytest.mark.parametrize("trained", ["a model", "adapters"])
    def test_weights_alone_compute_and_are_exported(self, case: Case, world_size: int, trained: str) -> None:
        """With gradients and optimizer offloaded, outputs and exported weights must stay the same bit for bit.

        Every publish to an engine on the same slots happens in this state. The test uses bf16 or fp16 if supported.
        """
        self.need_training()
        self.need(self.can.offload, "offload")
        dtype = next((dtype for dtype in ("bf16", "fp16") if dtype in self.dtypes()), "fp32")
        model = replace(case.model, dtype=dtype)
        if trained == "adapters":
            self.need(self.can.lora, "lora")
            model = replace(model, lora=LoraSpec(targets=("all-linear",), rank=4, alpha=8.0))
        case = case.with_(training=TRAINING, model=model)
        answers = self.run(compute_while_away, case, self._steps(1)[0], self.batch(), WantedOutputs(logprobs=True))
        for rank, ((rows, held), (rows_away, held_away)) in enumerate(answers):
            check_same(f"weights of rank {rank} while the optimizer is away", held_away, held)
            for name, away in rows_away.items():
                check_rows(f"{name} of rank {rank} while the optimizer is away", away, rows[name], 0.0)

    @pytest.mark.parametrize("parts", ["optimizer", "all"])
    def test_offload_frees_memory(
        self, case: Case, models: Callable[[str], ModelSpec], world_size: int, parts: str
    ) -> None:
        """Offloading must free at least 90 % of the bytes that `memory()` reports for the parts.

        `onload` must use them again. The platform counts the bytes. Skipped if slots have no memory of their own.
        """
        self.need_training()
        self.need(self.can.offload, "offload")
        platform = self.platform_here()
        if platform.slots_share_cores:
            pytest.skip(f"slots of platform {platform.name} have no memory of their own")
        large = case.with_(training=TRAINING, model=models("large"))
        used: Sequence[MemoryUsed] = self.run(offload_and_measure, large, self._steps(1)[0], PARTS[parts])
        for rank, memory in enumerate(used):
            assert memory.held > 0, f"memory() of rank {rank} has no bytes for {parts}"
            assert memory.before - memory.away >= RETURNED * memory.held, (
                f"rank {rank}: {parts} have {memory.held:,} bytes, but offload freed only"
                f" {memory.before - memory.away:,}: something still references them"
            )
            assert memory.back - memory.away >= RETURNED * memory.held, (
                f"rank {rank}: onload allocated only {memory.back - memory.away:,} of {memory.held:,} bytes"
            )

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _steps(self, number: int, seed: int = 0) -> list[Step]:
        return [
            Step(sequences=self.batch(seed + i), loss=LOSSES["sft"], split=SPLITS["three at a time"])
            for i in range(number)
        ]

    def _exported(
        self, case: Case, task: Task, folder: Path, *, base: bool = False
    ) -> tuple[Arrays, dict[str, Floats], Raised | None]:
        """Run two steps.

        Return exported weights, outputs of the model (or of its base), and the error of `export_model`.
        """
        steps = [replace(step, loss=OF_TASK[task]) for step in self._steps(2)]
        output, want = ASKED[task]
        want = replace(want, base=base)
        answers = self.run(export_after_steps, case.with_(training=TRAINING), steps, self.batch(), want, str(folder))
        by_sequence: dict[str, Floats] = {}
        for _, rows, _ in answers:
            by_sequence |= rows.get(output, {})
        held: Arrays = next(weights for weights, _, _ in answers if weights)
        return held, by_sequence, next((error for _, _, error in answers if error is not None), None)


def _same_tokenizer(exported: Path, source: str) -> None:
    """Fail unless both tokenizers have the same tokens when transformers loads them."""
    from transformers import AutoTokenizer

    vocabulary, expected = (AutoTokenizer.from_pretrained(place).get_vocab() for place in (str(exported), source))
    assert vocabulary == expected, (
        f"the tokenizer beside the exported model has {len(vocabulary)} tokens, not those of {source}"
    )
