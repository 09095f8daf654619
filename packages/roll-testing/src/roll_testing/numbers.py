"""Test group *numbers*: a strategy must compute what plain torch computes, however the batch is split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from roll_core.algorithms.losses import sft_objective
from roll_core.spec.train import WantedOutputs
from roll_modeling.model import text_parts
from roll_testing.bench import WHOLE, Split, Step
from roll_testing.bounds import BOUNDS, SPLIT, check_near, check_rows
from roll_testing.images import SeenModel, write_image_model
from roll_testing.losses import (
    EVERY_TERM,
    LOSSES,
    MAGNIFIED,
    OF_TASK,
    SPLITS,
    TAUGHT,
    TRAINING,
    CrossEntropyOfTeacher,
    GivenIds,
)
from roll_testing.models import cut_rollouts
from roll_testing.programs import average, export_teacher
from roll_testing.reference import Reference
from roll_testing.train_kit import TrainKit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import Task
    from roll_core.spec.train import LossFn, TrainingSpec
    from roll_core.types import Floats, TrainSequence
    from roll_testing.bench import Arrays, Case
    from roll_testing.programs import Trained

NUM_STEPS = 5
ONE_STEP = replace(TRAINING, weight_decay=0.0)
NORM = "the norm of the gradient"
"""Key of the gradient norm, beside the parameter names, if steps are compared instead of gradients."""


class TrainNumberTests(TrainKit):
    """Compares the strategy with `Reference`, and with itself when the batch is split differently."""

    # -- outputs -------------------------------------------------------------------------------------------------------

    def test_logprobs_equal_the_reference(self, case: Case, world_size: int) -> None:
        """Logprobs of every token after the first must equal the reference's, with all sequences in one microbatch."""
        self._compare(case, WantedOutputs(logprobs=True), "logprobs")

    def test_logprobs_have_the_temperature_of_the_rollouts(self, case: Case) -> None:
        """Logits must be divided by the temperature before the softmax.

        Otherwise logprobs would not be comparable with those of the rollouts.
        """
        self._compare(case, WantedOutputs(logprobs=True, temperature=0.5), "logprobs")

    def test_entropy_equals_the_reference(self, case: Case) -> None:
        """Entropy must be that of the distribution from which token `t` is sampled, in nats, at the temperature."""
        self._compare(case, WantedOutputs(entropy=True, temperature=0.7), "entropy")

    def test_topk_equals_the_reference(self, case: Case) -> None:
        """Top-k logprobs and token ids must equal the reference's, in descending order."""
        self.need(self.can.topk, "topk")
        self._compare(case, WantedOutputs(topk=5), "topk_logprobs", "topk_ids")

    def test_logprobs_of_given_ids_equal_the_reference(self, case: Case) -> None:
        """Logprobs of each token's `gather_ids` must equal the reference's, at the temperature."""
        self.need(self.can.gathered, "gathered")
        self._compare(case, WantedOutputs(gathered=True, temperature=0.7), "gathered_logprobs")

    def test_comparisons_over_the_vocabulary_equal_the_reference(
        self, case: Case, world_size: int, tmp_path: Path
    ) -> None:
        """The cross-entropy of the model relative to itself, by its exported head and hidden states, is the entropy."""
        loss = CrossEntropyOfTeacher(head=str(tmp_path / "head"))
        batch = self._taught(case, loss.head)
        scores = self.scored(case, batch, replace(loss.want, masked_only=False), WHOLE)
        expected = self.reference(case).by_sequence(batch, WantedOutputs(entropy=True, temperature=0.7))
        check_rows("compared", scores["compared"], expected["entropy"], BOUNDS[case.model.dtype].outputs)

    def test_values_equal_the_reference(self, case: Case, scalar_task: Task) -> None:
        """Values must equal the reference's.

        For task `value` they belong to the state before token `t`, for task `reward` to the sequence up to and
        including token `t`.
        """
        self._compare(case, WantedOutputs(values=True), "values")

    @pytest.mark.parametrize("split", ["one by one", "by tokens"])
    def test_outputs_do_not_depend_on_their_neighbours(self, case: Case, split: str) -> None:
        """Logprobs and entropies of a sequence must not depend on other sequences.

        The test compares one microbatch with splits into single sequences and by tokens.
        """
        batch = self.batch()
        want = WantedOutputs(logprobs=True, entropy=True)
        together = self.scored(case, batch, want, WHOLE)
        parts = self.scored(case, batch, want, SPLITS[split])
        for name in ("logprobs", "entropy"):
            check_rows(f"{name} split {split}", parts[name], together[name], 1e-5)

    def test_outputs_in_lower_precision_stay_in_bounds(self, case: Case, low_dtype: str) -> None:
        """Low-precision outputs must stay within bounds of a reference with weights rounded alike.

        The reference computes in float32.
        """
        self._compare(self._in(case, low_dtype), WantedOutputs(logprobs=True, entropy=True), "logprobs", "entropy")

    # -- images --------------------------------------------------------------------------------------------------------

    def image_model(self, folder: Path) -> ModelSpec:
        """Write a small float32 model with images, its tokenizer and processor into `folder`, and return its spec.

        Default: a Qwen2.5-VL of transformers.
        """
        return write_image_model(folder)

    @pytest.mark.parametrize("split", ["whole", "one by one"])
    def test_logprobs_after_images_equal_the_reference(
        self, case: Case, world_size: int, split: str, tmp_path: Path
    ) -> None:
        """Logprobs of rows with no, one and two images must equal the reference's, in one microbatch or in several.

        With the capability `videos`, rows with a video are among them.
        """
        case, model = self._seeing(case, tmp_path, ("vision", "projector"))
        batch, want = model.batch(), WantedOutputs(logprobs=True)
        scores = self.scored(case, batch, want, SPLITS[split])
        expected = Reference(model, "causal_lm").by_sequence(batch, want)
        check_rows("logprobs", scores["logprobs"], expected["logprobs"], BOUNDS[case.model.dtype].outputs)

    @pytest.mark.parametrize("freeze", [("vision", "projector"), ()], ids=["frozen", "trained"])
    def test_the_gradient_after_images_equals_the_reference(
        self, case: Case, world_size: int, freeze: tuple[str, ...], tmp_path: Path
    ) -> None:
        """The gradient must equal the reference's, and be 0 for frozen parts, also if a rank has no images.

        With the capability `videos`, rows with a video are among them.
        """
        self.need_training()
        self.need(self.gradient_training is not None, "gradients that can be read off a step")
        case, model = self._seeing(case, tmp_path, freeze)
        batch = model.batch()
        gradient = self._gradient(case, batch, LOSSES["sft"], SPLITS["one by one"])
        expected = Reference(model, "causal_lm").gradient(batch, LOSSES["sft"])
        trained = {id(parameter) for part in text_parts(model.module) for parameter in part.parameters()}
        for name, parameter in model.module.named_parameters():
            if freeze and id(parameter) not in trained:
                expected[name] = 0.0 * expected[name]
        check_near("gradient after images", gradient, expected, BOUNDS["fp32"].gradient)

    @pytest.mark.parametrize("freeze", [("vision", "projector"), ()], ids=["frozen", "trained"])
    def test_frozen_weights_never_change(
        self, case: Case, world_size: int, freeze: tuple[str, ...], tmp_path: Path
    ) -> None:
        """Steps must not change the weights that `frozen_weights` names, because engines receive them only once."""
        self.need_training()
        case, model = self._seeing(case, tmp_path, freeze)
        done = self.trained(case, ONE_STEP, [Step(sequences=model.batch(), loss=LOSSES["sft"])])
        if unknown := done.frozen - done.before.keys():
            raise AssertionError(f"{min(unknown)} is declared as frozen, but is not exported")
        changed = [name for name in done.frozen if not np.array_equal(done.before[name], done.after[name])]
        assert not changed, f"{min(changed)} is declared as frozen, but a step changed it"
        assert freeze or not done.frozen, f"{min(done.frozen)} is declared as frozen, but is trained"

    # -- gradients -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("loss", LOSSES)
    def test_the_gradient_equals_the_reference(self, case: Case, loss: str) -> None:
        """The gradient of the whole batch, in one microbatch on one rank, must equal the reference's."""
        self._compare_gradient(f"gradient of {loss}", case, LOSSES[loss])

    def test_the_gradient_of_given_ids_equals_the_reference(self, case: Case) -> None:
        """Logprobs of given ids must have gradients, added to those of the tokens' own logprobs."""
        self.need(self.can.gathered, "gathered")
        self._compare_gradient("gradient of given ids", case, GivenIds())

    def test_the_gradient_of_comparisons_equals_the_reference(
        self, case: Case, world_size: int, tmp_path: Path
    ) -> None:
        """The gradient of the cross-entropy of the model relative to itself must equal that of the entropy."""
        loss = CrossEntropyOfTeacher(head=str(tmp_path / "head"))
        batch = self._taught(case, loss.head)
        self._compare_gradient("gradient of comparisons", case, loss, batch, CrossEntropyOfTeacher())

    def test_the_gradient_of_every_task_equals_the_reference(self, case: Case, task: Task) -> None:
        """The gradient must equal the reference's for every declared task.

        Models with a scalar head use a critic's loss.
        """
        self._compare_gradient(f"gradient of a {task} model", case, OF_TASK[task])

    @pytest.mark.parametrize("split", [name for name in SPLITS if name != "whole"])
    def test_the_gradient_does_not_depend_on_microbatches(self, case: Case, split: str) -> None:
        """The gradient must not depend on the split into microbatches, to 1e-6 relative in fp32.

        Gradients are summed over microbatches, and the loss has the denominators of the whole batch.
        """
        together = self._gradient(case, self.batch(), LOSSES["sft"])
        parts = self._gradient(case, self.batch(), LOSSES["sft"], SPLITS[split])
        self._check_split(f"gradient split {split}", parts, together)

    def test_the_gradient_does_not_depend_on_calls(self, case: Case) -> None:
        """Two calls of `forward_backward` must accumulate the same gradient as one call with all microbatches."""
        together = self._gradient(case, self.batch(), LOSSES["sft"])
        parts = self._gradient(case, self.batch(), LOSSES["sft"], SPLITS["one by one"], calls=2)
        self._check_split("gradient over two calls", parts, together)

    @pytest.mark.parametrize("split", SPLITS)
    def test_the_gradient_does_not_depend_on_ranks(self, case: Case, several: int, split: str) -> None:
        """The gradient on several ranks must equal that on one rank, to 1e-6 relative.

        Ranks have shares of unequal size and number of microbatches.
        """
        alone = self._gradient(self._on_one(case), self.batch(), LOSSES["sft"])
        shared = self._gradient(case, self.batch(), LOSSES["sft"], SPLITS[split])
        self._check_split(f"gradient on {several} ranks, split {split}", shared, alone)

    def test_ranks_without_work_take_part(self, case: Case, several: int) -> None:
        """Ranks without a sequence must participate in the step.

        A batch of one sequence must have the gradient of a single rank.
        """
        few = self.batch()[:1]
        alone = self._gradient(self._on_one(case), few, LOSSES["sft"])
        self._check_split("gradient of one sequence", self._gradient(case, few, LOSSES["sft"]), alone)

    def test_the_gradient_does_not_depend_on_the_rows_of_a_rollout(self, case: Case, world_size: int) -> None:
        """Cutting rollouts into rows must change neither gradient nor metrics, to 1e-6 relative.

        The loss has policy loss, KL and entropy in every aggregation mode, and a stream of weights on prompt tokens.
        """
        batch = [
            replace(
                sequence,
                ref_logprobs=sequence.old_logprobs,
                streams={"prompt": np.where(sequence.loss_mask, 0, np.arange(len(sequence))).astype(np.float32)},
            )
            for sequence in self.batch()
        ]
        rows, split = cut_rollouts(batch), SPLITS["three at a time"]
        assert len(rows) > len(batch)
        together, cut = self._gradient(case, batch, EVERY_TERM), self._gradient(case, rows, EVERY_TERM, split)
        self._check_split("gradient of rollouts cut into rows", cut, together)
        training = self.gradient_training or ONE_STEP
        (expected,) = self.trained(case, training, [Step(sequences=batch, loss=EVERY_TERM)]).metrics
        (metrics,) = self.trained(case, training, [Step(sequences=rows, loss=EVERY_TERM, split=split)]).metrics
        for name, value in expected.items():
            if not name.endswith(("/max", "/min")):
                _check_number(f"metric {name}", metrics[name], value, 1e-5)

    def test_the_gradient_does_not_depend_on_checkpointing(self, case: Case) -> None:
        """Gradient checkpointing must not change the gradient: recomputed activations must be the same."""
        self.need(self.can.gradient_checkpointing, "gradient_checkpointing")
        plain = self._gradient(case, self.batch(), LOSSES["sft"])
        saving = case.with_(model=replace(case.model, gradient_checkpointing=True))
        self._check_split("gradient with checkpointing", self._gradient(saving, self.batch(), LOSSES["sft"]), plain)

    def test_the_gradient_in_lower_precision_stays_in_bounds(self, case: Case, low_dtype: str) -> None:
        """Low-precision gradients must stay within bounds of a reference with weights rounded alike."""
        self._compare_gradient(f"gradient in {low_dtype}", self._in(case, low_dtype), LOSSES["sft"])

    def test_metrics_add_up_to_those_of_the_batch(self, case: Case, world_size: int) -> None:
        """Metrics, summed over microbatches and ranks, must be those of the whole batch.

        The loss must equal the reference's, and so must the token accuracy if top-k is declared.
        """
        batch, reference = self.batch(), self.reference(case)
        loss = sft_objective(token_accuracy=self.can.topk)
        step = Step(sequences=batch, loss=loss, split=SPLITS["three at a time"])
        (metrics,) = self.trained(case, TRAINING, [step]).metrics
        if self.can.topk:
            choices = reference.by_sequence(batch, WantedOutputs(topk=1))["topk_ids"]
            hits = sum(
                int((choices[sequence.id][:, 0] == sequence.tokens)[sequence.loss_mask].sum()) for sequence in batch
            )
            accuracy = hits / sum(int(sequence.loss_mask.sum()) for sequence in batch)
            assert np.isclose(metrics["token_accuracy"], accuracy, rtol=1e-5), (
                f"token_accuracy adds up to {metrics['token_accuracy']:.6g}, expected {accuracy:.6g}"
            )
        (expected,) = reference.train(TRAINING, [replace(step, loss=LOSSES["sft"])])
        assert np.isclose(metrics["loss"], expected.loss, rtol=1e-4), (
            f"the metric loss adds up to {metrics['loss']:.6g}, expected {expected.loss:.6g}"
        )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def test_steps_of_adamw_equal_the_reference(self, case: Case, world_size: int) -> None:
        """Parameters after five optimizer steps must equal the reference's.

        Weight decay applies to matrices; nothing is clipped.
        """
        self._compare_steps(case, TRAINING)

    def test_gradients_are_clipped_to_their_global_norm(self, case: Case, world_size: int) -> None:
        """Gradients must be clipped once, by their global norm over all microbatches, tensors and ranks.

        The reported norm must be the one before clipping.
        """
        training = replace(TRAINING, weight_decay=0.0, max_grad_norm=0.05)
        self._compare_steps(case, training, SPLITS["three at a time"], num_steps=2)

    @pytest.mark.parametrize("schedule", ["linear", "cosine"])
    def test_the_schedule_is_that_of_transformers(self, case: Case, schedule: str) -> None:
        """Learning rates must follow transformers' schedule.

        Of two warm-up steps, the first must have a learning rate of 0.
        """
        training = replace(TRAINING, weight_decay=0.0, lr_scheduler_type=schedule, warmup_steps=2, num_steps=6)
        self._compare_steps(case, training)

    @pytest.mark.parametrize("low", [False, True], ids=["fp32", "lower precision"])
    def test_the_moving_average_equals_the_reference(self, case: Case, world_size: int, low: bool) -> None:
        """Outputs with `ema` must be those of the weights' moving average, and leave the weights as they are.

        In lower precision, only the latter is compared: weights are rounded, the average is not.
        """
        self.need(self.can.ema, "ema")
        self.need_training()
        dtypes = [dtype for dtype in self.dtypes() if dtype != "fp32"]
        self.need(not low or bool(dtypes), "another dtype than fp32")
        training, decay = replace(TRAINING, ema_decay=0.6), 0.6
        steps = [Step(sequences=self.batch(i), loss=LOSSES["sft"]) for i in range(3)]
        case = (self._in(case, dtypes[0]) if low else case).with_(training=training)
        rows: dict[str, dict[str, Floats]] = {}
        for held, scores in self.run(average, case, steps, self.batch()):
            for name, outputs in scores.items():
                rows.setdefault(name, {}).update(outputs.get("logprobs", {}))
            assert all((held[-1][name] == weight).all() for name, weight in held[-2].items())
        check_rows("logprobs after those of the average", rows["after"], rows["before"], 0.0)
        assert any((rows["average"][name] != row).any() for name, row in rows["before"].items())
        if low:
            return
        expected, *later = self.run(average, case, steps, self.batch())[0][0][:-1]
        for weights in later:
            expected = {name: decay * weight + (1 - decay) * weights[name] for name, weight in expected.items()}
        reference = self.reference(case)
        reference.take(expected)
        found_there = reference.by_sequence(self.batch(), WantedOutputs(logprobs=True))["logprobs"]
        check_rows("logprobs of the average", rows["average"], found_there, BOUNDS["fp32"].outputs)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _compare(self, case: Case, want: WantedOutputs, *names: str) -> None:
        batch, reference = self.batch(), self.reference(case)
        if case.model.task == "causal_lm" and not names[0].startswith("logprobs"):
            want = _with_logprobs(want)
        scores, expected = self.scored(case, batch, want, WHOLE), reference.by_sequence(batch, want)
        for name in names:
            assert name in scores, f"{name} was requested but not returned"
            bound = 0.0 if name.endswith("_ids") else BOUNDS[case.model.dtype].outputs
            check_rows(name, scores[name], expected[name], bound)

    def _taught(self, case: Case, head: str) -> list[TrainSequence]:
        """The batch with the model's own hidden states as those of a teacher, whose head is written to a file."""
        self.need(self.can.whole_vocabulary, "whole_vocabulary")
        hidden: dict[str, Floats] = {}
        for rows in self.run(export_teacher, case, self.batch(), head):
            hidden |= rows.get("hidden", {})
        return [
            replace(
                sequence,
                teacher_hidden=hidden[sequence.id],
                streams={TAUGHT: np.where(sequence.loss_mask, np.arange(len(sequence)) % 3, 0).astype(np.float32)},
            )
            for sequence in self.batch()
        ]

    def _seeing(self, case: Case, folder: Path, freeze: tuple[str, ...]) -> tuple[Case, SeenModel]:
        """The case with a model with images, and the reference. Skips the test without the capability `images`."""
        self.need(self.can.images, "images")
        model = replace(self.image_model(folder), dtype=case.model.dtype, freeze=freeze)
        return case.with_(model=model), SeenModel(model, videos=self.can.videos)

    def _compare_gradient(
        self,
        what: str,
        case: Case,
        loss: LossFn,
        batch: Sequence[TrainSequence] = (),
        of_reference: LossFn | None = None,
    ) -> None:
        """Compare the gradient of a batch with the reference's, by default of the whole batch and of the same loss."""
        batch = batch or self.batch()
        gradient, reference, bounds = (
            self._gradient(case, batch, loss),
            self.reference(case),
            BOUNDS[case.model.dtype],
        )
        loss = of_reference or loss
        if self.gradient_training is not None:
            expected = reference.gradient(batch, loss)
            check_near(what, gradient, self._all(case, expected), bounds.gradient)
            return
        before = reference.weights()
        (step,) = reference.train(ONE_STEP, [Step(sequences=batch, loss=loss)])
        moved = {name: before[name] - weight for name, weight in reference.weights().items()}
        check_near(what, gradient, moved | _norm(step.grad_norm), bounds.steps)

    def _check_split(self, what: str, actual: Arrays, expected: Arrays) -> None:
        """Compare gradients of one batch that was split in different ways.

        If steps are compared instead, their gradient norms must agree to `SPLIT`. Their directions get the bound of
        steps, because the optimizer may magnify rounding.
        """
        if self.gradient_training is None:
            check_near(f"norm of the {what}", _norm(actual[NORM]), _norm(expected[NORM]), SPLIT)
        check_near(what, actual, expected, SPLIT if self.gradient_training is not None else BOUNDS["fp32"].steps)

    def _gradient(
        self, case: Case, batch: Sequence[TrainSequence], loss: LossFn, split: Split = WHOLE, calls: int = 1
    ) -> Arrays:
        """Return the gradient by parameter name, read off one step of `gradient_training`.

        If that is None, return the change of the weights in a step, and its gradient norm.
        """
        step = Step(sequences=batch, loss=loss, split=split, calls=calls)
        if self.gradient_training is None:
            done = self.trained(case, ONE_STEP, [step])
            moved = {name: before - done.after[name] for name, before in done.before.items()}
            return moved | _norm(done.stats[0].grad_norm)
        done = self.trained(case, self.gradient_training, [step])
        return {name: (before - done.after[name]) / MAGNIFIED for name, before in done.before.items()}

    def _compare_steps(
        self, case: Case, training: TrainingSpec, split: Split = WHOLE, num_steps: int = NUM_STEPS
    ) -> None:
        steps = [Step(sequences=self.batch(i), loss=LOSSES["sft"], split=split) for i in range(num_steps)]
        trained = self.trained(case, training, steps)
        reference = self.reference(case)
        start = reference.weights()
        bounds = BOUNDS[case.model.dtype]
        for number, (stats, expected) in enumerate(
            zip(trained.stats, reference.train(training, steps), strict=True), 1
        ):
            _check_number(f"learning rate of step {number}", stats.learning_rate, expected.learning_rate, 1e-6)
            _check_number(f"gradient norm of step {number}", stats.grad_norm, expected.grad_norm, bounds.steps)
            assert not stats.skipped, f"step {number} was skipped, though its gradient is finite"
        check_near(f"weights after {num_steps} steps", *_ways(trained, start, reference.weights()), bounds.steps)

    def _in(self, case: Case, dtype: str) -> Case:
        return case.with_(model=replace(case.model, dtype=dtype))

    def _all(self, case: Case, gradient: Arrays) -> Arrays:
        """Add zeros for parameters that the loss does not reach."""
        return {
            name: gradient.get(name, np.zeros_like(weight)) for name, weight in self.reference(case).weights().items()
        }


def _norm(norm: float | Floats) -> Arrays:
    return {NORM: np.asarray(norm, np.float32)}


def _with_logprobs(want: WantedOutputs) -> WantedOutputs:
    return replace(want, logprobs=True)


def _check_number(what: str, actual: float, expected: float, bound: float) -> None:
    assert np.isclose(actual, expected, rtol=bound, atol=1e-12), (
        f"{what}: {actual:.9g}, expected {expected:.9g}, allowed relative difference {bound:g}"
    )


def _ways(trained: Trained, start: Arrays, end: Arrays) -> tuple[Arrays, Arrays]:
    """Return the changes of the weights, of the strategy and of the reference."""
    here = {name: weight - start[name] if name in start else weight for name, weight in trained.after.items()}
    return here, {name: weight - start[name] for name, weight in end.items()}
