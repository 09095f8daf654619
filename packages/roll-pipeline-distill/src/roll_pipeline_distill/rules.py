"""Combinations of keys that `distill` refuses, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TOPK = ("teacher_topk", "student_topk", "stored")
"""Values of `kd_support` with K tokens."""
REVERSE = ("reverse_kl", "skewed_reverse_kl")
"""Divergences that are expectations of the student."""
SUPPORTS = {
    "student": ("sampled", "teacher_topk", "student_topk", "full"),
    "teacher": ("sampled", "teacher_topk", "student_topk", "full"),
    "dataset": ("teacher_topk", "student_topk", "full", "stored"),
    "mix": ("teacher_topk", "student_topk", "full"),
}
"""Values of `kd_support` by `distill_data`."""
SERVED = (("student", "sampled"), ("student", "teacher_topk"), ("dataset", "teacher_topk"), ("mix", "teacher_topk"))
"""Values of `distill_data` and `kd_support` whose logprobs `served_teachers` can return."""
ESTIMATED = {"student": "reverse_kl", "teacher": "forward_kl"}
"""Divergence that the samples of a model estimate, by `distill_data`."""

Rule = tuple[Callable[[Any], Any], str]
"""When a `DistillConfig` is refused, and the reason: a format string with the config as `c`."""

RULES: tuple[Rule, ...] = (
    # data and engines
    (
        lambda c: not c.actor_train.data_args.file_name,
        "actor_train.data_args.file_name is missing: name the files with prompts or responses",
    ),
    (
        lambda c: c.generates and not c.has_engine and c.on_policy,
        "actor_infer is missing: distill_data {c.distill_data} generates responses with it",
    ),
    (
        lambda c: c.generates and not c.has_engine,
        "actor_infer is missing: validation generates responses with it",
    ),
    (
        lambda c: c.has_engine and not c.on_policy and c.validation is None,
        "actor_infer is not used: distill_data {c.distill_data} has no rollouts of the student; remove it",
    ),
    (
        lambda c: c.distill_data == "teacher" and c.teacher_infer is None,
        "teacher_infer is missing: distill_data teacher generates responses with it",
    ),
    (
        lambda c: c.distill_data != "teacher" and c.teacher_infer is not None,
        "teacher_infer is not used: distill_data is {c.distill_data}; set distill_data: teacher",
    ),
    (
        lambda c: c.async_generation_ratio and not c.on_policy,
        "async_generation_ratio is for rollouts of the student, but distill_data is {c.distill_data}: remove it, or set"
        " distill_data: student",
    ),
    (
        lambda c: c.distill_on_prompt and not c.reads_rows,
        "distill_on_prompt is for rows: set distill_data: dataset or mix, or remove it",
    ),
    # rewards
    (
        lambda c: c.rewards and not c.rolls_out and not c.generates,
        "rewards score generated responses, but distill_data dataset generates none: remove them",
    ),
    (
        lambda c: c.task_coef and not (c.rewards and c.on_policy),
        "task_coef weighs rewards of the student's rollouts: configure rewards, and distill_data student or mix",
    ),
    # teachers
    (
        lambda c: c.teachers and c.teacher_samples,
        "teachers are not used: with kd_support sampled, teacher_infer returns the logprobs of its own samples; remove"
        " teachers, and name the model in teacher_infer.model_args",
    ),
    (
        lambda c: c.teachers and c.self_teacher,
        "teachers are not used with self_teacher: remove one of them",
    ),
    (
        lambda c: c.teachers and c.kd_support == "stored",
        "teachers are not used with kd_support stored: remove one of them",
    ),
    (
        lambda c: c.served_teachers and c.kd_support not in ("sampled", "teacher_topk"),
        "served_teachers return logprobs of the sequence's tokens and of the most likely ones, but kd_support is"
        " {c.kd_support}: set sampled or teacher_topk, or configure teachers",
    ),
    (
        lambda c: c.served_teachers and (c.distill_data, c.kd_support) not in SERVED,
        "served_teachers score rollouts of the student, or rows with kd_support teacher_topk, but distill_data is"
        " {c.distill_data}: set distill_data: student, or configure teachers",
    ),
    (
        lambda c: c.served_teachers and c.teachers,
        "served_teachers and teachers are alternatives: remove one of them",
    ),
    (
        lambda c: c.served_teachers and c.self_teacher,
        "served_teachers and self_teacher are alternatives: remove one of them",
    ),
    (
        lambda c: c.served_teachers and c.temperature != 1,
        "served_teachers return logprobs at temperature 1, but the temperature is {c.temperature:g}: set"
        " actor_infer.generating_args.temperature: 1, or configure teachers",
    ),
    (
        lambda c: (
            not (c.teachers or c.served_teachers or c.self_teacher or c.teacher_samples) and c.kd_support != "stored"
        ),
        "teachers is empty: configure at least one, for example teachers.main",
    ),
    (
        lambda c: c.kd_support == "full" and len(c.teachers) > 1,
        "teachers are several, but kd_support full applies the head of one teacher: configure one, or set kd_support:"
        " teacher_topk or student_topk",
    ),
    (
        lambda c: c.distill_data == "teacher" and len(c.teachers) > 1,
        "teachers are several, but distill_data teacher has one engine, teacher_infer: configure one teacher",
    ),
    # another prompt, stored logprobs
    (
        lambda c: c.teacher_prompt is not None and c.distill_data == "teacher",
        "teacher_prompt gives the teacher another prompt, but distill_data teacher needs the same: remove one",
    ),
    (
        lambda c: c.teacher_prompt is not None and c.distill_on_prompt,
        "teacher_prompt gives the teacher another prompt, but distill_on_prompt needs the same: remove one",
    ),
    (
        lambda c: c.kd_support == "stored" and c.self_teacher,
        "self_teacher is not used with kd_support stored: remove it",
    ),
    (
        lambda c: c.kd_support == "stored" and c.teacher_prompt is not None,
        "teacher_prompt is not used with kd_support stored: remove it",
    ),
    (
        lambda c: c.kd_support == "stored" and (c.distill_data != "dataset" or c.distill_on_prompt),
        "kd_support stored reads logprobs of responses from rows: set distill_data: dataset, without distill_on_prompt",
    ),
    (
        lambda c: c.kd_support == "stored" and c.temperature != 1,
        "kd_temperature is {c.temperature:g}, but stored logprobs have temperature 1: remove it",
    ),
    # self-distillation
    (
        lambda c: c.self_teacher and c.distill_data == "teacher",
        "self_teacher has no engine of its own: set distill_data: student or dataset",
    ),
    (
        lambda c: c.self_teacher and c.kd_support == "full",
        "self_teacher has no fixed head of its own: set kd_support: student_topk",
    ),
    (
        lambda c: c.self_teacher == "policy" and c.teacher_prompt is None,
        "self_teacher policy equals the student, so nothing is learnt: name a teacher_prompt column",
    ),
    (
        lambda c: c.self_teacher == "ema" and not (c.teacher_prompt is not None or c.task_coef or c.nll_coef),
        "self_teacher ema begins as the student, and nothing moves the student away: name a teacher_prompt column, or"
        " set task_coef or nll_coef",
    ),
    (
        lambda c: c.self_teacher == "ema" and c.portable_checkpoints,
        "portable_checkpoints contain no moving average, which self_teacher ema needs to resume: remove one of them",
    ),
    (
        lambda c: c.self_teacher == "base" and not c.actor_train.model_args.trains_adapters,
        "self_teacher base is the model without adapters, but actor_train trains none: set lora_target",
    ),
    # what is compared, and where
    (
        lambda c: c.kd_support != "sampled" and c.placement == "advantage",
        "kd_placement is advantage with kd_support {c.kd_support}: the divergence does not depend on the sampled token,"
        " so it is a baseline and its expected gradient is zero; set kd_placement: loss, or kd_support: sampled",
    ),
    (
        lambda c: c.kd_support in TOPK and c.kd_tail == "drop" and c.objective in REVERSE,
        "kd_tail is drop with kd_objective {c.objective} over K tokens: moving probability out of them minimises it;"
        " set kd_tail: bucket",
    ),
    (
        lambda c: c.kd_discount and c.placement == "loss",
        "kd_discount is used by advantages only: remove it, or set kd_placement: advantage",
    ),
    (
        lambda c: c.kd_support not in SUPPORTS[c.distill_data],
        "kd_support is sampled with distill_data {c.distill_data}: it estimates a KL from samples of the student or the"
        " teacher; set distill_data: student or teacher, or kd_support: full",
    ),
    (
        lambda c: c.teacher_samples and c.placement == "advantage",
        "kd_placement is advantage with distill_data teacher: advantages need samples of the student; set kd_placement:"
        " loss, or distill_data: student",
    ),
    *(
        (
            lambda c, data=data, estimated=estimated: (
                (c.kd_support, c.distill_data) == ("sampled", data) and c.objective != estimated
            ),
            f"kd_objective is {{c.objective}} with kd_support sampled: samples of the {data} estimate only {estimated};"
            " remove it, or set kd_support: full, teacher_topk or student_topk",
        )
        for data, estimated in ESTIMATED.items()
    ),
    # temperatures and terms
    (
        lambda c: c.logprob_temperature is not None,
        "logprob_temperature is {c.logprob_temperature:g}, but logprobs of student and teacher have kd_temperature,"
        " {c.temperature:g}: remove logprob_temperature",
    ),
    (
        lambda c: (c.kd_support == "sampled" or c.task_coef) and c.kd_temperature not in (None, c.sampling_temperature),
        "kd_temperature is {c.kd_temperature:g}, but the rollouts' temperature is {c.sampling_temperature:g}: logprobs"
        " of sampled tokens need the same; remove kd_temperature",
    ),
    (
        lambda c: c.nll_coef and c.placement == "advantage",
        "nll_coef is added to a divergence as a loss: set kd_placement: loss, or remove nll_coef",
    ),
    (
        lambda c: c.nll_coef and c.temperature != 1,
        "nll_coef weighs logprobs at temperature 1, but kd_temperature is {c.temperature:g}: remove one of them",
    ),
)


def check(config: Any) -> None:
    """Raise `ValueError` with the reason of the first rule that refuses a `DistillConfig`."""
    for refuses, reason in RULES:
        if refuses(config):
            raise ValueError(reason.format(c=config))
