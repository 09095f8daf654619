"""Test group *portable state*: any strategy can resume from the state that another strategy exported.

Each strategy is compared with plain torch in both directions, so any two of them are compatible.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from roll_core.errors import CheckpointError
from roll_core.spec.model import LoraSpec
from roll_modeling.model import DTYPES
from roll_modeling.portable_files import KINDS, opened_portable_state, write_portable_state
from roll_testing.bench import Step, as_array
from roll_testing.bounds import BOUNDS, check_names, check_near, check_same_run, distance
from roll_testing.losses import LOSSES, OF_TASK, SPLITS, TRAINING
from roll_testing.programs import expect, export_between, go_on, import_foreign, train
from roll_testing.train_kit import TrainKit

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.spec.providers import Task
    from roll_testing.bench import Arrays, Case
    from roll_testing.programs import Trained

SCHEDULED = replace(TRAINING, lr_scheduler_type="linear", warmup_steps=1, num_steps=9)
ROUNDING = 1e-6
"""Allowed relative distance between a resumed and an uninterrupted run, after two steps in fp32."""
DONE = 2


class PortableTests(TrainKit):
    """Tests of strategies that declare `portable_state`."""

    def test_a_portable_state_equals_the_references(
        self, case: Case, task: Task, world_size: int, tmp_path: Path
    ) -> None:
        """After two steps, the exported step count, master weights and moments must equal those of plain torch."""
        steps = self._steps_of(DONE, task)
        state, step_count, _ = self._exported_state(case, steps, tmp_path)
        reference = self.reference(case)
        for _ in reference.train(SCHEDULED, steps):
            pass
        assert step_count == DONE, f"after {DONE} steps the exported state is that of step {step_count}"
        for kind, expected in reference.state().items():
            check_near(f"exported {kind}", state[kind], expected, BOUNDS["fp32"].steps)

    def test_a_run_resumes_from_the_references_state(self, case: Case, world_size: int, tmp_path: Path) -> None:
        """A run must resume from a state that plain torch exported after two steps.

        Gradient norms, learning rates and weights of two more steps must equal torch's. What the strategy computed
        before the import must not matter.
        """
        self._need_portable()
        steps, reference = self._steps_of(DONE + 2), self.reference(case)
        training = reference.train(SCHEDULED, steps)
        for _ in range(DONE):
            next(training)
        write_portable_state(reference.portable_state(DONE), case.model, tmp_path, leads=True)
        before = reference.weights()
        expected = list(training)
        answers = self.run(
            go_on, case.with_(training=SCHEDULED), self._steps_of(1, seed=50), steps[DONE:], str(tmp_path)
        )
        for rank, trained in enumerate(answers):
            for step, (one, other) in enumerate(zip(trained.stats, expected, strict=True), DONE + 1):
                for name in ("grad_norm", "learning_rate"):
                    assert np.isclose(getattr(one, name), getattr(other, name), rtol=BOUNDS["fp32"].steps), (
                        f"step {step} of rank {rank} was {one}, expected {other}"
                    )
            if trained.data_rank.leader:
                moved, due = (_way(after, before) for after in (trained.after, reference.weights()))
                check_near(f"the change of the weights of rank {rank}", moved, due, BOUNDS["fp32"].steps)

    @pytest.mark.parametrize("trained", ["a model", "adapters", "nothing yet"])
    def test_a_run_resumes_from_its_own_portable_state(
        self, case: Case, world_size: int, trained: str, tmp_path: Path
    ) -> None:
        """A run resumed from its own portable state must equal an uninterrupted one within 1e-6.

        This includes a state exported before the first step, and LoRA.
        """
        self._need_portable()
        if trained == "adapters":
            self.need(self.can.lora, "lora")
            adapters = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)
            case = case.with_(model=replace(case.model, lora=adapters))
        case, done = case.with_(training=SCHEDULED), 0 if trained == "nothing yet" else DONE
        steps = self._steps_of(done + 2)
        straight = self.run(export_between, case, steps, done, str(tmp_path))
        resumed = self.run(go_on, case, self._steps_of(1, seed=50), steps[done:], str(tmp_path))
        for rank, (continued, expected) in enumerate(zip(resumed, straight, strict=True)):
            _check_continued(f"rank {rank}, continued after {done} steps", continued, expected)

    def test_exporting_the_state_changes_nothing(self, case: Case, world_size: int, tmp_path: Path) -> None:
        """Exporting the state must not change the following steps, bit for bit."""
        self._need_portable()
        case, steps = case.with_(training=TRAINING), self._steps_of(3)
        exported: Trained = self.run(export_between, case, steps, 1, str(tmp_path))[0]
        never: Trained = self.run(train, case, steps)[0]
        check_same_run("steps after an export", exported, replace(never, stats=never.stats[1:]))

    def test_masters_keep_what_lower_precision_rounds_away(
        self, case: Case, world_size: int, low_dtype: str, tmp_path: Path
    ) -> None:
        """Exported master weights must keep the digits that the low-precision dtype rounds away.

        Rounded to that dtype, they must equal the exported weights.
        """
        case = case.with_(model=replace(case.model, dtype=low_dtype))
        state, _, exported = self._exported_state(case, self._steps_of(DONE), tmp_path)
        rounded = {
            name: torch.from_numpy(master).to(DTYPES[low_dtype]).float().numpy()
            for name, master in state["master"].items()
        }
        assert distance(rounded, state["master"]), f"exported masters have only the digits of {low_dtype}"
        weights = {name: weight for name, weight in exported.items() if name in rounded}
        check_near(f"masters rounded to {low_dtype}", rounded, weights, 0.0)

    def test_a_portable_state_of_another_model_is_refused(self, case: Case) -> None:
        """A state of another model must raise a `CheckpointError` that names the parameter.

        Parameters may be missing, unknown or misshapen.
        """
        self._need_portable()
        answers = self.run(import_foreign, self._on_one(case).with_(training=TRAINING))[0]
        for what, (odd, error) in answers.items():
            expect(error, CheckpointError, f"importing a state with {what}", odd)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _need_portable(self) -> None:
        self.need_training()
        self.need(self.can.portable_state, "portable_state")

    def _steps_of(self, number: int, task: Task = "causal_lm", *, seed: int = 0) -> list[Step]:
        loss = LOSSES["sft"] if task == "causal_lm" else OF_TASK[task]
        return [Step(sequences=self.batch(seed + i), loss=loss, split=SPLITS["three at a time"]) for i in range(number)]

    def _exported_state(self, case: Case, steps: list[Step], folder: Path) -> tuple[dict[str, Arrays], int, Arrays]:
        """Return the state after `steps`: masters and moments by kind and then by name, the step count, and exported
        weights."""
        self._need_portable()
        answers = self.run(export_between, case.with_(training=SCHEDULED), steps, len(steps), str(folder))
        by_kind: dict[str, Arrays] = {kind: {} for kind in KINDS}
        with opened_portable_state(folder) as state:
            for name in state.shapes:
                held = state.read(name)
                for kind in KINDS:
                    by_kind[kind][name] = as_array(getattr(held, kind))
            return by_kind, state.step_count, next(answer.before for answer in answers if answer.before)


def _check_continued(what: str, actual: Trained, expected: Trained) -> None:
    check_names(actual.after, expected.after)
    for number, (one, other) in enumerate(zip(actual.stats, expected.stats, strict=True), 1):
        for name in ("grad_norm", "learning_rate"):
            assert np.isclose(getattr(one, name), getattr(other, name), rtol=ROUNDING), (
                f"{what}: step {number} was {one}, expected {other}"
            )
    if actual.data_rank.leader:
        check_near(f"{what}: weights before the steps", actual.before, expected.before, ROUNDING)
        check_near(f"{what}: weights after the steps", actual.after, expected.after, ROUNDING)


def _way(after: Arrays, before: Arrays) -> Arrays:
    return {name: after[name] - weight for name, weight in before.items()}
