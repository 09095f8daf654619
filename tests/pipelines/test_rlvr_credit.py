"""From judged samples to advantages, against numbers worked out by hand."""

import asyncio
import pkgutil
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from roll_core.algorithms.correction_options import TrainInferCorrectionConfig
from roll_core.data.rollouts import sample_of_rollout
from roll_core.errors import UnsupportedError
from roll_core.pipelines.config import RLVRConfig
from roll_core.pipelines.experience import Experience, correct, sample_metrics
from roll_core.pipelines.plans import rlvr as plan
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry
from roll_core.spec.pipeline import NamedPart, ScoredSequences, UpdateResult
from roll_core.spec.rollout import Prompt
from roll_core.types import Group, Reward, Rollout, Sample, TurnRecord
from roll_testing.errors import raises_error

REGISTRY = Registry(load_plugins(environ={"ROLL_PLUGINS": ""})[:1])


def config(**given) -> RLVRConfig:
    role = {"training_args": {"per_device_train_batch_size": 4}}
    base = {
        "pipeline": "rlvr",
        "rollout_batch_size": 2,
        "num_return_sequences_in_group": 2,
        "actor_train": role | {"data_args": {"file_name": "x.jsonl"}},
        "actor_infer": {},
        "rewards": {"only": {"reward": "function"}},
        "max_steps": 3,
    }
    return RLVRConfig.model_validate(base | given)


class FakeRole:
    """Answers what the test says and remembers what it was given."""

    def __init__(self, logprob: float = 0.0, value: float = 0.0, num_skipped: int = 0) -> None:
        self.logprob, self.value, self.num_skipped = logprob, value, num_skipped
        self.updates, self.shuffle_seeds, self.max_steps = [], [], []

    async def score(self, sequences, want):
        assert not want.base, "there is a reference"
        assert want.masked_only or not want.logprobs, "logits of prompts are not read"

        def rows(number):
            return [np.where(s.loss_mask, number, 0).astype(np.float32) for s in sequences]

        return ScoredSequences(
            logprobs=rows(self.logprob) if want.logprobs else None, values=rows(self.value) if want.values else None
        )

    async def update(self, sequences, loss, *, epochs=1, max_length=1, max_steps=None, shuffle_seed=None):
        self.updates.append((list(sequences), loss, epochs, max_length))
        self.shuffle_seeds.append(shuffle_seed)
        self.max_steps.append(max_steps)
        metrics = {"loss": 0.0, "grad_norm": 1.0}
        return UpdateResult(metrics=metrics, num_steps=1, num_skipped=self.num_skipped, num_tokens=10)


class FakeRun:
    """A run without an engine: the rollouts are given."""

    tokenizer = SimpleNamespace(eos_token_id=None, name_or_path="")
    dir: Path

    def __init__(self, groups=(), roles=None) -> None:
        self.groups, self.step = list(groups), 0
        self.roles = roles or {}
        self.metrics, self.tripped, self.published = {}, [], []

    def prompts(self, data):
        return [Prompt(id=str(i), tokens=np.array([5]), text="?") for i in range(4)]

    def part(self, kind, name, options):
        provider = REGISTRY.find(kind, name)
        return NamedPart(
            provider=provider, owner=name, options=options, load=partial(pkgutil.resolve_name, provider.target)
        )

    def train_role(self, name):
        return self.roles[name]

    def stage(self, name):
        return nullcontext()

    def log(self, metrics):
        self.metrics |= metrics

    def log_samples(self, samples, split="train"):
        self.samples = list(samples)

    def guard(self, guard_id, ok, message, *, fatal=False):
        if not ok:
            self.tripped.append((guard_id, message))

    async def publish_weights(self, source, target):
        self.published.append((source, target))

    def infer_role(self, name):
        return SimpleNamespace(weight_version=1)

    def rollout_batches(self, role, plan):
        self.plan = plan
        return self

    async def batch(self):
        return self.groups


@pytest.fixture(autouse=True)
def _run_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(FakeRun, "dir", tmp_path, raising=False)


def sample(
    group: int, index: int, reward: float | None, length: int = 2, finish: str = "stop", tag: str = ""
) -> Sample:
    return Sample(
        id=f"{group}/{index}",
        group_id=str(group),
        prompt_ids=np.array([7, 8]),
        response_ids=np.arange(length),
        logprobs=np.full(length, -0.5, dtype=np.float32),
        loss_mask=np.ones(length, dtype=bool),
        versions=np.ones(length, dtype=np.int32),
        finish_reason=finish,
        tag=tag,
        reward=Reward(value=reward) if reward is not None else Reward(value=None, failure="broke"),
    )


def groups_of(*rewards: tuple[float | None, ...], tags: str = "") -> list[Group]:
    """One group for each tuple of rewards; `tags` has a letter for each."""
    return [
        Group(id=str(g), samples=tuple(sample(g, i, r, tag=tags[g : g + 1]) for i, r in enumerate(group)))
        for g, group in enumerate(rewards)
    ]


def step(groups, roles=None, **given):
    run = FakeRun(groups, {"actor_train": FakeRole()} | (roles or {}))
    pipeline = RLVRPipeline(config(**given))
    pipeline.prepare(run)
    asyncio.run(pipeline.setup(run))
    asyncio.run(pipeline.step(run))
    return run, run.roles["actor_train"].updates[0][0] if run.roles["actor_train"].updates else []


def test_grpo_gives_every_token_its_groups_normalised_reward():
    # Group 0: rewards 1 and 0, mean 1/2, unbiased deviation sqrt(1/2): advantages ±0.5/sqrt(0.5) = ±sqrt(1/2).
    # Group 1: equal rewards, no spread: 0.
    run, sequences = step(groups_of((1.0, 0.0), (1.0, 1.0)))
    expected = [[0.5**0.5] * 2, [-(0.5**0.5)] * 2, [0, 0], [0, 0]]
    for sequence, advantages in zip(sequences, expected, strict=True):
        assert sequence.advantages == pytest.approx([0, 0, *advantages], abs=1e-5)
    assert run.metrics["score/mean"] == 0.75
    assert run.metrics["groups/mixed_share"] == 0.5
    assert run.published == [("actor_train", "actor_infer")]


def test_remax_baseline_is_greedy_and_never_trained():
    # Greedy responses: reward 0.5, and 1 less a penalty of 1/2 for its third of at most 4 tokens, of which 2 are free.
    groups = [
        replace(group, baseline=sample(at, 9, reward, length=length))
        for at, (group, reward, length) in enumerate(
            zip(groups_of((1.0, 0.0), (1.0, None)), (0.5, 1.0), (1, 3), strict=True)
        )
    ]
    run, sequences = step(
        groups, adv_estimator="remax", response_length=4, soft_overlong_penalty={"l_cache": 2}, min_group_size=1
    )
    assert [sequence.id for sequence in sequences] == ["0/0", "0/1", "1/0"]
    for sequence, advantage in zip(sequences, (0.5, -0.5, 0.5), strict=True):
        assert sequence.advantages == pytest.approx([0, 0, advantage, advantage])
    assert run.metrics["baseline/score/mean"] == 0.75
    assert run.metrics["baseline/response_length/mean"] == 2.0
    assert run.metrics["tokens/generated"] == 4 * 2 + 1 + 3
    assert run.metrics["score/mean"] == pytest.approx(2 / 3)
    assert all("9" not in each.id for each in run.samples)


def test_group_without_greedy_reward_is_not_trained():
    baselines = sample(0, 9, None), sample(1, 9, 0.0)
    groups = [
        replace(each, baseline=baseline)
        for each, baseline in zip(groups_of((1.0, 0.0), (1.0, 0.0)), baselines, strict=True)
    ]
    run, sequences = step(groups, adv_estimator="remax")
    assert [sequence.id for sequence in sequences] == ["1/0", "1/1"]
    assert run.metrics["reward/failures"] == 1.0


def test_remax_refuses_groups_of_a_run_without_greedy_responses():
    with raises_error(UnsupportedError, "adv_estimator"):
        step(groups_of((1.0, 0.0), (1.0, 1.0)), adv_estimator="remax")


def test_failed_reward_is_excluded_from_group_statistics():
    # Were the failure a 0, the other sample would get a positive advantage. Alone in its group it gets none.
    run, sequences = step(groups_of((1.0, None), (1.0, 0.0)))
    assert [sequence.id for sequence in sequences] == ["0/0", "1/0", "1/1"]
    assert sequences[0].advantages == pytest.approx([0, 0, 0, 0])
    assert run.metrics["reward/failures"] == 1.0
    assert run.metrics["score/mean"] == pytest.approx(2 / 3)


def test_step_whose_rewards_all_failed_trains_nothing():
    run, sequences = step(groups_of((None, None), (None, None)))
    assert not sequences
    assert [guard for guard, _ in run.tripped] == ["all_groups_filtered"]


def test_a_step_without_any_spread_trips_the_guard():
    run, _ = step(groups_of((1.0, 1.0), (0.0, 0.0)))
    assert [guard for guard, _ in run.tripped] == ["all_groups_filtered"]


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_tags_of_one_reward_are_normalised_together(statistics):
    # Tags a and b belong to "easy": rewards 1, 1, 0, 0 have the mean 1/2. Tag c alone is "hard": 5 and 3 have 4.
    rewards = {
        "easy": {"reward": "function", "tag_included": ["a", "b"]},
        "hard": {"reward": "function", "tag_included": ["c"]},
    }
    _, sequences = step(
        groups_of((1.0, 1.0), (0.0, 0.0), (5.0, 3.0), tags="abc"),
        rewards=rewards,
        adv_estimator="reinforce",
        norm_mean_type=statistics,
        norm_std_type=statistics,
    )
    easy, hard = (1 / 3) ** 0.5, 2**0.5  # unbiased: sum of squares 1 over 3, and 2 over 1
    expected = [0.5 / easy, 0.5 / easy, -0.5 / easy, -0.5 / easy, 1 / hard, -1 / hard]
    assert [each.advantages[-1] for each in sequences] == pytest.approx(expected, rel=1e-5)


def test_an_only_reward_is_one_domain_whatever_the_tags():
    _, sequences = step(groups_of((1.0, 1.0), (0.0, 0.0), tags="ab"), adv_estimator="reinforce", norm_mean_type="batch")
    assert [each.advantages[-1] for each in sequences] == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_kl_in_the_reward_is_charged_where_it_arises():
    # k1 per token: logprob -0.5 less reference -0.8 = 0.3, coefficient 0.1: -0.03 per token. gamma 1, REINFORCE:
    # the first token sees both charges and the reward, the last one charge and the reward.
    roles = {"actor_train": FakeRole(logprob=-0.5), "reference": FakeRole(logprob=-0.8)}
    run, sequences = step(
        groups_of((1.0, 0.0), (1.0, 0.0)),
        roles,
        adv_estimator="reinforce",
        add_token_level_kl=True,
        init_kl_coef=0.1,
        reference={},
    )
    assert sequences[0].advantages == pytest.approx([0, 0, 1 - 0.06, 1 - 0.03], abs=1e-6)
    assert sequences[1].advantages == pytest.approx([0, 0, -0.06, -0.03], abs=1e-6)
    assert run.metrics["kl/mean"] == pytest.approx(0.3)
    assert run.metrics["kl/coef"] == 0.1


@pytest.mark.parametrize(
    ("given", "mean"),
    [
        ({}, (0.1 + 0.4) / 2),
        ({"target_kl_agg_mode": "seq-mean-token-mean"}, (0.1 + 0.4) / 2),
        ({"target_kl_agg_mode": "token-mean"}, (1 * 0.1 + 3 * 0.4) / 4),
    ],
)
def test_adaptive_kl_is_averaged_as_configured(given, mean):
    """One token at a KL of 0.1, three at 0.4. verl and ROLL average each sequence first."""
    reference = FakeRole()

    async def score(sequences, want):
        rows = zip(sequences, (-0.6, -0.9), strict=True)
        return ScoredSequences(logprobs=[np.where(s.loss_mask, logprob, 0).astype(np.float32) for s, logprob in rows])

    reference.score = score
    run = FakeRun([Group(id="0", samples=(sample(0, 0, 1.0, length=1), sample(0, 1, 0.0, length=3)))])
    run.roles = {"actor_train": FakeRole(logprob=-0.5), "reference": reference}
    kl = {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.3, "kl_horizon": 100, "reference": {}}
    pipeline = RLVRPipeline(config(adv_estimator="reinforce", **kl, **given))
    pipeline.prepare(run)
    asyncio.run(pipeline.setup(run))
    asyncio.run(pipeline.step(run))
    assert run.metrics["kl/mean"] == pytest.approx(mean, abs=1e-6)
    assert pipeline.stages.credit.kl.coef == pytest.approx(0.1 * (1 + (mean / 0.3 - 1) * 2 / 100))


class NoisyRole(FakeRole):
    """Logprobs that differ from token to token."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    async def score(self, sequences, want):
        rows = [np.where(s.loss_mask, -self.rng.random(len(s)), 0).astype(np.float32) for s in sequences]
        return ScoredSequences(logprobs=rows)


def documented_recipe(name: str) -> dict[str, Any]:
    """The keys that docs/algorithms.md gives; `...` is what a config fills in."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {re.escape(name)} \(.*\) \| (.*) \|$", page, re.MULTILINE)
    keys = [key.partition(": ") for key in re.findall(r"`(.*?)`", row)]
    return {key: {} if value == "..." else yaml.safe_load(value) for key, _, value in keys}


def whitened(rows: list[list[float]]) -> list[list[float]]:
    """verl's `masked_whiten`: over all response tokens of the batch, with the unbiased variance."""
    tokens = [value for row in rows for value in row]
    mean = sum(tokens) / len(tokens)
    variance = sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1)
    return [[(value - mean) / (variance + 1e-8) ** 0.5 for value in row] for row in rows]


@pytest.mark.parametrize("name", ["REINFORCE++", "REINFORCE++-baseline"])
def test_the_documented_recipe_gives_the_papers_advantages(name):
    """As verl's `compute_reinforce_plus_plus_{,baseline_}outcome_advantage`: the KL is charged token by token, then the
    returns are whitened; the baseline of the other is the group's mean, and its KL is in the loss."""
    scores, lengths, beta = (1.0, 0.0, 1.0, 1.0), (3, 5, 2, 4), 0.1
    samples = [sample(i // 2, i % 2, scores[i], length=lengths[i]) for i in range(4)]
    groups = [Group(id=str(g), samples=tuple(samples[2 * g : 2 * g + 2])) for g in range(2)]
    recipe = documented_recipe(name)
    roles = {"actor_train": NoisyRole(0), "reference": NoisyRole(1)}
    _, sequences = step(groups, roles, init_kl_coef=beta, **recipe)

    returns = []
    for i, each in enumerate(sequences):
        if name == "REINFORCE++-baseline":
            group = scores[i // 2 * 2 : i // 2 * 2 + 2]
            returns.append([scores[i] - sum(group) / 2] * lengths[i])
            continue
        kl = (each.old_logprobs - each.ref_logprobs)[2:].tolist()
        to_go, running = [], scores[i]
        for t in reversed(range(lengths[i])):
            running = running - beta * kl[t]
            to_go.append(running)
        returns.append(to_go[::-1])
    for each, expected in zip(sequences, whitened(returns), strict=True):
        assert each.advantages[2:] == pytest.approx(expected, abs=1e-5)
    if name == "REINFORCE++-baseline":
        assert (recipe["use_kl_loss"], recipe["kl_loss_penalty"]) == (True, "k2")


def test_kl_coefficient_adapts_after_the_step():
    # KL 0.3 per token against a target of 0.1: the next coefficient is larger, this step's charge is the old one.
    roles = {"actor_train": FakeRole(logprob=-0.5), "reference": FakeRole(logprob=-0.8)}
    groups = groups_of((1.0, 0.0), (1.0, 0.0))
    given = {"adv_estimator": "reinforce", "add_token_level_kl": True, "init_kl_coef": 0.1, "reference": {}}
    run, sequences = step(groups, roles, target_kl=0.1, kl_horizon=4, **given)
    assert sequences[1].advantages == pytest.approx([0, 0, -0.06, -0.03], abs=1e-6)
    assert run.metrics["kl/coef"] == 0.1


def with_details(groups, *details):
    """The groups with these details of their rewards, in order; None leaves a sample as it is."""
    rest = iter(details)

    def of(each):
        detail = next(rest)
        return each if detail is None else replace(each, reward=replace(each.reward, detail=detail))

    return [replace(group, samples=tuple(map(of, group.samples))) for group in groups]


def test_components_of_rewards_are_metrics_of_their_domain():
    rewards = {name: {"reward": "function"} for name in "ab"}
    groups = with_details(
        groups_of((1.0, 0.0), (1.0, None), tags="ab"),
        {"accuracy": 1.0, "answer": "7"},
        {"accuracy": 0.0, "format": 1.0},
        {"accuracy": 0.25},
        {"accuracy": 9.0},  # of a failed reward
    )
    run, _ = step(groups, rewards=rewards)
    found = {name: value for name, value in run.metrics.items() if name.startswith(("reward/a/", "reward/b/"))}
    assert found == {"reward/a/accuracy/mean": 0.5, "reward/a/format/mean": 1.0, "reward/b/accuracy/mean": 0.25}


def test_gdpo_reads_the_components_of_rewards():
    # accuracy alone has spread in group 0: ±sqrt(1/2) there and 0 in group 1, whose component is missing.
    groups = with_details(groups_of((7.0, 7.0), (1.0, 0.0)), {"accuracy": 1.0}, {"accuracy": 0.0}, None, None)
    options = {"weights": {"accuracy": 2.0}, "batch_norm": False}
    _, sequences = step(groups, adv_estimator="gdpo", adv_options=options)
    assert [each.advantages[-1] for each in sequences] == pytest.approx([2**0.5, -(2**0.5), 0, 0], abs=1e-5)


def test_long_responses_lose_reward_before_it_is_normalised():
    # L_max 6, L_cache 4: 4 tokens lose (2 - 4) / 4 = -0.5, 2 tokens nothing; filters and masks read the raw reward.
    groups = [Group(id="0", samples=(sample(0, 0, 1.0, length=4), sample(0, 1, 0.0)))]
    penalty = {"l_max": 6, "l_cache": 4, "penalty_factor": 1.0}
    given = {"adv_estimator": "reinforce", "response_length": 6, "soft_overlong_penalty": penalty}
    run, sequences = step(groups, difficulty_mask=True, difficulty_low_threshold=0.4, **given)
    assert [each.advantages[-1] for each in sequences] == [0.5, 0.0]
    assert run.metrics["reward/overlong_penalty/mean"] == -0.25
    assert run.metrics["score/mean"] == 0.5


def test_groups_with_too_few_rewards_give_no_signal():
    groups = groups_of((1.0, 0.0, None), (4.0, None, None), (0.5, 0.0, 0.25))
    size = {"num_return_sequences_in_group": 3, "rollout_batch_size": 4}
    size["actor_train"] = {
        "training_args": {"per_device_train_batch_size": 12},
        "data_args": {"file_name": "x.jsonl"},
    }
    _, sequences = step(groups, adv_estimator="reinforce", norm_mean_type="batch", min_group_size=2, **size)
    # The batch's mean does not contain the reward 4: (1 + 0 + 0.5 + 0 + 0.25) / 5 = 0.35.
    assert [each.id for each in sequences] == ["0/0", "0/1", "2/0", "2/1", "2/2"]
    assert [each.advantages[-1] for each in sequences] == pytest.approx([0.65, -0.35, 0.15, -0.35, -0.1])
    run, sequences = step(groups[1:2], min_group_size=2, **size)
    assert sequences == []
    assert [guard for guard, _ in run.tripped] == ["all_groups_filtered"]


def cut(experience: Experience) -> Experience:
    """Each rollout as two rows: the prompt with all but its last two tokens, and the prompt with these."""
    rows = []
    for index, row in enumerate(experience.sequences):
        for keep in (slice(0, len(row) - 2), slice(len(row) - 2, len(row))):
            at = np.r_[0:2, keep][2 * (keep.start == 0) :]
            rows.append(
                replace(
                    row,
                    tokens=row.tokens[at],
                    loss_mask=row.loss_mask[at],
                    behaviour_logprobs=row.behaviour_logprobs[at],
                    rollout=index,
                )
            )
    return replace(experience, rows=tuple(rows))


RECIPES = [
    {"adv_estimator": "grpo"},
    {"adv_estimator": "rloo"},
    {"adv_estimator": "opo"},
    {"adv_estimator": "reinforce++_baseline"},
    {"adv_estimator": "pass_at_k", "adv_options": {"k": 1}},
    {"adv_estimator": "reinforce", "gamma": 0.9, "norm_mean_type": "batch", "norm_std_type": "group"},
    {"adv_estimator": "reinforce++", "gamma": 0.9},
    {"adv_estimator": "grpo", "difficulty_mask": True, "max_len_mask": True},
    {"adv_estimator": "grpo", "train_infer_correction": {"is_weight": {"enabled": True, "weight_type": "sequence"}}},
    {
        "adv_estimator": "grpo",
        "train_infer_correction": {
            "is_weight": {"enabled": True, "weight_type": "geometric", "batch_normalize": True},
            "filters": [{"enabled": True, "agg_type": "sequence", "ratio_low": 0.1, "ratio_high": 9.0}],
            "off_policy_mask_threshold": 0.1,
        },
    },
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_cutting_rollouts_into_rows_changes_no_advantage(recipe, monkeypatch):
    """Group statistics, discounts, masks and corrections are those of the rollout."""
    samples = [sample(i // 2, i % 2, (1.0, 0.0, 0.25, 1.0)[i], length=(5, 4, 6, 3)[i]) for i in range(4)]
    samples = [replace(each, logprobs=np.linspace(-0.9, -0.3, len(each.response_ids), dtype="f4")) for each in samples]
    samples[2] = replace(samples[2], finish_reason="length")
    groups = [Group(id=str(g), samples=tuple(samples[2 * g : 2 * g + 2])) for g in range(2)]
    _, whole = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, **recipe)
    of = Experience.of
    monkeypatch.setattr(Experience, "of", lambda *args, **given: cut(of(*args, **given)))
    monkeypatch.setattr("roll_core.pipelines.stages.logprob_gaps", lambda *args: (None, None))
    _, rows = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, **recipe)
    assert len(rows) == 2 * len(whole)
    for index, each in enumerate(whole):
        parts = rows[2 * index : 2 * index + 2]
        assert parts[0].rollout == parts[1].rollout
        found = np.concatenate([part.advantages[part.loss_mask] for part in parts])
        assert found == pytest.approx(each.advantages[each.loss_mask], abs=1e-6)


def test_constants_of_the_formulas_are_keys():
    # Rewards 1 and 0 have the deviation sqrt(1/2), below 0.8: they are not divided.
    _, sequences = step(groups_of((1.0, 0.0)), norm_epsilon=0.8)
    assert sequences[0].advantages[-1] == 0.5
    _, sequences = step(groups_of((1.0, 0.0)), adv_estimator="reinforce", norm_mean_type="group", norm_std_type="group",
                        norm_epsilon=0.5)  # fmt: skip
    assert sequences[0].advantages[-1] == pytest.approx(0.5 / (0.5**0.5 + 0.5))
    # Tokens 1, 1, 0, 0: mean 0.5, unbiased variance 1/3.
    _, sequences = step(groups_of((1.0, 0.0)), adv_estimator="reinforce", gamma=1.0, whiten_advantages=True,
                        whiten_epsilon=2 / 3)  # fmt: skip
    assert sequences[0].advantages[-1] == pytest.approx(0.5)
    critic = FakeRole()
    step(
        groups_of((1.0, 0.0)), {"critic": critic}, value_loss_coef=2.0, value_loss_agg_mode="seq-mean-token-mean", **PPO
    )
    objective = critic.updates[0][1]
    assert (objective.coef, objective.aggregation) == (2.0, "seq-mean-token-mean")


def test_the_clip_of_the_kl_controllers_error_is_a_key():
    # KL 0.3 against a target of 0.1: the error 2 is clipped to 0.5; 2 samples of a horizon of 4: a factor of 1.25.
    roles = {"actor_train": FakeRole(logprob=-0.5), "reference": FakeRole(logprob=-0.8)}
    run = FakeRun(groups_of((1.0, 0.0)), roles)
    given = {"adv_estimator": "reinforce", "add_token_level_kl": True, "init_kl_coef": 0.1, "reference": {}}
    pipeline = RLVRPipeline(config(target_kl=0.1, kl_horizon=4, kl_error_clip=0.5, **given))
    pipeline.prepare(run)
    asyncio.run(pipeline.setup(run))
    asyncio.run(pipeline.step(run))
    assert pipeline.stages.credit.kl.coef == pytest.approx(0.125)


def test_wrong_answers_that_are_too_long_are_left_out():
    groups = [Group(id="0", samples=(sample(0, 0, 1.0, length=5), sample(0, 1, 0.0, length=5)))]
    groups += [Group(id="1", samples=(sample(1, 0, 0.0, length=2), sample(1, 1, 1.0, length=2)))]
    _, sequences = step(groups, error_max_len_clip=True, error_max_len_threshold=4)
    assert [s.id for s in sequences] == ["0/0", "1/0", "1/1"]
    _, sequences = step(groups, error_max_len_clip=True, error_max_len_threshold=4, error_max_len_reward=0.0)
    assert len(sequences) == 4
    # By default from the longest response on, which is shorter than response_length here.
    engine = {"generating_args": {"max_new_tokens": 5}}
    _, sequences = step(groups, error_max_len_clip=True, actor_infer=engine, response_length=8)
    assert [s.id for s in sequences] == ["0/0", "1/0", "1/1"]


def test_gae_reads_the_critic_and_sets_its_target():
    # Values 0.4 before both tokens, reward 1 at the last, gamma 1, lambda 0.5:
    # last: delta = 1 - 0.4 = 0.6; first: delta = 0.4 - 0.4 = 0, advantage 0 + 0.5 * 0.6 = 0.3. Returns add the value.
    roles = {"critic": FakeRole(value=0.4)}
    _, sequences = step(
        groups_of((1.0, 0.0), (1.0, 0.0)),
        roles,
        adv_estimator="gae",
        lambd=0.5,
        critic={"training_args": {"per_device_train_batch_size": 4}},
    )
    assert sequences[0].advantages == pytest.approx([0, 0, 0.3, 0.6], abs=1e-6)
    assert sequences[0].returns == pytest.approx([0, 0, 0.7, 1.0], abs=1e-6)
    assert roles["critic"].updates[0][0][0].values == pytest.approx([0, 0, 0.4, 0.4])


def test_a_critic_warms_up_before_the_policy_learns():
    critic = FakeRole()
    _, sequences = step(
        groups_of((1.0, 0.0), (1.0, 0.0)),
        {"critic": critic},
        adv_estimator="gae",
        critic_warmup=1,
        critic={"training_args": {"per_device_train_batch_size": 4}},
    )
    assert len(critic.updates) == 1
    assert sequences == []


PPO = {"adv_estimator": "gae", "critic": {"training_args": {"per_device_train_batch_size": 4}}}
BAND = {"filters": [{"enabled": True, "ratio_low": 0.5, "ratio_high": 2.0}]}


def test_critic_trains_on_every_response_token_with_a_return():
    """The policy's masks leave out 0/1, which was cut, and its band the second token of 1/0. 1/1 has no reward."""
    groups = groups_of((1.0, 0.0), (1.0, None))
    groups[0] = Group(id="0", samples=(groups[0].samples[0], sample(0, 1, 0.0, finish="length")))
    odd = replace(groups[1].samples[0], logprobs=np.array([-0.5, -9.0], dtype=np.float32))
    groups[1] = Group(id="1", samples=(odd, groups[1].samples[1]))
    actor, critic = FakeRole(logprob=-0.5), FakeRole(value=0.4)
    _, sequences = step(
        groups, {"actor_train": actor, "critic": critic}, max_len_mask=True, train_infer_correction=BAND, **PPO
    )
    assert [(each.id, each.loss_mask.tolist()[2:]) for each in sequences] == [
        ("0/0", [True] * 2),
        ("1/0", [True, False]),
    ]
    (learnt,) = critic.updates
    assert [each.id for each in learnt[0]] == ["0/0", "0/1", "1/0"]
    assert all(each.loss_mask.tolist()[2:] == [True, True] for each in learnt[0])
    # gamma 1, lambda 0.95, value 0.4: 0.95 of the last token's advantage reaches the first.
    for each, reward in zip(learnt[0], (1.0, 0.0, 1.0), strict=True):
        assert each.returns[2:] == pytest.approx([0.4 + 0.95 * (reward - 0.4), reward], abs=1e-6)


@pytest.mark.parametrize(("given", "passes"), [({}, 3), ({"critic_epochs": 1}, 1), ({"critic_epochs": 4}, 4)])
def test_critic_epochs_default_to_those_of_the_policy(given, passes):
    roles = {"actor_train": FakeRole(logprob=-0.5), "critic": FakeRole()}
    step(groups_of((1.0, 0.0), (1.0, 0.0)), roles, ppo_epochs=3, **PPO, **given)
    assert [roles[name].updates[0][2] for name in ("actor_train", "critic")] == [3, passes]
    # One optimizer step for each pass: what the learning rate's schedule counts.
    planned = {role.name: role.num_steps for role in plan(config(ppo_epochs=3, **PPO, **given)).roles}
    assert (planned["actor_train"], planned["critic"]) == (3 * 3, 3 * passes)


def test_players_of_an_episode_add_samples_but_no_steps():
    """Two groups of two episodes of two players: 8 samples, where the schedule counts one step of 4 per pass."""
    roles = {"actor_train": FakeRole(logprob=-0.5), "critic": FakeRole()}
    groups = groups_of((1.0, 0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 1.0))
    players = [
        replace(
            group,
            samples=tuple(
                replace(each, id=f"{group.id}/{at // 2}/{player}", player=player)
                for at, (each, player) in enumerate(zip(group.samples, "abab", strict=True))
            ),
        )
        for group in groups
    ]
    assert [group.num_episodes for group in players] == [2, 2]
    step(players, roles, ppo_epochs=2, **PPO, critic_epochs=3)
    planned = {role.name: role.num_steps for role in plan(config(ppo_epochs=2, **PPO, critic_epochs=3)).roles}
    for name, role in roles.items():
        ((sequences, _, epochs, _),) = role.updates
        assert len(sequences) == 8
        assert planned[name] == 3 * epochs * role.max_steps[0]  # max_steps of the config is 3


@pytest.mark.parametrize("name", ["actor_train", "critic"])
def test_skipped_steps_of_either_role_trip_the_guard(name):
    roles = {"actor_train": FakeRole(), "critic": FakeRole(), name: FakeRole(num_skipped=1)}
    run, _ = step(groups_of((1.0, 0.0), (1.0, 0.0)), roles, **PPO)
    assert [guard for guard, _ in run.tripped] == ["non_finite"]


def test_a_critic_learns_where_the_policy_has_nothing_left():
    groups = [Group(id="0", samples=tuple(sample(0, i, float(i), finish="length") for i in range(2)))]
    critic = FakeRole()
    run, sequences = step(groups, {"critic": critic}, max_len_mask=True, **PPO)
    assert sequences == []
    assert [len(each[0]) for each in critic.updates] == [2]
    assert [guard for guard, _ in run.tripped] == ["all_groups_filtered"]


def test_optimizer_steps_are_shuffled_by_seed_and_step_alone():
    def seeds(run: FakeRun, steps, **given) -> list[int | None]:
        run.groups = groups_of((1.0, 0.0), (1.0, 0.0), tags="ab")
        run.roles = {"actor_train": FakeRole(logprob=-0.5), "critic": FakeRole()}
        pipeline = RLVRPipeline(config(**PPO, **given))
        pipeline.prepare(run)
        asyncio.run(pipeline.setup(run))
        for run.step in steps:
            asyncio.run(pipeline.step(run))
        assert run.roles["critic"].shuffle_seeds == run.roles["actor_train"].shuffle_seeds
        return run.roles["actor_train"].shuffle_seeds

    found = seeds(FakeRun(), range(4))
    assert len(set(found)) == 4
    assert None not in found
    assert seeds(FakeRun(), [3]) == found[3:]
    assert seeds(FakeRun(), [3], seed=1) != found[3:]
    assert seeds(FakeRun(), range(2), shuffle=False) == [None, None]


class TemperatureRole(FakeRole):
    """Notes the temperatures of its logprobs."""

    async def score(self, sequences, want):
        self.scored_at = want.temperature
        return await super().score(sequences, want)


@pytest.mark.parametrize(("given", "expected"), [({}, 0.8), ({"logprob_temperature": 1.0}, 1.0)])
def test_logprobs_use_the_rollout_temperature_or_their_own(given, expected):
    role = TemperatureRole(logprob=-9.0)
    run = FakeRun(groups_of((1.0, 0.0), (1.0, 0.0)), {"actor_train": role})
    generating = {"generating_args": {"temperature": 0.8}}
    pipeline = RLVRPipeline(config(ppo_epochs=2, actor_infer=generating, **given))
    pipeline.prepare(run)
    asyncio.run(pipeline.setup(run))
    asyncio.run(pipeline.step(run))
    ((sequences, objective, *_),) = role.updates
    assert (role.scored_at, objective.want.temperature) == (expected, expected)
    # At another temperature than the engine's its logprobs are no measure of the trainer's.
    assert all((each.behaviour_logprobs is None) == bool(given) for each in sequences)
    assert ("actor/logprob_gap" in run.metrics) == (not given)


@pytest.mark.parametrize(
    "key",
    [{"force_disable_old_logprobs_recompute": True}, {"train_infer_correction": {"is_weight": {"enabled": True}}}],
)
def test_comparing_logprobs_of_two_temperatures_is_refused(key):
    generating = {"generating_args": {"temperature": 0.8}}
    config(actor_infer=generating, logprob_temperature=0.8, **key)
    with raises_error(ValueError, *key, "logprob_temperature", "0.8"):
        config(actor_infer=generating, logprob_temperature=1.0, **key)


def test_masked_samples_still_count_in_their_groups_statistics():
    groups = groups_of((1.0, 0.0), (1.0, 0.0))
    cut = sample(0, 1, 0.0, finish="length")
    groups[0] = Group(id="0", samples=(groups[0].samples[0], cut))
    _, sequences = step(groups, max_len_mask=True)
    assert [s.id for s in sequences] == ["0/0", "1/0", "1/1"]
    assert sequences[0].advantages[-1] == pytest.approx(0.5**0.5, abs=1e-5)


def test_old_logprobs_are_computed_only_for_several_steps():
    actor = FakeRole(logprob=-0.7)
    _, sequences = step(groups_of((1.0, 0.0), (1.0, 0.0)), {"actor_train": actor})
    assert sequences[0].old_logprobs is None
    _, sequences = step(groups_of((1.0, 0.0), (1.0, 0.0)), {"actor_train": FakeRole(logprob=-0.7)}, ppo_epochs=2)
    assert sequences[0].old_logprobs == pytest.approx([0, 0, -0.7, -0.7])
    _, sequences = step(
        groups_of((1.0, 0.0), (1.0, 0.0)), ppo_epochs=2, force_disable_old_logprobs_recompute=True
    )  # fmt: skip
    assert sequences[0].old_logprobs == pytest.approx([0, 0, -0.5, -0.5])


def test_sample_metrics_of_answers_of_different_lengths():
    groups = [Group(id="0", samples=(sample(0, 0, 1.0, length=1), sample(0, 1, 0.0, length=5, finish="length")))]
    metrics = sample_metrics(groups)
    assert metrics["response_length/mean"] == 3.0
    assert metrics["response_length/cut_share"] == 0.5
    assert metrics["tokens/generated"] == 6.0
    assert metrics["score/std"] == 0.5


def test_an_empty_answer_is_not_a_sequence():
    experience = Experience.of([Group(id="0", samples=(sample(0, 0, 1.0, length=0), sample(0, 1, 1.0)))])
    assert [s.id for s in experience.sequences] == ["0/1"]


def test_flat_and_rows_are_inverse():
    experience = Experience.of(groups_of((1.0, 0.0), (1.0, 0.5)))
    flat = torch.arange(16, dtype=torch.float32)
    again = experience.with_flat(advantages=flat).flat("advantages")
    assert torch.equal(again, flat)
    assert experience.flat("advantages") is None


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"rollout_batch_size": 3}, ("3", "2", "6", "actor_train", "4")),
        ({"use_kl_loss": True}, ("use_kl_loss",)),
        ({"reference": {}}, ("reference",)),
        ({"target_kl": 0.1}, ("add_token_level_kl",)),
        ({"rewards": {}}, ("rewards",)),
        ({"min_group_size": 3}, ("min_group_size", "3", "2")),
        ({"critic_lambd": 0.9}, ("critic_lambd",)),
        ({"response_length": 8, "soft_overlong_penalty": {"l_cache": 9}}, ("l_max", "8", "9")),
        ({"response_length": 8, "soft_overlong_penalty": {"l_max": 12, "l_cache": 4}}, ("l_max", "12", "8")),
        ({"train_infer_correction": {"is_weight": {"lower_bound": 2.0}}}, ("lower_bound", "2", "1.2")),
        ({"train_infer_correction": {"filters": [{"agg_type": "max"}]}}, ("max", "ratio_enabled")),
    ],
)
def test_contradictions_are_refused_with_a_remedy(given, facts):
    with raises_error(ValueError, *facts):
        config(**given)


EIGHT_BITS = {"actor_infer": {"weight_format": "fp8"}}
OLDER = {"async_generation_ratio": 1.0, "actor_infer": {"device_mapping": [1]}}


def test_ahead_rollouts_are_scored_by_the_current_policy():
    groups = groups_of((1.0, 0.0))
    old = groups[0].samples[1]
    stale = replace(old, versions=np.array([0, 0], dtype=np.int32), logprobs=np.array([-3.0, -1.0], dtype=np.float32))
    groups = [Group(id="0", samples=(groups[0].samples[0], stale))]
    run, sequences = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, **OLDER)
    assert run.metrics["actor/logprob_gap"] == pytest.approx(0.2)  # |-0.7 + 0.5|
    assert run.metrics["actor/logprob_lag"] == pytest.approx((2.3 + 0.3) / 2)
    assert sequences[1].old_logprobs[2:].tolist() == pytest.approx([-0.7, -0.7])
    assert (run.plan.ahead, run.plan.concurrent) == (1.0, True)


def test_tokens_after_older_weights_do_not_count_as_engine_gap():
    groups = groups_of((1.0, 0.0))
    fresh, other = groups[0].samples
    logprobs = np.array([-3.0, -1.0], dtype=np.float32)
    going_on = replace(other, versions=np.array([0, 1], dtype=np.int32), logprobs=logprobs)
    run, _ = step([Group(id="0", samples=(fresh, going_on))], {"actor_train": FakeRole(logprob=-0.7)}, **OLDER)
    assert run.metrics["actor/logprob_gap"] == pytest.approx(0.2)
    assert run.metrics["actor/logprob_lag"] == pytest.approx((2.3 + 0.3) / 2)
    run, _ = step([Group(id="0", samples=(going_on,))], {"actor_train": FakeRole(logprob=-0.7)}, **OLDER)
    assert "actor/logprob_gap" not in run.metrics


@pytest.mark.parametrize(
    ("ahead", "given", "weighs"),
    [
        (OLDER, {}, True),
        (OLDER, {"train_infer_correction": {"is_weight": {"enabled": False}}}, False),
        (OLDER, {"force_disable_old_logprobs_recompute": True}, False),
        ({"is_use_additional_prompts": True, "max_additional_running_prompts": 1}, {}, True),
        (EIGHT_BITS, {}, True),
        (EIGHT_BITS, {"train_infer_correction": {"is_weight": {"enabled": False}}}, False),
        ({}, {}, False),
    ],
)
def test_off_policy_samples_are_importance_weighted_by_default(ahead, given, weighs):
    groups = groups_of((1.0, 0.0))
    drawn = np.array([-0.6, -0.8], dtype=np.float32)
    groups = [Group(id="0", samples=tuple(replace(each, logprobs=drawn) for each in groups[0].samples))]
    plain = step(groups, {"actor_train": FakeRole(logprob=-0.7)})[1]
    run, sequences = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, **ahead, **given)
    factors = np.exp([-0.1, 0.1]) if weighs else np.ones(2)
    for before, after in zip(plain, sequences, strict=True):
        assert after.advantages[2:] == pytest.approx(before.advantages[2:] * factors)
    assert ("correction/weight/mean" in run.metrics) == weighs


def test_corrections_weight_advantages_and_mask_tokens():
    groups = groups_of((1.0, 0.0))
    drawn = np.array([-0.5, -2.5], dtype=np.float32)
    groups = [Group(id="0", samples=tuple(replace(each, logprobs=drawn) for each in groups[0].samples))]
    plain = step(groups, {"actor_train": FakeRole(logprob=-0.7)})[1]
    correction = {
        "is_weight": {"enabled": True, "upper_bound": 3.0},
        "filters": [
            {"enabled": True, "ratio_low": 0.5, "ratio_high": 2.0},
            {"enabled": False, "ratio_low": 5.0, "ratio_high": 6.0},
        ],
    }
    run, sequences = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, train_infer_correction=correction)
    # exp(-0.7 + 0.5) = 0.819 is kept as it is, exp(-0.7 + 2.5) = 6.05 is bounded by 3 and outside of the band.
    for before, after in zip(plain, sequences, strict=True):
        assert after.advantages[2] == pytest.approx(before.advantages[2] * np.exp(-0.2))
        assert after.advantages[3] == pytest.approx(before.advantages[3] * 3.0)
        assert after.loss_mask.tolist() == [False, False, True, False]
    assert run.metrics["correction/kept_share"] == 0.5
    assert run.metrics["correction/bounded_share"] == 0.5
    assert run.metrics["correction/weight/mean"] == pytest.approx((np.exp(-0.2) + 3.0) / 2)


def test_masked_weights_and_off_policy_mask_keep_the_loss_mask():
    groups = groups_of((1.0, 0.0))
    drawn = np.array([-0.5, -2.5], dtype=np.float32)
    groups = [Group(id="0", samples=tuple(replace(each, logprobs=drawn) for each in groups[0].samples))]
    plain = step(groups, {"actor_train": FakeRole(logprob=-0.7)})[1]
    bounds = {"enabled": True, "outside": "mask", "lower_bound": 0.5, "upper_bound": 5.0}
    given = {"is_weight": bounds, "is_log_ratio_clamp": 0.1}
    run, sequences = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, train_infer_correction={"is_weight": bounds})
    # exp(-0.2) is within the bounds, exp(1.8) = 6.05 is not.
    for before, after in zip(plain, sequences, strict=True):
        assert after.advantages[2:] == pytest.approx([before.advantages[2] * np.exp(-0.2), 0.0])
        assert after.loss_mask.tolist() == [False, False, True, True]
    assert run.metrics["correction/zero_share"] == 0.5
    _, sequences = step(groups, {"actor_train": FakeRole(logprob=-0.7)}, train_infer_correction=given)
    assert sequences[0].advantages[2:] == pytest.approx(plain[0].advantages[2:] * np.exp([-0.1, 0.1]))
    # The engine's logprobs have the mean -1.5, the trainer's -1.7: 0.2 above it.
    mask = {"off_policy_mask_threshold": 0.1}
    run, sequences = step(groups, {"actor_train": FakeRole(logprob=-1.7)}, train_infer_correction=mask)
    assert [each.advantages[-1] > 0 for each in sequences] == [True, False]
    assert sequences[1].advantages.tolist() == [0.0] * 4
    assert sequences[1].loss_mask.tolist() == [False, False, True, True]
    assert run.metrics["correction/off_policy_masked_share"] == 0.5


def test_a_correction_that_leaves_no_token_leaves_the_sample_out():
    groups = groups_of((1.0, 0.0))
    far = replace(groups[0].samples[0], logprobs=np.full(2, -9.0, dtype=np.float32))
    groups = [Group(id="0", samples=(far, groups[0].samples[1]))]
    correction = {"filters": [{"enabled": True, "agg_type": "sequence"}]}
    _, sequences = step(groups, {"actor_train": FakeRole(logprob=-0.5)}, train_infer_correction=correction)
    assert [sequence.id for sequence in sequences] == ["0/1"]


def test_a_filter_keeps_rows_whose_stream_is_trained():
    samples = [replace(sample(0, i, float(i)), logprobs=np.full(2, -9.0, dtype=np.float32)) for i in range(3)]
    experience = Experience.of([Group(id="0", samples=tuple(samples))])
    rows = [np.full(4, number, dtype=np.float32) for number in (-0.5, 0.0)]
    experience = experience.with_rows(old_logprobs=[rows[0]] * 3, advantages=[rows[1]] * 3)
    experience = experience.with_stream("echo", torch.tensor([0, 1, 0, 0, *[0] * 8]))
    correction = TrainInferCorrectionConfig(filters=[{"enabled": True}])
    corrected, _ = correct(experience, correction)
    assert [each.id for each in corrected.sequences] == ["0/0"]
    assert not corrected.mask_T.any()


def test_step_without_loss_tokens_trains_nothing():
    masked = [replace(sample(0, i, float(i)), loss_mask=np.zeros(2, dtype=bool)) for i in range(2)]
    run, sequences = step([Group(id="0", samples=tuple(masked))])
    assert [name for name, _ in run.tripped] == ["all_groups_filtered"]
    assert sequences == []


def turn(length: int, parent: int | None = None, reward: float | None = None, mask: list[int] | None = None):
    """A turn after two tokens of its environment."""
    return TurnRecord(
        parent=parent,
        context_ids=np.array([7, 8]),
        sampled_ids=np.arange(length),
        logprobs=np.full(length, -0.5, dtype=np.float32),
        versions=np.ones(length, dtype=np.int32),
        loss_mask=np.array([1] * length if mask is None else mask, dtype=bool),
        finish_reason="stop",
        reward=reward,
    )


def episode(index: int, reward: float, *turns: TurnRecord) -> Sample:
    return sample_of_rollout(
        Rollout(turns=turns), id=f"0/{index}", group_id="0", finish_reason="stop", reward=Reward(value=reward)
    )


def masked_group(*, masked: bool) -> Group:
    """Two episodes: the first turn of one is masked, and all turns of the other, which scores less."""

    def mask(length: int) -> list[int]:
        return [not masked] * length

    first = episode(0, 1.0, turn(2, mask=mask(2), reward=-0.5), turn(3, 0, 1.5))
    second = episode(1, -1.0, turn(1, mask=mask(1)), turn(2, None, -1.0, mask(2)))
    return Group(id="0", samples=(first, second))


@pytest.mark.parametrize(
    "recipe",
    [
        {"adv_estimator": "rloo"},
        {"adv_estimator": "opo"},
        {"adv_estimator": "reinforce", "gamma": 0.9},
        {"adv_estimator": "reinforce", "whiten_advantages": True, "norm_mean_type": "group"},
        {"adv_estimator": "reinforce++", "whiten_rewards": True},
        {"adv_estimator": "reinforce", "add_token_level_kl": True, "init_kl_coef": 0.1, "reference": {}},
        {"adv_estimator": "grpo"},
        {"adv_estimator": "gae", "critic": {"training_args": {"per_device_train_batch_size": 4}}, "lambd": 0.9},
    ],
)
def test_a_loss_mask_changes_neither_advantages_nor_the_critic(recipe):
    found = []
    for masked in (False, True):
        roles = {
            "actor_train": FakeRole(logprob=-0.5),
            "reference": FakeRole(logprob=-0.8),
            "critic": FakeRole(value=0.25),
        }
        run, sequences = step([masked_group(masked=masked)], roles, **recipe)
        found.append((sequences, roles["critic"].updates, run))
    (plain, critic, plain_run), (trained, same_critic, run) = found
    assert [row.id for row in trained] == ["0/0"]  # nothing of the other episode is in the loss
    assert trained[0].loss_mask.tolist() == [False] * 6 + [True] * 3
    assert trained[0].advantages.tolist() == plain[0].advantages.tolist()
    assert run.metrics.get("kl/mean") == plain_run.metrics.get("kl/mean")
    for (rows, *_), (same_rows, *_) in zip(critic, same_critic, strict=True):
        assert [row.loss_mask.tolist() for row in same_rows] == [row.loss_mask.tolist() for row in rows]
        assert [row.returns.tolist() for row in same_rows] == [row.returns.tolist() for row in rows]


def test_metrics_of_advantages_are_those_in_the_loss():
    # RLOO over both episodes: 1 - -1 = 2 and -2. Only tokens of the first are in the loss.
    run, _ = step([masked_group(masked=True)], adv_estimator="rloo")
    assert [run.metrics[f"advantage/{name}"] for name in ("mean", "min", "max")] == [2.0, 2.0, 2.0]


def test_returns_follow_time_where_conversations_interleave():
    # Two conversations take turns: 0 and 2 are one row, 1 and 3 the other. Four tokens before the reward 1.
    turns = [turn(1), turn(1), turn(1, 0), turn(1, 1, 1.0)]
    other = episode(1, 0.0, turn(1, reward=0.0))
    _, sequences = step([Group(id="0", samples=(episode(0, 1.0, *turns), other))], adv_estimator="reinforce", gamma=0.5)
    assert [row.advantages[row.loss_mask].tolist() for row in sequences[:2]] == [[0.125, 0.5], [0.25, 1.0]]
    critic = {"training_args": {"per_device_train_batch_size": 4}}
    roles = {"critic": FakeRole(value=0.0)}
    group = Group(id="0", samples=(episode(0, 1.0, *turns), other))
    _, sequences = step([group], roles, adv_estimator="gae", critic=critic, gamma=1.0, lambd=0.5)
    assert [row.advantages[row.loss_mask].tolist() for row in sequences[:2]] == [[0.125, 0.5], [0.25, 1.0]]


def test_advantages_out_of_proportion_trip_a_guard():
    # The others of the first have rewards 1 and 1.001: -1.0005 over their deviation of 7e-4 is -1414.
    given = {"num_return_sequences_in_group": 3, "adv_options": {"leave_one_out": True}, "rollout_batch_size": 4}
    given["actor_train"] = {
        "training_args": {"per_device_train_batch_size": 12},
        "data_args": {"file_name": "x.jsonl"},
    }
    run, _ = step(groups_of((0.0, 1.0, 1.001)), **given)
    assert [guard for guard, _ in run.tripped] == ["advantage_size"]
    run, _ = step(groups_of((0.0, 1.0, 1.001)), guards={"advantage_size": {"threshold": 2000}}, **given)
    assert run.tripped == []
    # A large reward alone is in proportion.
    run, _ = step(groups_of((0.0, 1e6, 1e6)), **given)
    assert run.tripped == []


@pytest.mark.parametrize(("aggregation", "trips"), [("token-mean", True), ("seq-mean-token-sum", False)])
def test_a_loss_out_of_proportion_trips_the_guard(aggregation, trips):
    class Diverging(FakeRole):
        async def update(self, sequences, loss, **given):
            result = await super().update(sequences, loss, **given)
            return replace(result, metrics={**result.metrics, "loss": -1e4})

    roles = {"actor_train": Diverging()}
    run, _ = step(groups_of((1.0, 0.0)), roles, loss_agg_mode=aggregation, response_length=200)
    assert [guard for guard, _ in run.tripped] == ["advantage_size"] * trips


def test_weights_on_either_bound_are_bounded():
    # Ratios exp(-0.4), exp(0), exp(0.4) with the bounds 0.9 and 1.1: one below, one above.
    logprobs = np.array([-0.3, -0.7, -1.1], dtype=np.float32)
    groups = [
        Group(id="0", samples=tuple(replace(sample(0, i, float(i), length=3), logprobs=logprobs) for i in (0, 1)))
    ]
    weight = {"enabled": True, "lower_bound": 0.9, "upper_bound": 1.1}
    roles = {"actor_train": FakeRole(logprob=-0.7)}
    run, _ = step(groups, roles, train_infer_correction={"is_weight": weight})
    assert run.metrics["correction/bounded_share"] == pytest.approx(2 / 3)


def test_masks_that_leave_no_token_train_nothing_and_no_nan():
    """The length limit leaves out the only sample with a token in the loss."""
    groups = groups_of((1.0, 0.0))
    cut, other = groups[0].samples
    masked = replace(other, loss_mask=np.zeros(2, dtype=bool))
    groups = [Group(id="0", samples=(replace(cut, finish_reason="length"), masked))]
    correction = {"is_weight": {"enabled": True}, "off_policy_mask_threshold": 1.0}
    roles = {"actor_train": FakeRole(logprob=-0.5)}
    run, sequences = step(groups, roles, max_len_mask=True, train_infer_correction=correction)
    assert sequences == []
    assert [name for name, _ in run.tripped] == ["all_groups_filtered"]
    assert not [name for name, value in run.metrics.items() if np.isnan(value)]


def test_correction_without_loss_tokens_changes_nothing():
    samples = [replace(sample(0, i, float(i)), loss_mask=np.zeros(2, dtype=bool)) for i in range(2)]
    experience = Experience.of([Group(id="0", samples=tuple(samples))])
    row = np.zeros(4, dtype=np.float32)
    experience = experience.with_rows(old_logprobs=[row] * 2, advantages=[row] * 2)
    weighed = TrainInferCorrectionConfig.model_validate(
        {"is_weight": {"enabled": True, "batch_normalize": True}, "filters": [{"enabled": True}]}
    )
    corrected, metrics = correct(experience, weighed)
    assert corrected is experience
    assert metrics == {}


def test_batch_with_every_sample_dropped_trains_nothing():
    run, sequences = step([])
    assert [name for name, _ in run.tripped] == ["all_groups_filtered"]
    assert sequences == []


def test_plan_follows_the_config():
    run, _ = step(groups_of((1.0, 0.0)))
    assert (run.plan.ahead, run.plan.concurrent, run.plan.keep) == (0.0, False, None)
    run, _ = step(groups_of((1.0, 0.0)), is_use_additional_prompts=True, max_additional_running_prompts=3)
    assert (run.plan.ahead * config().rollout_batch_size, run.plan.concurrent) == (3.0, False)
