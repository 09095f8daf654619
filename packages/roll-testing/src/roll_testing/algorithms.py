"""Conformance kits for advantage estimators and policy losses.

    class TestMyEstimator(AdvantageConformance):
        name = "my_estimator"

    class TestMyLoss(PolicyLossConformance):
        name = "my_loss"

Shapes: T tokens of prompts and responses, concatenated; S rollouts.
"""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
import torch

from roll_core.algorithms.aggregate import Aggregation, aggregate
from roll_core.data.pack import count_totals, pack
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.algorithms import (
    AdvantageEstimator,
    AdvantageInput,
    AdvantageOutput,
    PolicyLoss,
    PolicyLossParams,
    RolloutTurns,
    bind_options,
)
from roll_core.spec.config import Config
from roll_core.spec.providers import AdvantageProvider, PolicyLossProvider
from roll_core.types import TrainSequence
from roll_testing.models import cut_rollouts
from roll_testing.packaging import PackagingTests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.train import MicroBatch

NUM_GROUPS, GROUP_SIZE = 3, 4
ATOL = 1e-5


class FunctionTests(PackagingTests):
    """What estimators and losses have in common: options, and a function that workers import."""

    options: ClassVar[Mapping[str, Any]] = {}
    """`adv_options` or `pg_options`."""

    _contract: ClassVar[type]

    def test_the_function_can_be_pickled(self) -> None:
        """The function must be importable under its name."""
        function = self._target()
        assert pickle.loads(pickle.dumps(function)) == function, f"{self.provider.target} is not itself after pickling"

    def _target(self) -> Callable[..., Any]:
        self._engine_or_skip()
        function: Callable[..., Any] = load_target(self.provider.target, owner=self.name)
        return function

    def _function(self) -> Callable[..., Any]:
        """The function with its options, validated as in a config."""
        schema_of(self.provider, Config, owner=self.name).model_validate(dict(self.options))
        return bind_options(self._target(), self._contract, self.options)


class AdvantageConformance(FunctionTests):
    """Tests that every advantage estimator must pass. Inputs have what the record's flags require."""

    provider: AdvantageProvider
    gamma: ClassVar[float] = 1.0
    """Discount of the inputs."""

    _kind = AdvantageProvider
    _contract = AdvantageEstimator

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_results_have_their_form(self) -> None:
        """`[T]`, floating point, without gradients; `token_rewards_T` and `returns_T` likewise if they are set."""
        batch = self._batch()
        output = self._function()(batch)
        assert isinstance(output, AdvantageOutput), f"returned {type(output).__name__}, expected AdvantageOutput"
        if self.provider.needs_critic:
            assert output.returns_T is not None, "needs_critic is set, but there are no returns_T"
        for name, tensor in _tensors(output).items():
            assert tensor.shape == batch.mask_T.shape, f"{name} is {tuple(tensor.shape)}, expected [T]"
            assert tensor.is_floating_point(), f"{name} is {tensor.dtype}, expected floating point"
            assert not tensor.requires_grad, f"{name} has gradients"

    def test_results_are_finite(self) -> None:
        """Also if all rewards are equal, if groups have one rollout each, and for large rewards."""
        batch = self._batch()
        cases = {"usual rewards": batch, "equal rewards": replace(batch, scores_S=torch.ones_like(batch.scores_S))}
        cases["large rewards"] = replace(batch, scores_S=batch.scores_S * 1e4)
        if not self.provider.needs_groups:
            cases["groups of one"] = replace(batch, groups_S=torch.arange(len(batch.scores_S)))
        for case, case_batch in cases.items():
            for name, tensor in _tensors(self._function()(case_batch)).items():
                assert torch.isfinite(tensor).all(), f"{case}: {name} is not finite"

    def test_results_are_zero_off_the_mask(self) -> None:
        """Tokens that the policy did not generate have no advantage."""
        batch = self._batch()
        output = self._function()(batch)
        for name, tensor in _tensors(output).items():
            assert not tensor[~batch.mask_T].any(), f"{name} is not 0 at tokens that the policy did not generate"
        assert output.advantages_T[batch.mask_T].any(), "every advantage is 0, although the rewards differ"

    def test_the_input_stays_as_it_is(self) -> None:
        """An estimator must not modify its input."""
        batch = self._batch()
        before = _clone(batch)
        self._function()(batch)
        for name, tensor in _tensors(before).items():
            assert torch.equal(tensor, getattr(batch, name)), f"the estimator changed {name}"

    def test_results_repeat(self) -> None:
        """Equal inputs must give equal results: a resumed run computes them again."""
        first, second = (_tensors(self._function()(self._batch())) for _ in range(2))
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), f"{name} differs between two calls"

    def test_results_do_not_depend_on_the_order_of_groups(self) -> None:
        """A batch with its groups in reverse order must have the same advantages."""
        expected = self._function()(self._batch()).advantages_T.split(self._lengths(range(NUM_GROUPS)))
        advantages_T = self._function()(self._batch(reversed(range(NUM_GROUPS)))).advantages_T
        parts = advantages_T.split(self._lengths(reversed(range(NUM_GROUPS))))[::-1]
        for group, (one, other) in enumerate(zip(expected, parts, strict=True)):
            assert torch.allclose(one, other, atol=ATOL), f"group {group} has other advantages in another order"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _lengths(self, groups: Any) -> list[int]:
        return [sum(5 + (group + index) % 3 for index in range(GROUP_SIZE)) for group in groups]

    def _batch(self, groups: Any = range(NUM_GROUPS)) -> AdvantageInput:
        """Rollouts of 2 prompt tokens and 3 to 5 response tokens; the last but one is not the policy's."""
        order = list(groups)
        masks, scores, values, kls, lengths = [], [], [], [], []
        for group in order:
            random = np.random.default_rng(group)
            for index in range(GROUP_SIZE):
                length = 5 + (group + index) % 3
                mask = np.arange(length) >= 2
                mask[-2] = False
                masks.append(mask)
                lengths.append(length)
                scores.append(0.3 * group + (index % 3) * 0.5)
                values.append(random.normal(size=length) * mask)
                kls.append(random.random(length) * 0.1 * mask)
        number = len(lengths)
        segments_T = torch.repeat_interleave(torch.arange(number), torch.tensor(lengths))
        scores_S = torch.tensor(scores, dtype=torch.float32)
        can, turns = self.provider, None
        if can.needs_turns:
            turns = RolloutTurns(
                index_T=segments_T,
                rollouts_U=torch.arange(number),
                rewards_U=scores_S.clone(),
                states_U=torch.tensor([group for group in order for _ in range(GROUP_SIZE)]),
            )
        return AdvantageInput(
            scores_S=scores_S,
            mask_T=torch.from_numpy(np.concatenate(masks)),
            segments_T=segments_T,
            groups_S=torch.arange(len(order)).repeat_interleave(GROUP_SIZE),
            baselines_S=torch.full((number,), 0.25) if can.needs_baseline else None,
            components_S={"format": scores_S.clone(), "accuracy": 1 - scores_S},
            turns=turns,
            values_T=torch.from_numpy(np.concatenate(values)).float() if can.needs_critic else None,
            gamma=self.gamma,
            lambd=0.8,
            kl_T=torch.from_numpy(np.concatenate(kls)).float() if can.normalise == "config" else None,
            kl_coef=0.1,
            options=dict(self.options),
        )


class PolicyLossConformance(FunctionTests):
    """Tests that every policy loss must pass."""

    provider: PolicyLossProvider

    _kind = PolicyLossProvider
    _contract = PolicyLoss

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_results_have_their_form(self) -> None:
        """A loss `[T]` with gradients, and metrics `[T]` without."""
        micro = _micro(range(4))
        loss_T, metrics = self._loss(micro, _logprobs(micro))
        assert loss_T.shape == micro.tokens_T.shape, f"the loss is {tuple(loss_T.shape)}, expected [T]"
        assert loss_T.requires_grad, "the loss has no gradient"
        for name, value in metrics.items():
            assert value.shape == micro.tokens_T.shape, f"metric {name} is {tuple(value.shape)}, expected [T]"
            assert not value.requires_grad, f"metric {name} has gradients: detach it"

    def test_loss_and_gradient_are_finite(self) -> None:
        """On the policy, near it, and where ratios are e⁸ and e⁻⁸."""
        micro = _micro(range(4))
        for distance in (0.0, 0.3, 8.0):
            logprobs_T, loss_T = self._masked(micro, distance)
            (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
            assert torch.isfinite(loss_T).all(), f"the loss is not finite at log ratios of ±{distance}"
            assert torch.isfinite(gradient_T).all(), f"the gradient is not finite at log ratios of ±{distance}"

    def test_tokens_off_the_mask_have_no_gradient(self) -> None:
        """Outside the mask values are arbitrary. Even NaN there must not reach the gradient of another token."""
        micro = _micro(range(4))
        clean_T, loss_T = self._masked(micro, 0.3)
        (expected_T,) = torch.autograd.grad(loss_T.sum(), clean_T)
        off_T = ~micro.loss_mask_T
        soiled: dict[str, Any] = {
            name: torch.where(off_T, torch.nan, getattr(micro, name))
            for name in ("old_logprobs_T", "behaviour_logprobs_T", "ref_logprobs_T", "advantages_T")
        }
        other = replace(micro, **soiled)
        logprobs_T = torch.where(off_T, -50.0, clean_T.detach()).requires_grad_()
        per_token_T, _ = self._loss(other, logprobs_T)
        loss = torch.where(micro.loss_mask_T, per_token_T, 0.0).sum()
        (found_T,) = torch.autograd.grad(loss, logprobs_T)
        on_T = micro.loss_mask_T
        assert torch.allclose(found_T[on_T], expected_T[on_T], atol=ATOL), "values off the mask change the gradient"
        assert not found_T[off_T].nan_to_num().any(), "a token off the mask has a gradient"

    def test_the_gradient_follows_the_advantage(self) -> None:
        """On the policy, a step against the gradient makes tokens with positive advantage more likely."""
        micro = _micro(range(4))
        logprobs_T, loss_T = self._masked(micro, 0.0)
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
        assert micro.advantages_T is not None
        wrong_T = micro.loss_mask_T & (gradient_T * micro.advantages_T > 0)
        assert not wrong_T.any(), f"{int(wrong_T.sum())} tokens: minimising the loss goes against the advantage"
        assert gradient_T[micro.loss_mask_T].any(), "every gradient is 0, although the advantages are not"

    def test_the_loss_does_not_depend_on_the_split(self) -> None:
        """Sequences must have the same loss per token alone as with others. Rollouts stay whole."""
        together, _ = self._loss(_micro(range(4)), _logprobs(_micro(range(4)), 0.3))
        parts = [self._loss(_micro([index]), _logprobs(_micro([index]), 0.3))[0] for index in range(4)]
        mask_T = _micro(range(4)).loss_mask_T
        assert torch.allclose(together[mask_T], torch.cat(parts)[mask_T], atol=ATOL), (
            "a sequence's loss depends on the other sequences of the micro-batch"
        )

    def test_the_loss_does_not_depend_on_the_rows_of_a_rollout(self) -> None:
        """Cutting rollouts into rows must change neither loss nor gradient, in every aggregation mode.

        The rows of a rollout are in one micro-batch if the record declares `whole_rollouts`, else in different ones.
        """
        rollouts = [replace(sequence, rollout=index) for index, sequence in enumerate(_sequences(range(4)))]
        rows = cut_rollouts(rollouts)
        if self.provider.whole_rollouts:
            rows = [replace(row, unit=row.rollout) for row in rows]
        for mode in get_args(Aggregation):
            expected, gradients = self._aggregated(rollouts, mode)
            loss, others = self._aggregated(rows, mode)
            assert abs(loss - expected) < ATOL, f"{mode}: the loss is {loss:.6g} in rows, {expected:.6g} as a whole"
            assert others.keys() == gradients.keys()
            wrong = [token for token, value in gradients.items() if abs(others[token] - value) > ATOL]
            assert not wrong, f"{mode}: {len(wrong)} tokens have another gradient if their rollout is cut into rows"

    def test_the_batch_stays_as_it_is(self) -> None:
        """A loss must not modify its inputs: several terms of an objective read them."""
        micro = _micro(range(4))
        before, logprobs_T = _clone(micro), _logprobs(micro, 0.3)
        kept_T = logprobs_T.detach().clone()
        self._loss(micro, logprobs_T)
        assert torch.equal(kept_T, logprobs_T.detach()), "the loss changed logprobs_T"
        for name, tensor in _tensors(before).items():
            assert torch.equal(tensor, getattr(micro, name)), f"the loss changed {name}"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _aggregated(
        self, sequences: Sequence[TrainSequence], mode: Aggregation
    ) -> tuple[float, dict[tuple[int, int], float]]:
        """Loss over micro-batches of one row or unit, and gradient of each token by its rollout and position."""
        loss = 0.0
        gradients: dict[tuple[int, int], float] = {}
        for micro in pack(sequences, totals=count_totals(sequences, max_length=5), max_sequences=1):
            logprobs_T = _logprobs(micro, 0.3)
            share = aggregate(self._loss(micro, logprobs_T)[0], micro, mode)
            (gradient_T,) = torch.autograd.grad(share, logprobs_T)
            loss += share.item()
            on_T = micro.loss_mask_T
            tokens = zip(
                micro.rollouts_S[micro.segments_T][on_T].tolist(), micro.positions_T[on_T].tolist(), strict=True
            )
            gradients |= dict(zip(tokens, gradient_T[on_T].tolist(), strict=True))
        return loss, gradients

    def _loss(self, micro: MicroBatch, logprobs_T: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        result: tuple[Tensor, Mapping[str, Tensor]] = self._function()(
            logprobs_T, micro, PolicyLossParams(options=dict(self.options))
        )
        return result

    def _masked(self, micro: MicroBatch, distance: float) -> tuple[Tensor, Tensor]:
        """Logprobs at a distance to the old ones, and the loss of the mask's tokens."""
        logprobs_T = _logprobs(micro, distance)
        loss_T, _ = self._loss(micro, logprobs_T)
        return logprobs_T, torch.where(micro.loss_mask_T, loss_T, 0.0)


def _sequences(sequences: Any) -> list[TrainSequence]:
    """Sequences of 2 prompt tokens and 3 to 5 response tokens."""
    result = []
    for index in sequences:
        random, length = np.random.default_rng(index), 5 + index % 3
        mask = np.arange(length) >= 2
        old = np.where(mask, -random.random(length) - 0.1, 0).astype(np.float32)
        advantages = np.where(mask, (-1) ** index * (0.5 + random.random(length)), 0).astype(np.float32)
        result.append(
            TrainSequence(
                id=str(index),
                tokens=random.integers(2, 30, length),
                loss_mask=mask,
                group=index // 2,
                old_logprobs=old,
                behaviour_logprobs=old.copy(),
                ref_logprobs=(old - 0.1 * mask).astype(np.float32),
                advantages=advantages,
            )
        )
    return result


def _micro(sequences: Any) -> MicroBatch:
    """One micro-batch of these sequences."""
    (micro,) = pack(_sequences(sequences))
    return micro


def _logprobs(micro: MicroBatch, distance: float = 0.0) -> Tensor:
    """The old logprobs, moved up and down by `distance`; the leaf of the gradient."""
    assert micro.old_logprobs_T is not None
    signs_T = torch.where(micro.positions_T % 2 == 0, 1.0, -1.0)
    return (micro.old_logprobs_T + distance * signs_T * micro.loss_mask_T).detach().requires_grad_()


def _tensors(record: Any) -> dict[str, Tensor]:
    return {
        field.name: value
        for field in dataclasses.fields(record)
        if isinstance(value := getattr(record, field.name), torch.Tensor)
    }


def _clone(record: Any) -> Any:
    return replace(record, **{name: tensor.clone() for name, tensor in _tensors(record).items()})
