"""Configuration schema of the pipeline `distill`. Light: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.errors import DataError
from roll_core.pipelines.config import RLVRConfig
from roll_core.spec.config import (
    Fraction,
    InferWorkerConfig,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ScoreWorkerConfig,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.pipelines.config import TrainInferCorrectionConfig
    from roll_core.spec.providers import Provider

Divergence = Literal[
    "forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl", "adaptive_kl"
]
Between = Annotated[float, Field(gt=0, lt=1)]


class TeacherConfig(ScoreWorkerConfig):
    """`teachers.<domain>`: a model that only scores. It has the student's tokenizer."""

    tag_included: list[str] = Field(default_factory=list)
    """Further tags whose rows this teacher scores. Its domain is always one of its tags."""


class DistillConfig(RLVRConfig):
    """`pipeline: distill`: distillation of a teacher into `actor_train`, on its own rollouts or on a data set.

    Keys of `rlvr` apply to the rollouts, and to the policy loss if the credit is an advantage.
    """

    teachers: dict[str, TeacherConfig]
    """Teachers by domain. A row's tag selects its teacher; a single teacher scores all rows."""
    actor_infer: InferWorkerConfig = InferWorkerConfig()
    """Engine that generates rollouts with the student's weights. Not needed for `distill_data: dataset`."""
    adv_estimator: str = "reinforce"
    """Advantage estimator of task rewards, with `task_coef`."""
    distill_data: Literal["student", "dataset", "mix"] = "student"
    """Sequences to learn on: rollouts of the student (on-policy), rows with responses, or both.

    `mix` trains each step on one of the two.
    """
    student_data_fraction: Fraction = 0.5
    """Probability that a step of `distill_data: mix` trains on rollouts (GKD's lambda)."""
    kd_support: Literal["sampled", "teacher_topk", "student_topk"] = "sampled"
    """Token ids at each position whose probabilities are compared.

    The sampled token, or the `logits_topk` most likely tokens of the teacher or of the student. A `logits_topk` equal
    to the vocabulary size is exact.
    """
    logits_topk: PositiveInt = 64
    """Number of most likely tokens, K."""
    kd_tail: Literal["bucket", "renormalise", "drop"] = "bucket"
    """Probability outside of the K tokens: one more class, divided out, or ignored."""
    kd_tail_floor: Between = 1e-5
    """Minimum probability of the class of `bucket`."""
    kd_placement: Literal["loss", "advantage"] | None = None
    """Use the divergence as a loss, or its estimate as an advantage of the policy loss.

    Default: `advantage` for sampled tokens, `loss` for K tokens.
    """
    kd_objective: Divergence | None = None
    """Divergence of the student from the teacher.

    Default: `forward_kl` for the teacher's K tokens, otherwise `reverse_kl`.
    """
    js_beta: Between = 0.5
    """Weight of the teacher in the mixture of `js_divergence`."""
    skew_lambda: Between = 0.1
    """Weight of the first distribution in the mixture of `skewed_forward_kl` and `skewed_reverse_kl`."""
    adaptive_kl_alpha: Between = 0.5
    """Probability of the teacher's head, for `adaptive_kl`."""
    kd_temperature: PositiveFloat | None = None
    """Divisor of both models' logits.

    Default: the sampling temperature of the rollouts, 1 without rollouts. The loss is not multiplied by its square.
    """
    kd_coef: PositiveFloat = 1.0
    """Weight of the distillation loss or advantage."""
    kd_clip: PositiveFloat | None = None
    """Upper bound of a token's loss, or bound of |log-ratio| in its advantage. Default: unbounded."""
    kd_discount: Fraction = 0.0
    """Discount of later tokens' log-ratios in an advantage. 0 credits each token with its own log-ratio only."""
    task_coef: NonNegativeFloat = 0.0
    """Weight of the advantages of `rewards`. With 0, rewards are only reported."""

    @model_validator(mode="after")
    def _data_and_rewards_are_given(self) -> DistillConfig:
        if not self.actor_train.data_args.file_name:
            raise ValueError("actor_train.data_args.file_name is missing: name the files with prompts or responses")
        has_engine = "actor_infer" in self.model_fields_set
        if self.generates and not has_engine:
            what = f"distill_data {self.distill_data}" if self.rolls_out else "validation"
            raise ValueError(f"actor_infer is missing: {what} generates responses with it")
        if has_engine and not self.rolls_out and self.validation is None:
            raise ValueError("actor_infer is not used: distill_data dataset generates no rollouts; remove it")
        if not self.teachers:
            raise ValueError("teachers is empty: configure at least one, for example teachers.main")
        if len(self.teachers) > 1 and self.reads_rows:
            raise ValueError(
                f"teachers are {len(self.teachers)}, selected by the tags of rollouts, but distill_data is"
                f" {self.distill_data}: configure one teacher, or set distill_data: student"
            )
        if self.critic is not None and not self.task_coef:
            raise ValueError("critic is not used: its values belong to task rewards; set task_coef, or remove critic")
        if self.rewards and not self.generates and self.replay_rollouts is None:
            raise ValueError("rewards score generated responses, but distill_data dataset generates none: remove them")
        if self.task_coef and (not self.rewards or not self.rolls_out):
            raise ValueError("task_coef weighs rewards of rollouts: configure rewards, and distill_data student or mix")
        if not self.rewards and (self.difficulty_mask or self.error_max_len_clip):
            key = "difficulty_mask" if self.difficulty_mask else "error_max_len_clip"
            raise ValueError(f"{key} reads rewards, but none are configured: remove it, or configure rewards")
        return self

    @model_validator(mode="after")
    def _trains_what_is_meant(self) -> DistillConfig:
        if self.kd_support != "sampled":
            if self.placement == "advantage":
                raise ValueError(
                    f"kd_placement is advantage with kd_support {self.kd_support}: the divergence does not depend on"
                    " the sampled token, so it is a baseline and its expected gradient is zero; set kd_placement: loss,"
                    " or kd_support: sampled"
                )
            if self.kd_support == "teacher_topk" and self.kd_tail == "drop" and self.objective in REVERSE:
                raise ValueError(
                    f"kd_tail is drop with kd_objective {self.objective} over the teacher's tokens: moving probability"
                    " out of them minimises it; set kd_tail: bucket, or kd_support: student_topk"
                )
            if self.kd_discount:
                raise ValueError("kd_discount is used by advantages only: remove it, or set kd_support: sampled")
        elif self.distill_data != "student":
            raise ValueError(
                f"kd_support is sampled with distill_data {self.distill_data}: it estimates KL(student || teacher) from"
                " samples of the student; set distill_data: student, or kd_support: teacher_topk"
            )
        elif self.objective != "reverse_kl":
            raise ValueError(
                f"kd_objective is {self.objective} with kd_support sampled: samples of the student estimate only"
                " reverse_kl; set kd_support: teacher_topk or student_topk"
            )
        one_temperature = self.kd_support == "sampled" or self.task_coef != 0
        if one_temperature and self.kd_temperature not in (None, self.sampling_temperature):
            raise ValueError(
                f"kd_temperature is {self.kd_temperature:g}, but the rollouts' temperature is"
                f" {self.sampling_temperature:g}: logprobs of sampled tokens need the same; remove kd_temperature"
            )
        if not self.trains_policy and self.stays_close:
            raise ValueError(
                "the KL to the reference belongs to a policy loss: set kd_placement: advantage or task_coef"
            )
        return self

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        found = super().warnings(parts) if self.trains_policy else {}
        if self.kd_support != "sampled" and self.kd_tail == "renormalise":
            found["kd_tail"] = "the student's probability outside of the K tokens is then free: set bucket to bound it"
        if self.kd_support == "teacher_topk" and self.kd_tail == "drop":
            found["kd_tail"] = "the sum over K tokens alone is no divergence and may be negative: set bucket"
        return found

    def teacher_of(self, tag: str) -> str:
        """Domain of the teacher that scores a tag. Raises `DataError` if there is none."""
        if len(self.teachers) == 1:
            return next(iter(self.teachers))
        for domain, teacher in self.teachers.items():
            if tag == domain or tag in teacher.tag_included:
                return domain
        raise DataError(
            f"no teacher scores rows with tag {tag!r}: the teachers are {', '.join(self.teachers)}; see"
            " teachers.<domain>.tag_included"
        )

    @property
    def objective(self) -> Divergence:
        """`kd_objective`, or its default."""
        return self.kd_objective or ("forward_kl" if self.kd_support == "teacher_topk" else "reverse_kl")

    @property
    def placement(self) -> Literal["loss", "advantage"]:
        """`kd_placement`, or its default."""
        return self.kd_placement or ("advantage" if self.kd_support == "sampled" else "loss")

    @property
    def rolls_out(self) -> bool:
        """True if steps train on rollouts of the student."""
        return self.distill_data != "dataset"

    @property
    def reads_rows(self) -> bool:
        """True if steps train on rows with responses."""
        return self.distill_data != "student"

    @property
    def trains_policy(self) -> bool:
        """True if rollouts are trained on with a policy loss."""
        return self.rolls_out and (self.placement == "advantage" or self.task_coef != 0)

    @property
    def sampling_temperature(self) -> float:
        """Temperature of the rollouts' logprobs; 1 for greedy sampling and without rollouts."""
        return (self.actor_infer.generating_args.temperature or 1.0) if self.rolls_out else 1.0

    @property
    def temperature(self) -> float:
        """`kd_temperature`, or its default."""
        return self.kd_temperature or self.sampling_temperature

    @property
    @override
    def generates(self) -> bool:
        return self.replay_rollouts is None and (self.rolls_out or self.validation is not None)

    @property
    @override
    def recomputes_logprobs(self) -> bool:
        return self.trains_policy and super().recomputes_logprobs

    @property
    @override
    def correction(self) -> TrainInferCorrectionConfig:
        if self.trains_policy:
            return super().correction
        given = self.train_infer_correction
        return given.model_copy(
            update={"is_weight": given.is_weight.model_copy(update={"enabled": False}), "filters": []}
        )


REVERSE = ("reverse_kl", "skewed_reverse_kl")
