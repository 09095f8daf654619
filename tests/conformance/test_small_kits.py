"""Kits of rewards, trackers, estimators, losses and pipelines: wrong parts fail the tests of what is wrong."""

from __future__ import annotations

import inspect
import json
import threading
from dataclasses import replace

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from roll_core.algorithms.advantages import grpo
from roll_core.algorithms.policy_losses import ppo
from roll_core.pipelines.sft import SFTPipeline
from roll_core.plugins.registry import Registry, load_registry
from roll_core.spec.algorithms import AdvantageOutput
from roll_core.spec.pipeline import RoleSpec, Tracker
from roll_core.spec.plan import PipelinePlan
from roll_core.spec.providers import AdvantageProvider, PipelineProvider, PolicyLossProvider
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_testing.algorithms import AdvantageConformance, FunctionTests, PolicyLossConformance
from roll_testing.packaging import PUBLIC, PackagingConformance, private_imports
from roll_testing.pipelines import PipelineConformance
from roll_testing.rewards import RewardConformance, Scored
from roll_testing.runs import Runs
from roll_testing.suites import suite
from roll_testing.trackers import TrackerConformance


def names_of(kit):
    """Names of the tests that a kit adds to those of packaging."""
    return [each for each in vars(kit) if each.startswith("test_")]


def fails(test, *arguments):
    """True if a test of a kit fails, whatever the part raises."""
    try:
        test(*arguments)
    except pytest.skip.Exception:
        return False
    except Exception:
        return True
    return False


def failed(kit, *arguments):
    """Names of the tests of a kit that fail, without those of its packaging."""
    names = [*names_of(FunctionTests), *names_of(type(kit).__mro__[1])]
    return {name for name in names if fails(getattr(kit, name), *arguments)}


class OpenConfig(BaseModel):
    """Ignores unknown keys, and has one that is required."""

    size: int


class StrictConfig(OpenConfig):
    model_config = ConfigDict(extra="forbid")


@pytest.mark.parametrize(("schema", "wrong"), [(OpenConfig, True), (StrictConfig, False)])
def test_schema_that_ignores_unknown_keys_fails_the_kit(schema, wrong):
    class Kit(PackagingConformance):
        name = "small"

    kit = Kit()
    kit.provider = PipelineProvider(name="small", target="", summary="", config=f"{__name__}:{schema.__name__}")
    assert fails(kit.test_an_unknown_key_is_refused) == wrong


class Estimator(AdvantageConformance):
    name = "grpo"

    def _target(self):
        return self.function


def off_the_mask(batch):
    return AdvantageOutput(advantages_T=batch.scores_S[batch.segments_T])


def in_place(batch):
    batch.scores_S.sub_(batch.scores_S.mean())
    return grpo(batch)


def nan(batch):
    return AdvantageOutput(advantages_T=grpo(batch).advantages_T / (batch.scores_S.std() > 0))


def noisy(batch):
    found = grpo(batch).advantages_T
    return AdvantageOutput(advantages_T=found * (1 + torch.rand(len(found))))


def by_position(batch):
    return AdvantageOutput(advantages_T=grpo(batch).advantages_T * (1 + batch.segments_T))


def in_int(batch):
    return AdvantageOutput(advantages_T=grpo(batch).advantages_T.sign().int())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (grpo, set()),
        (lambda batch: grpo(batch), {"test_the_function_can_be_pickled"}),
        (noisy, {"test_results_repeat", "test_results_do_not_depend_on_the_order_of_groups"}),
        (by_position, {"test_results_do_not_depend_on_the_order_of_groups"}),
        (in_int, {"test_results_have_their_form"}),
        (off_the_mask, {"test_results_are_zero_off_the_mask"}),
        (in_place, {"test_the_input_stays_as_it_is"}),
        (nan, {"test_results_are_finite"}),
    ],
)
def test_an_estimator_fails_the_tests_of_what_is_wrong(function, expected):
    kit = Estimator()
    kit.function = function
    assert failed(kit) == expected


class Loss(PolicyLossConformance):
    name = "ppo"

    def _target(self):
        return self.function


def upward(logprobs_T, micro, params):
    loss_T, metrics = ppo(logprobs_T, micro, params)
    return -loss_T, metrics


def batch_mean(logprobs_T, micro, params):
    loss_T, metrics = ppo(logprobs_T, micro, params)
    return loss_T / micro.num_sequences, metrics


def mean_of_the_row(logprobs_T, micro, params):
    loss_T, metrics = ppo(logprobs_T, micro, params)
    lengths_S = torch.tensor(micro.lengths)
    return loss_T / lengths_S[micro.segments_T], metrics


def attached(logprobs_T, micro, params):
    loss_T, _ = ppo(logprobs_T, micro, params)
    return loss_T, {"loss": loss_T}


def unbounded(logprobs_T, micro, params):
    loss_T, metrics = ppo(logprobs_T, micro, params)
    return loss_T + 1e-30 * torch.exp(30 * (logprobs_T - micro.old_logprobs_T)), metrics


def unmasked(logprobs_T, micro, params):
    loss_T, metrics = ppo(logprobs_T, micro, params)
    return loss_T * (1 + 0 * micro.ref_logprobs_T.sum()), metrics


def overwriting(logprobs_T, micro, params):
    micro.ref_logprobs_T.add_(1)
    return ppo(logprobs_T, micro, params)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ppo, set()),
        (unbounded, {"test_loss_and_gradient_are_finite"}),
        (unmasked, {"test_tokens_off_the_mask_have_no_gradient"}),
        (overwriting, {"test_the_batch_stays_as_it_is"}),
        (upward, {"test_the_gradient_follows_the_advantage"}),
        (batch_mean, {"test_the_loss_does_not_depend_on_the_split"}),
        (mean_of_the_row, {"test_the_loss_does_not_depend_on_the_rows_of_a_rollout"}),
        (attached, {"test_results_have_their_form"}),
    ],
)
def test_a_loss_fails_the_tests_of_what_is_wrong(function, expected):
    kit = Loss()
    kit.function = function
    assert failed(kit) == expected


def functions_of_the_core():
    """Kit, kind of record and name of each of roll-core's estimators and losses."""
    core = load_registry().plugins[0]
    kits = {AdvantageProvider: AdvantageConformance, PolicyLossProvider: PolicyLossConformance}
    return [(kits[type(each)], type(each).__name__, each.name) for each in core.providers if type(each) in kits]


@pytest.mark.parametrize(("kit", "kind", "name"), functions_of_the_core())
def test_the_cores_estimators_and_losses_pass(kit, kind, name):
    part = suite(kind, f"roll-core/{name}")()
    assert not [test for test in names_of(kit) if fails(getattr(part, test))]


class RightReward(RewardFunction):
    def score(self, request):
        return Reward(value=float(request.response == "42"))


class HugeReward(RightReward):
    def score(self, request):
        return Reward(value=1.0 if request.response == "42" else float("inf"))


class WrongReward(RightReward):
    def score(self, request):
        return Reward(value=float(request.response != "42"))


class ChangingReward(RightReward):
    def score(self, request):
        request.sample.metadata["seen"] = True
        return super().score(request)


class CountingReward(RewardFunction):
    calls = 0

    def score(self, request):
        self.calls += 1
        return Reward(value=1.0 if request.response == "42" else self.calls / 100)


class BetweenReward(RewardFunction):
    """Half a point for a number, although the schema of `math_rule` says 0 or 1."""

    def score(self, request):
        return Reward(value=1.0 if request.response == "42" else 0.5)


class Note(str):
    """Text that cannot be pickled."""

    def __reduce__(self):
        raise TypeError("no pickling")


class NotingReward(RightReward):
    def score(self, request):
        return Reward(value=float(request.response == "42"), detail={"note": Note("why")})


class OnceReward(RightReward):
    is_open = True

    def close(self):
        if not self.is_open:
            raise RuntimeError("closed already")
        self.is_open = False


class StartedReward(RightReward):
    def start(self):
        self.log = []

    def close(self):
        self.log.clear()


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (RightReward, set()),
        (WrongReward, {"test_known_responses_get_their_rewards"}),
        (
            HugeReward,
            {"test_every_response_gets_a_finite_value_or_a_failure", "test_values_are_those_that_the_schema_states"},
        ),
        (ChangingReward, {"test_a_score_changes_nothing_of_its_sample"}),
        (CountingReward, {"test_the_same_sample_gets_the_same_reward", "test_values_are_those_that_the_schema_states"}),
        (BetweenReward, {"test_values_are_those_that_the_schema_states"}),
        (NotingReward, {"test_rewards_and_configuration_can_be_pickled"}),
        (OnceReward, {"test_closing_twice_is_allowed"}),
        (StartedReward, {"test_closing_twice_is_allowed"}),
    ],
)
def test_a_reward_fails_the_tests_of_what_is_wrong(reward, expected):
    class Kit(RewardConformance):
        name = "math_rule"
        examples = (Scored("6 * 7 =", "42", 1.0, {"ground_truth": "42"}),)

        def _new(self, *, starts=True):
            found = reward(self.config())
            if starts:
                found.start()
            return found

    kit, found = Kit(), set()
    for name in names_of(RewardConformance):
        test = getattr(kit, name)
        if fails(test, *([kit._new()] if "reward" in inspect.signature(test).parameters else [])):
            found.add(name)
    assert found == expected


class LineTracker(Tracker):
    """A line of JSON for each step, and one for the config."""

    mode = "a"

    def __init__(self, run_dir, run_name, options):
        super().__init__(run_dir, run_name, options)
        self.file = (run_dir / "lines.jsonl").open(self.mode)

    def log(self, step, metrics):
        self.file.write(json.dumps([step, dict(metrics)]) + "\n")

    def close(self):
        self.file.close()


class OverwritingTracker(LineTracker):
    mode = "w"


class NoisyTracker(LineTracker):
    def log(self, step, metrics):
        super().log(step, {name: value + 1e-3 for name, value in metrics.items()})


class StrictTracker(LineTracker):
    def log(self, step, metrics):
        self.file.write(json.dumps([step, dict(metrics)], allow_nan=False) + "\n")


class PoppingTracker(LineTracker):
    def log_config(self, config):
        config.pop("seed")


class LateTracker(LineTracker):
    """Writes a line when the next one comes."""

    last = None

    def log(self, step, metrics):
        if self.last:
            super().log(*self.last)
        self.last = (step, metrics)

    def close(self):
        super().log(*self.last)
        super().close()


class ThreadedTracker(LineTracker):
    def __init__(self, run_dir, run_name, options):
        super().__init__(run_dir, run_name, options)
        self.ended = threading.Event()
        threading.Thread(target=self.ended.wait, args=(30,), name="uploads").start()


@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        (LineTracker, set()),
        (NoisyTracker, {"test_what_was_logged_is_recorded", "test_a_resumed_run_keeps_what_was_recorded"}),
        (OverwritingTracker, {"test_a_resumed_run_keeps_what_was_recorded"}),
        (StrictTracker, {"test_metrics_that_are_not_finite_are_accepted"}),
        (PoppingTracker, {"test_metrics_and_config_stay_as_they_are"}),
        (LateTracker, {"test_a_run_without_a_step_can_be_closed"}),
        (ThreadedTracker, {"test_nothing_runs_after_close"}),
    ],
)
def test_a_tracker_fails_the_tests_of_what_is_wrong(tracker, expected, tmp_path):
    class Kit(TrackerConformance):
        name = "tensorboard"

        def read(self, run_dir):
            return [json.loads(line) for line in (run_dir / "lines.jsonl").read_text().splitlines()]

        def _open(self, run_dir):
            opened.append(tracker(run_dir, "conformance", {}))
            return opened[-1]

    opened = []
    kit = Kit()
    found = set()
    for test in (each for each in vars(TrackerConformance) if each.startswith("test_")):
        (tmp_path / test).mkdir()
        if fails(getattr(kit, test), tmp_path / test):
            found.add(test)
    for each in opened:
        each.file.close()
        if isinstance(each, ThreadedTracker):
            each.ended.set()
    assert found == expected


class NanPipeline(SFTPipeline):
    async def step(self, run):
        await super().step(run)
        run.log({"train/spread": float("nan")})


class ForgetfulPipeline(SFTPipeline):
    """Counts its steps in the process, and saves no state."""

    count = 0

    async def step(self, run):
        await super().step(run)
        self.count += 1
        run.log({"train/count": self.count})


def no_roles(config):
    return PipelinePlan(roles=(), phases=())


def another_role(config):
    return PipelinePlan(roles=(RoleSpec(name="actor", kind="train"),), phases=())


SFT_PLAN = "roll_core.pipelines.plans:sft"


@pytest.mark.parametrize(
    ("pipeline", "plan", "expected"),
    [
        (SFTPipeline, SFT_PLAN, set()),
        (NanPipeline, SFT_PLAN, {"test_a_run_has_finite_metrics_for_every_step"}),
        (ForgetfulPipeline, SFT_PLAN, {"test_a_resumed_run_equals_an_uninterrupted_one"}),
        (SFTPipeline, f"{__name__}:no_roles", {"test_the_plan_names_the_roles_of_the_run"}),
        (SFTPipeline, f"{__name__}:another_role", {"test_the_plan_names_the_roles_of_the_run"}),
    ],
)
def test_a_pipeline_fails_the_tests_of_what_is_wrong(pipeline, plan, expected, tmp_path):
    class Kit(PipelineConformance):
        name = "small"

        def run_config(self, runs):
            return runs.sft()

    record = PipelineProvider(
        name="small",
        target=f"{pipeline.__module__}:{pipeline.__name__}",
        config="roll_core.pipelines.config:SFTConfig",
        plan=plan,
        summary="SFT",
    )
    core, *others = load_registry().plugins
    kit = Kit()
    kit.provider = record
    found = set()
    for name in names_of(PipelineConformance):
        (tmp_path / name).mkdir()
        runs = Runs(tmp_path / name, "local")
        runs.registry = Registry((replace(core, providers=(*core.providers, record)), *others))
        if fails(getattr(kit, name), runs):
            found.add(name)
    assert found == expected


@pytest.mark.parametrize(
    ("kit", "test"),
    [
        (AdvantageConformance, test_an_estimator_fails_the_tests_of_what_is_wrong),
        (PolicyLossConformance, test_a_loss_fails_the_tests_of_what_is_wrong),
        (RewardConformance, test_a_reward_fails_the_tests_of_what_is_wrong),
        (TrackerConformance, test_a_tracker_fails_the_tests_of_what_is_wrong),
        (PipelineConformance, test_a_pipeline_fails_the_tests_of_what_is_wrong),
    ],
)
def test_every_test_of_a_kit_has_a_wrong_part(kit, test):
    (mark,) = test.pytestmark
    assert set().union(*(case[-1] for case in mark.args[1])) >= set(names_of(kit))


def test_private_imports_are_found_where_a_part_needs_them(tmp_path, monkeypatch):
    package = tmp_path / "acme_imports"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import numpy\nfrom roll_core.types import Sample\nfrom . import below\n")
    (package / "below.py").write_text(
        "from .part import Sample\n"
        "def f():\n"
        "    from roll_core.config.loading import load\n"
        "    from roll_core.errors import _Hidden\n"
        "    import roll_core.spec.train\n"
    )
    (package / "unrelated.py").write_text("import roll_core.cli\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert private_imports("acme_imports.part", PUBLIC) == [
        "acme_imports.below:3 roll_core.config.loading.load",
        "acme_imports.below:4 roll_core.errors._Hidden",
    ]
