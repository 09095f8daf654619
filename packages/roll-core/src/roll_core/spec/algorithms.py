"""The interfaces of advantage estimators and policy losses: pure functions on flat tensors.

Shapes: T tokens of prompts and responses, concatenated; S rollouts; G groups; U turns of all rollouts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.config import Config
    from roll_core.spec.train import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTurns:
    """Turns of multi-turn rollouts: turns of one rollout are adjacent and in order."""

    index_T: Tensor
    """int64, index of each token's turn. Read only where `AdvantageInput.mask_T` is true."""
    rollouts_U: Tensor
    """int64, index of each turn's rollout."""
    rewards_U: Tensor
    """float32, reward of each turn. An environment that scores only whole episodes gives the last turn all of it."""
    states_U: Tensor | None = None
    """int64, equal for turns that began in the same state of the environment (the anchor state); None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInput:
    """Input of an advantage estimator: all rollouts of the batch that have a reward.

    A rollout of several training rows (branches, compacted contexts) is one entry of S. Its rows follow one another, so
    statistics and recursions are per rollout, however it is cut into rows. Failed rollouts are absent: they affect no
    statistics. `roll_core.algorithms.rewards.token_rewards` computes per-token rewards from it.
    """

    scores_S: Tensor
    """float32, reward of each rollout. Normalised as configured, or as scored if the estimator normalises by itself
    (`AdvantageProvider.normalise`)."""
    mask_T: Tensor
    """bool, True for tokens that the policy generated, also for those that `response_mask` keeps out of its loss."""
    segments_T: Tensor
    """int64, index of each token's rollout."""
    groups_S: Tensor
    """int64, index of each rollout's group."""
    baselines_S: Tensor | None = None
    """float32, reward of the greedy response to each rollout's prompt; None unless the estimator's record has
    `needs_baseline`."""
    components_S: Mapping[str, Tensor] = field(default_factory=dict)
    """float32, numeric components of the rewards (`Reward.detail`) by name, as scored. NaN where a rollout has none."""
    turns: RolloutTurns | None = None
    """None in single-turn pipelines."""
    values_T: Tensor | None = None
    """float32, the critic's value before each token; None without a critic."""
    gamma: float = 1.0
    lambd: float = 1.0
    critic_lambd: float | None = None
    """Lambda of the critic's target; None: `lambd`."""
    kl_T: Tensor | None = None
    """float32, per-token KL to the reference policy, if the config adds it to the reward."""
    kl_coef: float = 0.0
    reward_clip: float | None = None
    """Bound on the absolute value of a normalised reward, and of a token's reward."""
    whiten_rewards: bool = False
    """Whiten token rewards before computing advantages."""
    norm_epsilon: float = 1e-6
    """Added to a standard deviation that divides rewards; a deviation of at most this value does not divide."""
    whiten_epsilon: float = 1e-8
    """Added to the variance in whitening."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`adv_options` as written in the config, already validated by the schema of the estimator's record."""

    @property
    def order_N(self) -> Tensor:
        """int64 `[N]`, indices of the masked tokens in the order in which they were sampled, rollout by rollout.

        Recursions over tokens follow it. It differs from the order of T where the rows of a rollout interleave in time:
        an agent's conversations.
        """
        index_N = self.mask_T.nonzero()[:, 0]
        return index_N if self.turns is None else index_N[self.turns.index_T[index_N].argsort(stable=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutput:
    """Per-token results; 0 where the mask is false."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
    """The critic's regression target, if there is a critic."""
    token_rewards_T: Tensor | None = None
    """The token rewards that were used. Their mean is the metric `reward/normalised_mean`."""


class AdvantageEstimator(Protocol):
    """Computes the advantage of each token. Depends only on its input and does not modify it.

    Options are read from `batch.options`. Parameters after `batch` receive the options of the same names.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        """Advantages of a whole batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossParams:
    """Parameters of policy losses. Each is a config key of the same name."""

    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip: float | None = None
    """Lower bound on the objective of negative advantages, as a factor > 1 of the advantage (arXiv:1912.09729)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`pg_options` as written in the config, already validated by the schema of the loss's record."""


class PolicyLoss(Protocol):
    """Per-token policy loss, to be *minimised*. It must not depend on how the batch is split into microbatches.

    Options are read from `params.options`. Parameters after `params` receive the options of the same names.
    """

    def __call__(
        self, logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`(loss_T, per-token metrics)`. The runtime masks and aggregates both."""
        ...


F = TypeVar("F", bound="Callable[..., Any]")


def option_parameters(function: Callable[..., Any], num_contract: int) -> dict[str, inspect.Parameter]:
    """Options of a function by name: its parameters after the first `num_contract`, which those of its contract are."""
    return {
        parameter.name: parameter
        for i, parameter in enumerate(inspect.signature(function).parameters.values())
        if parameter.kind is parameter.KEYWORD_ONLY
        or (parameter.kind is parameter.POSITIONAL_OR_KEYWORD and i >= num_contract)
    }


def bind_options(function: F, contract: type, options: Mapping[str, Any]) -> F:
    """Bind the options that `function` takes as parameters, see `option_parameters`."""
    num_contract = len(inspect.signature(contract.__call__).parameters) - 1
    taken = {name: options[name] for name in option_parameters(function, num_contract) if name in options}
    return cast("F", partial(function, **taken)) if taken else function


def signature_schema(function: Callable[..., Any], contract_parameters: Sequence[str]) -> type[Config]:
    """Schema of the options of a user's function or class: its parameters after `contract_parameters`.

    An option without an annotation has the type of its default. Raises `TypeError` if the function cannot be called
    with `contract_parameters` and its options, or if pydantic cannot validate an annotation. The message begins with a
    verb.
    """
    from pydantic import PydanticUserError, create_model

    from roll_core.spec.config import Config

    try:
        options = option_parameters(function, len(contract_parameters))
        inspect.signature(function).bind(*contract_parameters, **dict.fromkeys(options))
    except (TypeError, ValueError) as error:
        raise TypeError(f"cannot be called as f({', '.join([*contract_parameters, '**options'])}): {error}") from error
    fields: dict[str, Any] = {}
    for name, parameter in options.items():
        guessed = Any if parameter.default in (None, parameter.empty) else type(parameter.default)
        annotation = guessed if parameter.annotation is parameter.empty else parameter.annotation
        fields[name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    annotated = inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
    try:
        schema = create_model("Options", __base__=Config, **fields)
        schema.model_rebuild(_types_namespace=getattr(annotated, "__globals__", None))
    except (PydanticUserError, NameError, SyntaxError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(f"has options that cannot be validated: {reason}") from error
    return schema


document_fields(__name__)
