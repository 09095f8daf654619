"""Configuration schema of the pipeline `distill`. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations of class variables
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import override

from roll_core.data.rows import messages_of, need_column
from roll_core.errors import DataError
from roll_core.pipelines.config import PromptRunConfig
from roll_core.pipelines.keys import (
    AdvantageKeys,
    CriticKeys,
    DifficultyMaskKeys,
    EntropyKeys,
    KLKeys,
    OverlongMaskKeys,
    OverlongPenaltyKeys,
    PolicyLossKeys,
    PositiveNLLKeys,
)
from roll_core.spec.config import (
    Config,
    Fraction,
    InferWorkerConfig,
    Needs,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ScoreWorkerConfig,
    WorkerConfig,
)
from roll_pipeline_distill.rules import TOPK, check
from roll_pipeline_distill.stored import check_stored
from roll_pipeline_distill.vocabulary import Vocabulary, difference, stored_vocabulary, vocabulary_size

if TYPE_CHECKING:
    from roll_core.algorithms.correction_options import TrainInferCorrectionConfig
    from roll_core.spec.config import DataArguments
    from roll_core.spec.providers import Provider

Divergence = Literal[
    "forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl", "adaptive_kl"
]
"""Values of the config key `kd_objective`; see `divergences.divergence`."""
Tail = Literal["bucket", "renormalise", "drop"]
"""Values of the config key `kd_tail`; see `divergences.with_tail`."""
LATER_IMAGE = "{}: teacher_prompt replaces the prompt, but an image follows the first reply"
POLICY_LOSS = Needs("trains_policy", strict=True, remedy="set kd_placement: advantage or task_coef")
TASK_REWARDS = Needs("task_coef", strict=True)
REWARDS = Needs("rewards", strict=True, remedy="configure rewards")
Between = Annotated[float, Field(gt=0, lt=1)]


class TeacherConfig(ScoreWorkerConfig):
    """`teachers.<domain>`: a model that only scores. It has the student's tokenizer."""

    tag_included: list[str] = Field(default_factory=list)
    """Further tags whose rows this teacher scores. Its domain is always one of its tags."""


class TeacherInferConfig(InferWorkerConfig):
    """`teacher_infer`: the engine that generates responses of the teacher."""

    receives_weights: ClassVar[bool] = False


class ServedTeacherConfig(TeacherInferConfig):
    """`served_teachers.<domain>`: a model whose logprobs an engine computes, as those of a prompt."""

    scores_sequences: ClassVar[bool] = True

    tag_included: list[str] = Field(default_factory=list)
    """Further tags whose rows this teacher scores. Its domain is always one of its tags."""


class DistillConfig(PromptRunConfig):
    """`pipeline: distill`: distillation of a teacher into `actor_train`, on its own rollouts or on a data set.

    Keys of `rlvr` apply to the rollouts, and to the policy loss if the credit is an advantage.
    """

    learning_rates: ClassVar[Mapping[str, float]] = {"actor_train": 1e-5, "critic": 1e-5}
    group_needs: ClassVar[Mapping[type[Config], tuple[Needs, ...]]] = {
        PolicyLossKeys: (POLICY_LOSS,),
        EntropyKeys: (POLICY_LOSS,),
        KLKeys: (POLICY_LOSS,),
        PositiveNLLKeys: (POLICY_LOSS, REWARDS),
        AdvantageKeys: (TASK_REWARDS,),
        CriticKeys: (TASK_REWARDS,),
        OverlongPenaltyKeys: (TASK_REWARDS,),
        OverlongMaskKeys: (REWARDS,),
        DifficultyMaskKeys: (REWARDS,),
    }

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by domain. A row's tag selects its teacher; a single teacher scores all rows."""
    served_teachers: dict[str, ServedTeacherConfig] = Field(default_factory=dict)
    """Teachers by domain whose logprobs an engine computes, for `kd_support: sampled` and `teacher_topk`."""
    actor_infer: InferWorkerConfig = InferWorkerConfig()
    """Engine with the student's weights, for rollouts of the student and for `validation`."""
    teacher_infer: TeacherInferConfig | None = None
    """Engine with the teacher's weights, for `distill_data: teacher`. Its model is by default that of the teacher."""
    adv_estimator: str = "reinforce"
    """Advantage estimator of task rewards, with `task_coef`."""
    distill_data: Literal["student", "teacher", "dataset", "mix"] = "student"
    """Sequences to learn on: rollouts of the student (on-policy) or of the teacher, or rows with responses.

    `mix` trains each step on rollouts of the student or on rows.
    """
    student_data_fraction: Annotated[Fraction, Needs("mixes")] = 0.5
    """Probability that a step of `distill_data: mix` trains on rollouts (GKD's lambda)."""
    self_teacher: Literal["policy", "base", "ema"] | None = None
    """Self-distillation: the student is its own teacher, with another prompt (`teacher_prompt`).

    `policy`: with its current weights. `base`: without the adapters that it trains. `ema`: with a moving average of its
    weights.
    """
    ema_decay: Annotated[Between, Needs("averages")] = 0.99
    """Decay d of `self_teacher: ema`: after each optimizer step, `teacher = d × teacher + (1 - d) × student`."""
    teacher_prompt: str | None = None
    """Column with the prompt that the teacher sees instead of the student's: a text, or a list of messages."""
    kd_support: Literal["sampled", "teacher_topk", "student_topk", "full", "stored"] = "sampled"
    """Token ids at each position whose probabilities are compared.

    The sampled token, the `logits_topk` most likely tokens of the teacher or of the student, or the whole vocabulary
    (`full`), computed chunk by chunk from the teacher's hidden states and its head. `stored`: the ids in the rows.
    """
    kd_ids: Annotated[str, Needs("is_stored")] = "teacher_ids"
    """Column with K token ids for each trained token, for `kd_support: stored`."""
    kd_logprobs: Annotated[str, Needs("is_stored")] = "teacher_logprobs"
    """Column with the teacher's logprobs of `kd_ids`, at temperature 1."""
    logits_topk: PositiveInt = 64
    """Number of most likely tokens, K."""
    kd_tail: Tail = "bucket"
    """Probability outside of the K tokens: one more class, divided out, or ignored."""
    kd_placement: Literal["loss", "advantage"] | None = None
    """Use the divergence as a loss, or its estimate as an advantage of the policy loss.

    Default: `advantage` for tokens that the student sampled, otherwise `loss`.
    """
    kd_objective: Divergence | None = None
    """Divergence of the student from the teacher.

    Default: `reverse_kl` for the student's K tokens, or for its samples with `sampled` or `full`; otherwise
    `forward_kl`.
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
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of responses, which is added to the loss."""
    distill_on_prompt: bool = False
    """Train also on the prompts' tokens of rows, with `distill_data: dataset` or `mix`."""
    task_coef: NonNegativeFloat = 0.0
    """Weight of the advantages of `rewards`. With 0, rewards are only reported."""

    @field_validator("teacher_infer")
    @classmethod
    def _has_the_teachers_model(
        cls, value: TeacherInferConfig | None, info: ValidationInfo
    ) -> TeacherInferConfig | None:
        """Use the model of the only teacher if `teacher_infer` names none."""
        teachers = info.data.get("teachers") or {}
        if value is None or len(teachers) != 1 or value.model_args.model_name_or_path or value.model_args.random_init:
            return value
        model_args = next(iter(teachers.values())).model_args
        model = {key: getattr(model_args, key) for key in ("model_name_or_path", "random_init", "model_config_kwargs")}
        return value.model_copy(update={"model_args": value.model_args.model_copy(update=model)})

    @model_validator(mode="after")
    def _combines_what_fits(self) -> Self:
        check(self)
        if self.train_infer_correction.enabled and not self.trains_policy:
            raise ValueError(f"train_infer_correction belongs to a policy loss: {POLICY_LOSS.remedy}")
        return self

    @override
    def file_problems(self) -> Mapping[str, str]:
        """Compares tokenizers and vocabulary sizes of local models, as far as they are known."""
        problems = dict(super().file_problems())
        sizes = self.vocabulary_sizes()
        student_size = sizes["actor_train"]
        student = None if self.tokenizer is not None else self._vocabulary("actor_train")
        for name, size in sizes.items():
            if self.uses_topk and size is not None and self.logits_topk > size:
                problems["logits_topk"] = (
                    f"is {self.logits_topk}, but the vocabulary of {name} has {size} ids: set at most {size}"
                )
            if name == "actor_train":
                continue
            if why := difference(student, self._vocabulary(name), student_size, size):
                problems[f"{name}.model_args"] = f"{why}; choose a teacher with the student's tokenizer"
            elif self.kd_support == "full" and None not in (size, student_size) and size != student_size:
                problems[f"{name}.model_args"] = (
                    f"its output layer has {size} ids, the student's {student_size}, but kd_support full compares equal"
                    " ones: set kd_support: student_topk"
                )
        return problems

    def vocabulary_sizes(self) -> dict[str, int | None]:
        """Number of ids of the student, the teachers and their engine, by role; None if it is not known here."""
        names = ("actor_train", "teacher_infer")
        roles = {name: role for name, role in self.roles().items() if name in names or "teachers." in name}
        return {name: vocabulary_size(role.model_args, self.pretrain) for name, role in roles.items()}

    def model_path(self, role: str) -> str:
        """Directory or hub id of a role's model; empty for random weights."""
        model = self.roles()[role].model_args
        return model.model_name_or_path or ("" if model.random_init else self.pretrain or "")

    def _vocabulary(self, role: str) -> Vocabulary | None:
        path = self.model_path(role)
        return stored_vocabulary(path) if path else None

    @override
    @classmethod
    def check_rows(cls, key: str, rows: Any, data: DataArguments, values: Mapping[Any, Any]) -> None:
        if key != "actor_train":
            return
        if isinstance(prompt := values.get("teacher_prompt"), str):
            need_column(prompt, rows)
        if values.get("distill_data") in ("dataset", "mix"):
            for row in rows:
                messages = messages_of(row, data, rows, response=True)
                first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
                if isinstance(prompt, str) and any(message.get("media") for message in messages[first:]):
                    raise DataError(LATER_IMAGE.format(row.where))
        if values.get("kd_support") == "stored":
            columns = {
                name: str(values.get(name, cls.model_fields[name].default)) for name in ("kd_ids", "kd_logprobs")
            }
            check_stored(rows, columns["kd_ids"], columns["kd_logprobs"])

    @override
    def roles(self) -> dict[str, WorkerConfig]:
        roles = super().roles()
        if not self.has_engine:
            del roles["actor_infer"]
        return roles

    @override
    def capabilities(self) -> Mapping[str, tuple[str, ...]]:
        teachers = [f"teachers.{domain}" for domain in self.teachers]
        if self.kd_support == "full":
            return dict.fromkeys(["actor_train", *teachers], ("whole_vocabulary",))
        if self.kd_support == "stored":
            return {"actor_train": ("gathered",)}
        if self.served_teachers:
            engine = ("prompt_logprobs", "prompt_topk") if self.uses_topk else ("prompt_logprobs",)
            served = {f"served_teachers.{domain}": engine for domain in self.served_teachers}
            student = ("gathered", "topk") if self.uses_topk else ("gathered",)
            return served | ({"actor_train": student} if self.placement == "loss" else {})
        if self.self_teacher is not None:
            needs = ["gathered"] + ([] if self.kd_support == "sampled" else ["topk"])
            return {"actor_train": (*needs, "ema") if self.self_teacher == "ema" else tuple(needs)}
        needed = {"actor_train": ["gathered"], **{name: [] for name in teachers}}
        for name in teachers:
            needed[name] += [] if self.kd_support == "sampled" else ["topk"]
            needed[name] += [] if self.kd_support == "teacher_topk" else ["gathered"]
        needed["actor_train"] += ["topk"] if self.uses_topk else []
        return {name: tuple(names) for name, names in needed.items()}

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        messages = super().warnings(parts) if self.trains_policy else {}
        if self.kd_support == "sampled" and self.on_policy and self.actor_infer.generating_args.temperature == 0:
            messages["actor_infer.generating_args.temperature"] = (
                "found 0: the most likely tokens are no samples of the student, so their log-ratios do not estimate the"
                " divergence: set 1, or kd_support: full, teacher_topk or student_topk"
            )
        if self.kd_support == "sampled" and self.on_policy and self.placement == "loss" and self.ahead:
            messages["kd_placement"] = (
                "older weights sample part of the tokens, whose log-ratios do not estimate the divergence of the"
                " student: set advantage, which train_infer_correction weighs, or async_generation_ratio: 0"
            )
        if self.kd_support not in ("sampled", "full") and self.kd_tail == "renormalise":
            messages["kd_tail"] = (
                "the student's probability outside of the K tokens is then free: set bucket to bound it"
            )
        if self.kd_support in TOPK and self.kd_tail == "drop":
            messages["kd_tail"] = "the sum over K tokens alone is no divergence and may be negative: set bucket"
        return messages

    def teacher_of(self, tag: str) -> str:
        """Domain of the teacher that scores a tag. Raises `DataError` if there is none."""
        teachers = self.teachers or self.served_teachers
        if len(teachers) == 1:
            return next(iter(teachers))
        for domain, teacher in teachers.items():
            if tag == domain or tag in teacher.tag_included:
                return domain
        raise DataError(
            f"no teacher scores rows with tag {tag!r}: the teachers are {', '.join(teachers)}; see"
            " teachers.<domain>.tag_included"
        )

    def teacher_role(self, tag: str) -> str:
        """Name of the role that scores a tag as its teacher; empty if logprobs need no scoring."""
        if self.self_teacher is not None:
            return "actor_train"
        if self.served_teachers:
            return f"served_teachers.{self.teacher_of(tag)}"
        return f"teachers.{self.teacher_of(tag)}" if self.teachers else ""

    @property
    def teacher_samples(self) -> bool:
        """True if the logprobs of the teacher are those of its engine's samples."""
        return self.distill_data == "teacher" and self.kd_support == "sampled"

    @property
    def has_engine(self) -> bool:
        """True if `actor_infer` is configured. A saved config contains its defaults explicitly."""
        return bool(self.actor_infer != type(self).model_fields["actor_infer"].default)

    @property
    def objective(self) -> Divergence:
        """`kd_objective`, or its default."""
        of_teacher = self.kd_support in ("teacher_topk", "stored") or (
            self.kd_support != "student_topk" and not self.on_policy
        )
        return self.kd_objective or ("forward_kl" if of_teacher else "reverse_kl")

    @property
    def placement(self) -> Literal["loss", "advantage"]:
        """`kd_placement`, or its default."""
        return self.kd_placement or ("advantage" if self.kd_support == "sampled" and self.on_policy else "loss")

    @property
    def is_stored(self) -> bool:
        """True if rows have the teacher's logprobs."""
        return self.kd_support == "stored"

    @property
    def mixes(self) -> bool:
        """True if steps train on rollouts or on rows."""
        return self.distill_data == "mix"

    @property
    def averages(self) -> bool:
        """True if the teacher is a moving average of the student."""
        return self.self_teacher == "ema"

    @property
    def uses_topk(self) -> bool:
        """True if K tokens are compared."""
        return self.kd_support in ("teacher_topk", "student_topk")

    @property
    def on_policy(self) -> bool:
        """True if steps train on rollouts of the student."""
        return self.distill_data in ("student", "mix")

    @property
    def rolls_out(self) -> bool:
        """True if steps train on rollouts, of the student or of the teacher."""
        return self.distill_data != "dataset"

    @property
    def rollout_role(self) -> str:
        """Name of the role that generates the rollouts to train on."""
        return "teacher_infer" if self.distill_data == "teacher" else "actor_infer"

    @property
    def rollout_infer(self) -> InferWorkerConfig:
        """Config of `rollout_role`."""
        return self.teacher_infer if self.teacher_infer is not None else self.actor_infer

    @property
    def reads_rows(self) -> bool:
        """True if steps train on rows with responses."""
        return self.distill_data in ("dataset", "mix")

    @property
    def trains_policy(self) -> bool:
        """True if rollouts are trained on with a policy loss."""
        return self.on_policy and (self.placement == "advantage" or self.task_coef != 0)

    @property
    def reads_rewards(self) -> bool:
        """True if the credit or a mask reads the rewards of rollouts."""
        return bool(self.task_coef or self.difficulty_mask or self.error_max_len_clip or self.positive_nll_coef)

    @property
    def sampling_temperature(self) -> float:
        """Temperature of the rollouts' logprobs; 1 for greedy sampling and without rollouts."""
        return (self.rollout_infer.generating_args.temperature or 1.0) if self.rolls_out else 1.0

    @property
    @override
    def temperature(self) -> float:
        """`kd_temperature`, or its default."""
        return self.kd_temperature or self.sampling_temperature

    @property
    @override
    def generates(self) -> bool:
        return self.replay_rollouts is None and (self.on_policy or self.validation is not None)

    @property
    @override
    def max_new_tokens(self) -> int:
        return self.rollout_infer.generating_args.max_new_tokens or self.response_length

    @property
    @override
    def recomputes_logprobs(self) -> bool:
        return self.trains_policy and super().recomputes_logprobs

    @property
    @override
    def correction(self) -> TrainInferCorrectionConfig:
        if self.trains_policy:
            return super().correction
        correction = self.train_infer_correction
        return correction.model_copy(
            update={"is_weight": correction.is_weight.model_copy(update={"enabled": False}), "filters": []}
        )
