"""Configuration schemas of the pipelines `preference` and `reward_model`. Light: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from roll_core.spec.config import (
    DataArguments,
    Fraction,
    InferWorkerConfig,
    Needs,
    NonNegativeFloat,
    PositiveFloat,
    RewardRunConfig,
    RunConfig,
    ScoreWorkerConfig,
    TrainWorkerConfig,
    ValidationConfig,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.data.rows import Rows
    from roll_core.spec.providers import Provider

ReferenceLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "ipo",
    "ipo_sum",
    "hinge",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]
"""Losses of pairs that compare the policy with a reference."""
PolicyLoss = Literal["simpo", "cpo", "orpo"]
"""Losses of pairs without a reference."""
LabelledLoss = Literal["kto", "apo_zero_unpaired"]
"""Losses of labelled responses. They compare the policy with a reference."""
LossType = Literal[ReferenceLoss, PolicyLoss, LabelledLoss, "sft"]
DEFAULT: tuple[LossType, ...] = ("sigmoid",)
SMOOTHED: frozenset[str] = frozenset({"sigmoid", "sigmoid_norm", "robust", "exo_pair", "simpo", "cpo"})
"""Losses with `label_smoothing`."""
DIVERGENT: frozenset[str] = frozenset(
    {"sigmoid", "sigmoid_norm", "robust", "ipo", "ipo_sum", "hinge", "exo_pair", "discopop"}
)
"""Losses with `f_divergence_type`."""
LABELLED: frozenset[str] = frozenset(get_args(LabelledLoss))
OTHER_NAMES: Mapping[str, str] = {
    "dpo": "sigmoid",
    "cdpo": "sigmoid, with label_smoothing",
    "rdpo": "robust, with label_smoothing",
    "slic": "hinge",
    "mpo": "a list, for example [sigmoid, bco_pair, sft] with loss_weights",
    "rpo": "a list, [sigmoid, sft] with loss_weights",
    "exo": "exo_pair",
    "nca": "nca_pair",
    "bco": "bco_pair",
    "sppo": "sppo_hard",
    "apo": "apo_zero or apo_down",
}
"""Names of losses in papers and other frameworks, with ours."""
WITH_SFT: frozenset[str] = frozenset({"cpo", "orpo"})
"""Losses whose papers add the negative log-likelihood of chosen responses."""


class PreferenceConfig(RewardRunConfig):
    """`pipeline: preference`, or `dpo`: direct alignment on pairs of responses, or on labelled responses."""

    policy_role: ClassVar[str] = "actor_train"
    learning_rates: ClassVar[Mapping[str, float]] = {"actor_train": 1e-6}

    actor_train: TrainWorkerConfig
    """The policy. Batch sizes count pairs, or labelled responses."""
    reference: ScoreWorkerConfig | None = None
    """Frozen copy of the initial policy.

    Not needed if `actor_train` trains adapters (`lora_target`), or with `precompute_ref_log_probs`.
    """
    actor_infer: InferWorkerConfig | None = None
    """Engine that generates responses for an evaluation by `rewards`.

    Without it, evaluation only computes the losses and rewards of held-out preferences.
    """
    loss_type: list[LossType] = Field(default_factory=lambda: list(DEFAULT))
    """One loss, or several whose weighted sum is minimised: see docs/preference.md. Default: sigmoid.

    `cpo` and `orpo` add the term `sft` with weight 1, unless it is listed.
    """
    loss_weights: list[PositiveFloat] | None = None
    """Weight of each loss of `loss_type`. Default: 1."""
    beta: PositiveFloat = 0.1
    """Inverse temperature of the implicit reward: higher values keep the policy closer to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), Needs("loss_type", values=SMOOTHED, strict=True)] = 0.0
    """Assumed fraction of pairs whose responses are swapped.

    It turns `sigmoid` into cDPO.
    """
    reference_free: bool = False
    """Compare with a uniform reference: log-ratios are the policy's logprobs. Not SimPO, which averages over tokens."""
    precompute_ref_log_probs: bool = False
    """Compute the reference's logprobs of all rows once, with the initial policy, before the first step.

    They are cached in `<output_dir>/reference_logprobs` under a hash of the model and of the rows' tokens. No
    reference then occupies memory during training.
    """
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference that regularises the policy (f-DPO, arXiv:2309.16240)."""
    f_alpha_divergence_coef: Annotated[
        float, Needs("f_divergence_type", values=frozenset({"alpha_divergence"}), strict=True)
    ] = 0.5
    """Alpha, as in TRL: 1 minus the paper's. 1 is reverse_kl, 0 forward_kl."""
    f_divergence_max_exponent: Annotated[
        float,
        Field(gt=0, le=80),
        Needs("f_divergence_type", values=frozenset({"forward_kl", "alpha_divergence"}), strict=True),
    ] = 80.0
    """Largest exponent; float32 overflows above 88."""
    ld_alpha: Fraction = 1.0
    """Weight of a response's tokens beyond the length of the pair's shorter response (LD-DPO, arXiv:2409.06411)."""
    use_weighting: bool = False
    """Weight pairs by the policy's own probability of their responses (WPO, arXiv:2406.11827).

    Requires a strategy with the capability `topk`.
    """
    simpo_gamma: Annotated[NonNegativeFloat, Needs("loss_type", values=frozenset({"simpo"}), strict=True)] = 0.5
    """Target margin of `simpo`, absolute: its authors tune `simpo_gamma / beta`."""
    discopop_tau: Annotated[PositiveFloat, Needs("loss_type", values=frozenset({"discopop"}), strict=True)] = 0.05
    """Temperature of the mixture in `discopop`."""
    orpo_max_mean_logprob: Annotated[
        float, Field(lt=0), Needs("loss_type", values=frozenset({"orpo"}), strict=True)
    ] = -1e-6
    """Largest mean logprob of a response in `orpo`, whose odds are infinite for a response of probability 1."""
    desirable_weight: Annotated[NonNegativeFloat, Needs("loss_type", values=LABELLED, strict=True)] = 1.0
    """Weight of desirable responses in `kto`."""
    undesirable_weight: Annotated[NonNegativeFloat, Needs("loss_type", values=LABELLED, strict=True)] = 1.0
    """Weight of undesirable responses in `kto`."""
    shuffle: bool = True
    """Shuffle the rows of each epoch. If false, rows keep the order of the files."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Handling of responses longer than response_length: drop the pair, or truncate the response. Both are counted."""

    @field_validator("loss_type", "loss_weights", mode="before")
    @classmethod
    def _one_loss_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, (str, int, float)) else value

    @field_validator("loss_type", mode="before")
    @classmethod
    def _names_are_ours(cls, value: Any) -> Any:
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and (ours := OTHER_NAMES.get(name.lower())):
                raise ValueError(f"found {name}, which is {ours} here")
        return value

    @model_validator(mode="after")
    def _losses_fit_together(self) -> PreferenceConfig:
        names = self.loss_type
        if not names:
            raise ValueError("loss_type is empty, expected at least one loss, for example sigmoid")
        if doubled := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"loss_type lists {doubled[0]} twice: use loss_weights")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} values, expected {len(names)} as in loss_type")
        labelled = [name for name in names if name in LABELLED]
        if labelled and (others := set(names) - set(labelled) - {"sft"}):
            raise ValueError(
                f"loss_type {labelled[0]} trains on single responses and {min(others)} on pairs: choose one kind"
            )
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> PreferenceConfig:
        names = set(self.loss_type)
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError("exo_pair needs label_smoothing above 0, for example 0.001: its target is (1 - e, e)")
        if self.f_divergence_type != "reverse_kl" and (not names & DIVERGENT or self.reference_free):
            raise ValueError(f"f_divergence_type has no effect on {', '.join(self.loss_type)} without a reference")
        if (self.labelled or names == {"sft"}) and (self.ld_alpha != 1.0 or self.use_weighting):
            key = "use_weighting" if self.use_weighting else "ld_alpha"
            raise ValueError(f"{key} compares the responses of a pair, but {self.loss_type[0]} trains on single ones")
        return self

    @model_validator(mode="after")
    def _reference_is_used(self) -> PreferenceConfig:
        if self.reference_free and not names_with_reference(self.loss_type):
            raise ValueError(f"reference_free has no effect: {', '.join(self.loss_type)} needs no reference; remove it")
        adapters = self.actor_train.model_args.trains_adapters
        if self.uses_reference:
            if self.reference is None and not adapters and not self.precompute_ref_log_probs:
                raise ValueError(
                    f"loss_type {names_with_reference(self.loss_type)[0]} needs a reference: configure reference, set"
                    " precompute_ref_log_probs, or train adapters (actor_train.model_args.lora_target)"
                )
            if self.reference is not None and self.precompute_ref_log_probs:
                raise ValueError("precompute_ref_log_probs uses the initial policy: remove the role reference")
        elif self.reference is not None or self.precompute_ref_log_probs:
            key = "precompute_ref_log_probs" if self.reference is None else "reference"
            raise ValueError(f"{key} has no effect: {', '.join(self.loss_type)} reads no reference; remove it")
        return self

    @model_validator(mode="after")
    def _data_are_given(self) -> PreferenceConfig:
        check_data(self.actor_train, "actor_train")
        if self.actor_infer is not None and (not self.rewards or self.validation is None):
            raise ValueError("actor_infer is only used for evaluation: configure validation.data_args and rewards too")
        if self.rewards and self.actor_infer is None:
            raise ValueError("rewards score generated responses: configure actor_infer too")
        return self

    @classmethod
    @override
    def check_rows(cls, key: str, rows: Rows, data: DataArguments, values: Mapping[Any, Any]) -> None:
        loss_type = values.get("loss_type", "sigmoid")
        names = loss_type if isinstance(loss_type, list) else [loss_type]
        labelled = any(name in LABELLED for name in names)
        if key == "actor_train" or {data.chosen, data.rejected, data.label} & set(rows.columns):
            _check_preferences(rows, data, labelled=labelled)

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        if "simpo" in self.loss_type and self.beta < 1:
            why = "simpo compares logprobs per token, which need 2 to 10 (arXiv:2405.14734 table 8)"
            return {"beta": f"{self.beta:g} is small: {why}"}
        return {}

    @property
    def labelled(self) -> bool:
        """True if the losses train on labelled responses instead of pairs."""
        return any(name in LABELLED for name in self.loss_type)

    @property
    def uses_reference(self) -> bool:
        """True if a loss reads the reference's logprobs."""
        return bool(names_with_reference(self.loss_type)) and not self.reference_free

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term of the objective, by name."""
        weights = self.loss_weights or [1.0] * len(self.loss_type)
        by_term: dict[str, float] = dict(zip(self.loss_type, weights, strict=True))
        return by_term if "sft" in by_term or not WITH_SFT & by_term.keys() else by_term | {"sft": 1.0}


class RewardTrainConfig(TrainWorkerConfig):
    """The role `reward_train`."""

    trains_scores: ClassVar[bool] = True


class RewardModelConfig(RunConfig):
    """`pipeline: reward_model`: trains a model that scores responses, on pairs (Bradley-Terry)."""

    reward_train: RewardTrainConfig
    """The reward model. Batch sizes count pairs. A causal language model gets a new head."""
    validation: ValidationConfig | None = None
    """Held-out pairs. Default: no validation."""
    margin: str | None = None
    """Column with the margin by which the chosen response must score higher (arXiv:2307.09288 eq. 2)."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which centres scores at 0 (arXiv:2312.09244); 0.01 is usual."""
    shuffle: bool = True
    """Shuffle the rows of each epoch. If false, rows keep the order of the files."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Handling of responses longer than response_length: drop the pair, or truncate the response. Both are counted."""

    @model_validator(mode="after")
    def _data_are_given(self) -> RewardModelConfig:
        check_data(self.reward_train, "reward_train")
        return self

    @classmethod
    @override
    def check_rows(cls, key: str, rows: Rows, data: DataArguments, values: Mapping[Any, Any]) -> None:
        from roll_pipeline_preference.rows import margin_of

        _check_preferences(rows, data, labelled=False)
        for row in rows if values.get("margin") is not None else ():
            margin_of(row, values["margin"], rows)


def names_with_reference(names: list[LossType]) -> list[LossType]:
    """The losses that compare the policy with a reference."""
    return [name for name in names if name in (*get_args(ReferenceLoss), *get_args(LabelledLoss))]


def check_data(role: TrainWorkerConfig, name: str) -> None:
    """Raise `ValueError` for a role without files."""
    if not role.data_args.file_name:
        raise ValueError(f"{name}.data_args.file_name is missing: name the files with the preferences")


def _check_preferences(rows: Rows, data: DataArguments, *, labelled: bool) -> None:
    from roll_pipeline_preference.rows import are_pairs, labelled_of, need_preferences, pair_of

    need_preferences(rows, data, unpaired=labelled)
    read = labelled_of if labelled and not are_pairs(rows, data) else pair_of
    for row in rows:
        read(row, data, rows)
