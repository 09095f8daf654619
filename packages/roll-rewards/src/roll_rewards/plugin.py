"""Hooks that provide this package's parts. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import CheckProvider, EnvironmentProvider, FragmentProvider, RewardProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    """A user's functions, programs against tests, rules, services, and combinations."""
    yield RewardProvider(
        name="function",
        target="roll_rewards.function:FunctionReward",
        config="roll_rewards.function_config:FunctionConfig",
        enforces_timeout=True,
        summary="A Python function of the user",
    )
    yield RewardProvider(
        name="code",
        target="roll_rewards.code:CodeReward",
        config="roll_rewards.config:CodeConfig",
        enforces_timeout=True,
        summary="Whether the response's program passes its tests, in a sandbox",
    )
    yield RewardProvider(
        name="math_rule",
        target="roll_rewards.math_rule:MathRuleReward",
        config="roll_rewards.config:MathRuleConfig",
        needs=("math-verify[antlr4_9_3]>=0.8",),
        enforces_timeout=True,
        summary="1 if the response's final answer equals the ground truth, mathematically",
    )
    for name, target, schema, summary in (
        ("exact_match", "answers:ExactMatch", "ExactMatchConfig", "1 if the answer equals the ground truth as text"),
        ("f1", "answers:F1", "F1Config", "Words that the answer has in common with the ground truth"),
        ("multiple_choice", "answers:MultipleChoice", "MultipleChoiceConfig", "1 if the answer names the right letter"),
        ("crossthink_qa", "answers:CrossThinkQA", "CrossThinkQAConfig", "1 if the answer is the right choice or text"),
        ("format", "rules:Format", "FormatConfig", "1 if the response matches a pattern"),
        ("length_penalty", "rules:LengthPenalty", "LengthPenaltyConfig", "Penalty of long responses"),
        ("repetition_penalty", "rules:RepetitionPenalty", "RepetitionPenaltyConfig", "Penalty of repeated n-grams"),
        ("ifeval", "ifeval:IFEvalReward", "IFEvalConfig", "Verifiable instructions of IFEval"),
        ("judge", "judges:JudgeReward", "JudgeConfig", "Score of a language model behind OpenAI's API"),
        (
            "judge_model",
            "judges:JudgeModelReward",
            "JudgeModelConfig",
            "Score of a language model, a role of its own",
        ),
        ("http", "services:HttpReward", "HttpConfig", "Value that an HTTP endpoint returns"),
        ("composite", "composite:CompositeReward", "CompositeConfig", "Weighted sum of other rewards"),
    ):
        yield RewardProvider(
            name=name, target=f"roll_rewards.{target}", config=f"roll_rewards.config:{schema}", summary=summary
        )


@hookimpl
def roll_config_fragments() -> Iterator[FragmentProvider]:
    """Columns, sampling parameters and rewards of benchmarks, for `pipeline: evaluate`."""
    for name, summary in (
        ("gsm8k", "GSM8K: one greedy response"),
        ("math_500", "MATH-500: four responses, by subject"),
        ("aime", "AIME: 64 responses"),
        ("ifeval", "IFEval: one greedy response, all instructions"),
        ("gpqa", "GPQA: four responses, choices in a random order"),
        ("humaneval", "HumanEval: ten responses, programs in the sandbox"),
        ("livecodebench", "LiveCodeBench: ten responses, programs in the sandbox, by difficulty"),
    ):
        yield FragmentProvider(name=name, target=f"roll_rewards.fragments.config:{name}.yaml", summary=summary)


@hookimpl
def roll_environments() -> Iterator[EnvironmentProvider]:
    """Rewards as the score of episodes."""
    yield EnvironmentProvider(
        name="rewarded_task",
        target="roll_rewards.task:RewardedTask",
        config="roll_rewards.config:RewardedTaskConfig",
        summary="Rows of data, scored by a reward, with feedback between attempts",
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Check of the sandbox."""
    yield CheckProvider(
        name="sandbox",
        target="roll_rewards.checks:sandbox",
        summary="Isolation of the programs that the reward `code` runs",
    )
