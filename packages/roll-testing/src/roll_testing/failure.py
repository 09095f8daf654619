"""Test group *failure*: what cannot work is refused with a reason, and failures do not corrupt the training state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from roll_core.errors import CheckpointError, NonFiniteError
from roll_testing.bench import Step
from roll_testing.bounds import check_same, check_same_run
from roll_testing.losses import LOSSES, SPLITS, TRAINING, SpoiltGradient, SpoiltLoss
from roll_testing.packaging import RefusalTests
from roll_testing.programs import expect, load_damaged, refuse_a_loss, save_between, spoil_a_step, train
from roll_testing.train_kit import TrainKit

if TYPE_CHECKING:
    from pathlib import Path

    from roll_testing.bench import Case
    from roll_testing.programs import Trained

CONFIG = """\
pipeline: sft
platform: {platform}
sft_train:
  data_args: {{file_name: rows.jsonl}}
  model_args: {{dtype: {dtype}, random_init: {{model_type: qwen3}}}}
  strategy_args: {{strategy_name: {name}}}
"""
SPOILT = 4
"""Index of the sequence that makes a step non-finite: the longest one, which is on one rank only."""


class FailureTests(RefusalTests, TrainKit):
    """Every error must be a class of `roll_core.errors`."""

    _run = CONFIG

    def test_a_loss_that_is_not_finite_is_named(self, case: Case) -> None:
        """A NaN loss must raise a `NonFiniteError` in `forward_backward`, before it affects the weights.

        The message must name the sequence.
        """
        self.need_training()
        batch = self.batch()
        loss = SpoiltLoss(sequence=batch[SPOILT].id)
        case = self._on_one(case).with_(training=TRAINING)
        error = self.run(refuse_a_loss, case, batch[SPOILT : SPOILT + 1], loss)[0]
        expect(error, NonFiniteError, "a loss that is NaN", batch[SPOILT].id)

    def test_a_gradient_that_is_not_finite_changes_nothing(self, case: Case, world_size: int) -> None:
        """A NaN gradient on one rank must skip the step on every rank.

        Weights, moments and learning rate must not change. The following steps must equal those of a run without the
        skipped step.
        """
        self.need_training()
        case = case.with_(training=TRAINING)
        batch = self.batch(9)
        spoilt = Step(sequences=batch, loss=SpoiltGradient(sequence=batch[SPOILT].id), split=SPLITS["three at a time"])
        steps = [Step(sequences=self.batch(i), loss=LOSSES["sft"]) for i in range(2)]
        straight: Trained = self.run(train, case, steps)[0]
        for rank, (trained, skipped, error) in enumerate(self.run(spoil_a_step, case, spoilt, steps)):
            assert error is None, f"rank {rank} raised {error}; the loss was finite, only its gradient was not"
            assert skipped, f"rank {rank} did not report the step as skipped"
            if rank == 0:
                check_same("weights after the skipped step", trained.before, straight.before)
                check_same_run("steps after the skipped one", trained, straight)

    @pytest.mark.parametrize("harm", ["missing", "cut"])
    def test_a_damaged_state_is_refused(self, case: Case, harm: str, tmp_path: Path) -> None:
        """Loading an empty directory, or a state whose largest file is truncated, must raise a `CheckpointError`."""
        self.need_training()
        case = self._on_one(case).with_(training=TRAINING)
        saved, empty = tmp_path / "saved", tmp_path / "empty"
        saved.mkdir()
        empty.mkdir()
        step = Step(sequences=self.batch(), loss=LOSSES["sft"])
        self.run(save_between, case, [step, step], 1, str(saved))
        largest = max((file for file in saved.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:40])
        place = empty if harm == "missing" else saved / "rank-0"
        expect(self.run(load_damaged, case, str(place))[0], CheckpointError, f"loading a state that is {harm}")
