"""Parts that a config names: their options, whether they can be called, and what they need to be installed."""

import sys
import textwrap

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError, PluginLoadError, UnknownProviderError
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import (
    AdvantageProvider,
    InferCapabilities,
    InferProvider,
    PolicyLossProvider,
    RewardProvider,
    TrackerProvider,
    TrainCapabilities,
    TrainProvider,
)
from roll_testing.errors import mentions, raises_error
from roll_testing.part_checks import check_part
from shared_tests.hf_plugins import hf_plugins

MODULE = "acme_parts_of_a_test"
UNIMPORTABLE = 'raise SystemExit("a check imports no part")'
PARTS = f"""
{UNIMPORTABLE}

def estimator(batch): ...
def estimator_of_two(batch, gamma): ...
def loss(logprobs_T, micro, params): ...
def loss_with_names(logprobs_T, micro, /, params=None, *more): ...
def loss_of_two(logprobs_T, micro): ...
def loss_by_name(logprobs_T, micro, params, *, clip): ...
elsewhere = loss

class Board: ...
class Engine: ...
class Trainer: ...

class Judge:
    def __init__(self, config): ...
    def score(self, request): ...

class JudgeOfTexts(Judge):
    def score(self, prompt, response): ...

class Forgetful(Judge):
    def __init__(self): ...
"""
OPTIONS = """
from roll_core.spec.config import Config, StrategyConfig

class BoardOptions(Config):
    project: str = "roll"

class StrictOptions(Config):
    project: str

class SpreadConfig(StrategyConfig):
    tensor_size: int = 1

    def parallel_sizes(self):
        return {"tensor_parallel": self.tensor_size}
"""
CONFIG = """\
pipeline: rlvr
prompt_length: 24
response_length: 40
rollout_batch_size: 16
num_return_sequences_in_group: 4
tokenizer: {kind: byte}
track_with: []
actor_train:
  model_args: {dtype: fp32, random_init: {model_type: qwen3}}
  training_args: {per_device_train_batch_size: 8}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  model_args: {dtype: fp32}
  strategy_args: {strategy_name: hf_infer}
rewards:
  math: {reward: math_rule}
"""


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """Keys and messages of a config's mistakes, with parts of a package that cannot be imported."""
    (tmp_path / f"{MODULE}.py").write_text(PARTS)
    (tmp_path / f"{MODULE}_options.py").write_text(OPTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def record(kind, name, attribute, **more):
        return kind(name=name, target=f"{MODULE}:{attribute}", summary="", **more)

    losses = ("loss", "loss_with_names", "loss_of_two", "loss_by_name", "elsewhere")
    providers = (
        *(record(AdvantageProvider, name, name) for name in ("estimator", "estimator_of_two")),
        record(AdvantageProvider, "relative", "estimator", needs_groups=True, normalise="group"),
        *(record(PolicyLossProvider, name, name) for name in losses),
        record(PolicyLossProvider, "needy_loss", "loss", needs=("no-such-distribution>=2",)),
        *(record(RewardProvider, name, name) for name in ("Judge", "JudgeOfTexts", "Forgetful")),
        record(TrackerProvider, "bare_board", "Board"),
        record(
            TrainProvider,
            "spread_train",
            "Trainer",
            config=f"{MODULE}_options:SpreadConfig",
            capabilities=TrainCapabilities(
                gradient_checkpointing=True, data_parallel=True, tensor_parallel=True, weight_transports=("shm",)
            ),
        ),
        record(TrackerProvider, "board", "Board", config=f"{MODULE}_options:BoardOptions"),
        record(TrackerProvider, "strict_board", "Board", config=f"{MODULE}_options:StrictOptions"),
        record(
            InferProvider,
            "needy",
            "Engine",
            needs=("no-such-distribution>=2",),
            capabilities=InferCapabilities(weight_transports=("shared",)),
        ),
    )
    acme = Plugin(
        package="roll-acme", version="2.1", entry_point="acme", target=MODULE, state="loaded", providers=providers
    )
    registry = Registry([*hf_plugins("roll-pipeline-agentic"), acme])
    file = tmp_path / "run.yaml"
    file.write_text(textwrap.dedent(CONFIG))

    def problems(*overrides, needs=False):
        try:
            load(file, overrides, registry, needs=needs)
        except ConfigError as error:
            return [(each.key, each.message) for each in error.problems]
        return []

    yield problems
    sys.modules.pop(f"{MODULE}_options", None)


def keys(found):
    return [key for key, _ in found]


def test_too_few_ranks_for_a_replica_are_a_separate_error(problems):
    """A batch size cannot be compared with such a role, which must not hide the mistake."""
    spread = "actor_train.strategy_args={strategy_name: spread_train, strategy_config: {tensor_size: 2}}"
    assert keys(problems(spread)) == ["actor_train.strategy_args.strategy_config"]
    assert keys(problems("actor_train.ranks_per_replica=2")) == ["actor_train.ranks_per_replica"]


def test_unknown_option_of_the_policy_loss_is_an_error(problems):
    assert keys(problems("pg_options.log_ratio_clmap=10")) == ["pg_options.log_ratio_clmap"]
    assert keys(problems("pg_options.log_ratio_clamp=-1")) == ["pg_options.log_ratio_clamp"]
    assert not problems("pg_options.log_ratio_clamp=10")


def test_required_option_set_to_none_is_missing(problems):
    assert keys(problems("track_with=[strict_board]")) == ["tracker_kwargs.strict_board.project"]
    assert not problems("track_with=[strict_board]", "tracker_kwargs.strict_board.project=x")


def test_part_without_a_schema_refuses_options(problems):
    assert keys(problems("pg_variant=loss", "pg_options.beta=1")) == ["pg_options.beta"]
    assert not problems("pg_variant=loss")
    found = problems("track_with=[bare_board]", "tracker_kwargs.bare_board.project=x")
    assert keys(found) == ["tracker_kwargs.bare_board.project"]


def test_an_option_that_the_tracker_does_not_have_is_a_mistake(problems):
    assert not problems("track_with=[board]", "tracker_kwargs.board.project=x")
    found = problems("track_with=[board]", "tracker_kwargs.board.projekt=x", "tracker_kwargs.board.project=1")
    assert sorted(keys(found)) == ["tracker_kwargs.board.project", "tracker_kwargs.board.projekt"]
    assert keys(problems("track_with=tensorboard", "tracker_kwargs.tensorboard.flush_sec=3")) == [
        "tracker_kwargs.tensorboard.flush_sec"
    ]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("adv_estimator=estimator_of_two", "'gamma'"),
        ("pg_variant=loss_of_two", "too many positional arguments"),
        ("pg_variant=loss_by_name", "'clip'"),
        ("rewards.math.reward=JudgeOfTexts", "'response'"),
        ("rewards.math.reward=Forgetful", "too many positional arguments"),
    ],
)
def test_part_that_does_not_match_its_contract_is_an_error(problems, override, why):
    ((key, message),) = problems(override)
    assert key == override.partition("=")[0]
    assert "roll-acme 2.1" in message
    assert why in message


def test_a_part_whose_parameters_python_refuses_is_a_mistake(problems, tmp_path):
    (tmp_path / f"{MODULE}.py").write_text("def estimator(batch, batch): ...")
    ((key, message),) = problems("adv_estimator=estimator")
    assert key == "adv_estimator"
    assert "roll-acme 2.1" in message


@pytest.mark.usefixtures("problems")
def test_plugins_check_refuses_a_part_that_cannot_be_called(tmp_path):
    (tmp_path / f"{MODULE}.py").write_text(PARTS.replace(UNIMPORTABLE, ""))  # `plugins --check` imports parts
    record = AdvantageProvider(name="x", target=f"{MODULE}:estimator_of_two", summary="")
    with raises_error(PluginLoadError, "'x'", "roll-acme 2.1", "'gamma'"):
        check_part(record, owner="advantage estimator 'x' of roll-acme 2.1")


@pytest.mark.parametrize(
    "override",
    [
        "adv_estimator=estimator",
        "pg_variant=loss",
        "pg_variant=loss_with_names",
        "pg_variant=elsewhere",
        "rewards.math.reward=Judge",
    ],
)
def test_a_part_that_can_be_called_or_not_be_read_is_none(problems, override):
    assert not problems(override)


@pytest.mark.parametrize("estimator", ["grpo", "relative"])
def test_self_normalising_estimator_refuses_other_normalisation(problems, estimator):
    chosen = f"adv_estimator={estimator}"
    assert not problems(chosen, "norm_mean_type=group", "norm_std_type=group")
    found = problems(chosen, "norm_mean_type=batch", "norm_std_type=running")
    assert keys(found) == ["norm_mean_type", "norm_std_type"]
    assert not problems("adv_estimator=estimator", "norm_mean_type=batch", "norm_std_type=running")


def test_turn_estimators_are_refused_for_single_turn_rollouts(problems):
    for estimator in ("gigpo", "step_reinforce", "agentic_reinforce"):
        assert keys(problems(f"adv_estimator={estimator}")) == ["adv_estimator"]
    # Without a critic, turn_gae has two reasons.
    assert keys(problems("adv_estimator=turn_gae")) == ["adv_estimator"] * 2
    found = problems("adv_estimator=step_reinforce", "norm_mean_type=group")
    assert keys(found) == ["adv_estimator", "norm_mean_type"]


def test_critic_and_value_estimator_require_each_other(problems):
    critic = "+critic.strategy_args.strategy_name=hf_train"
    assert keys(problems("adv_estimator=gae")) == ["adv_estimator"]
    assert not problems("adv_estimator=gae", critic)
    assert keys(problems("adv_estimator=grpo", critic)) == ["critic"]


def test_user_estimator_may_read_critic_values(problems, tmp_path):
    (tmp_path / f"{MODULE}_options.py").write_text("def estimator(batch): ...")
    chosen = f"adv_estimator={MODULE}_options:estimator"
    assert not problems(chosen, "+critic.strategy_args.strategy_name=hf_train")


def test_options_of_estimators_are_checked(problems):
    assert keys(problems("adv_estimator=pass_at_k")) == ["adv_options.k"]
    assert keys(problems("adv_estimator=gdpo", "adv_options.weights={}")) == ["adv_options.weights"]
    assert keys(problems("adv_estimator=opo", "adv_options.k=2")) == ["adv_options.k"]
    assert keys(problems("adv_estimator=pass_at_k", "adv_options={k: 1, baseline: leave_one_out}")) == ["adv_options"]
    assert not problems("adv_estimator=gdpo", "adv_options.weights={accuracy: 1}")


@pytest.mark.parametrize(("options", "refused"), [("{k: 3}", 0), ("{k: 4}", 1), ("{k: 4, baseline: leave_one_out}", 0)])
def test_pass_at_k_needs_more_samples_than_k(problems, options, refused):
    found = problems("adv_estimator=pass_at_k", f"adv_options={options}", "num_return_sequences_in_group=4")
    assert keys(found) == ["num_return_sequences_in_group"] * refused


@pytest.mark.parametrize(("estimator", "refused"), [("grpo", 1), ("rloo", 1), ("relative", 1), ("reinforce", 0)])
def test_comparing_estimator_needs_two_samples_per_prompt(problems, estimator, refused):
    found = problems(f"adv_estimator={estimator}", "num_return_sequences_in_group=1")
    assert keys(found) == ["num_return_sequences_in_group"] * refused


def test_missing_requirement_is_an_error_where_the_part_runs(problems):
    needy = ("actor_infer.strategy_args.strategy_name=needy", "pg_variant=needy_loss")
    found = problems(*needy, needs=True)
    assert sorted(keys(found)) == ["actor_infer.strategy_args.strategy_name", "pg_variant"]
    assert all(mentions(message, "no-such-distribution", "2") for _, message in found)
    assert not problems(*needy)
    elsewhere = f"actor_infer.environment={sys.executable}"
    assert keys(problems(*needy, elsewhere, needs=True)) == ["pg_variant"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor_train.environment='~no-such-user/bin/python'", "actor_train.environment"),
    ],
)
def test_the_home_of_an_unknown_user_is_a_missing_path(problems, override, key):
    assert keys(problems(override)) == [key]


def test_on_a_cluster_requirements_are_left_to_its_hosts(problems, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert not problems("pg_variant=needy_loss", needs=True)


SPREAD = ("actor_train.device_mapping=list(range(0,16))", "actor_train.strategy_args.strategy_name=spread_train")
AT = "actor_train.strategy_args.strategy_config"


def test_batches_are_counted_by_replicas(problems):
    assert not problems(*SPREAD, f"{AT}.tensor_size=4")  # 64 samples, 8 × 4 replicas
    ((key, message),) = problems(*SPREAD)  # 8 × 16 replicas
    assert key == ""
    assert mentions(message, "16", "128")


@pytest.mark.parametrize(
    ("override", "wrong"),
    [
        (f"+{AT}={{tensor_sise: 4}}", f"{AT}.tensor_sise"),
        (f"+{AT}={{tensor_size: four}}", f"{AT}.tensor_size"),
        (f"+{AT}=4", AT),
        (f"+{AT}={{tensor_size: '${{nowhere}}'}}", f"{AT}.tensor_size"),
        ("actor_train.strategy_args.strategy_name=spread_trian", "actor_train.strategy_args.strategy_name"),
    ],
)
def test_error_that_hides_the_replica_count_is_the_only_one(problems, override, wrong):
    assert keys(problems(*SPREAD, override)) == [wrong]


def test_indivisible_batch_is_an_error_without_a_replica_count(problems):
    found = problems(*SPREAD, f"{AT}.tensor_sise=4", "actor_train.training_args.per_device_train_batch_size=3")
    assert sorted(keys(found)) == ["", f"{AT}.tensor_sise"]


# -- functions of the user ---------------------------------------------------------------------------------------------

MINE = """
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated, Literal
from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

Clip = Annotated[float, Field(gt=0)]

def loss(logprobs_T: Tensor, micro, params, *, clip: Clip = 0.2, kind: Literal["a", "b"] = "a"): ...

def needy(logprobs_T, micro, params, beta: float, steps=3): ...
def wrong(logprobs_T, micro): ...
def untyped(logprobs_T, micro, params, *, clip: Missing = 1.0): ...
def estimator(batch, *, scale: float = 1.0): ...
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The working directory, which is not on the module path, has a module."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "mine_of_a_test.py").write_text(MINE)
    (folder / "broken_of_a_test.py").write_text("raise SystemExit('no')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("mine_of_a_test", None)


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("overrides", "wrong"),
    [
        (["pg_variant=mine_of_a_test:loss"], []),
        (["pg_variant=mine_of_a_test:loss", "pg_options={clip: 1, kind: b}"], []),
        (["pg_variant=mine_of_a_test:loss", "pg_options={clip: -1, kind: c, clp: 1}"], ["clip", "clp", "kind"]),
        (["pg_variant=mine_of_a_test:needy"], ["beta"]),
        (["pg_variant=mine_of_a_test:needy", "pg_options={beta: 1.0, steps: 2.5}"], ["steps"]),
        (["pg_variant=mine_of_a_test:wrong"], None),
        (["pg_variant=mine_of_a_test:untyped"], None),
        (["pg_variant=mine_of_a_test:missing"], None),
        (["pg_variant=broken_of_a_test:loss"], None),
        (["pg_variant=nowhere_of_a_test:loss"], None),
    ],
)
def test_user_function_is_a_policy_loss_with_its_options(problems, overrides, wrong):
    found = problems(*overrides)
    assert sorted(keys(found)) == (["pg_variant"] if wrong is None else [f"pg_options.{key}" for key in wrong])


@pytest.mark.usefixtures("mine")
def test_user_function_is_an_estimator_with_its_options(problems):
    chosen = "adv_estimator=mine_of_a_test:estimator"
    assert not problems(chosen, "adv_options={scale: 2.0}", "norm_mean_type=batch")
    assert keys(problems(chosen, "adv_options={scale: two}")) == ["adv_options.scale"]


@pytest.mark.parametrize(
    ("name", "key"), [("dapo", "pg_clip_high"), ("dr_grpo", "norm_mean_type"), ("raftpp", "raft_plus_plus")]
)
def test_names_of_other_frameworks_are_answered_with_keys(problems, name, key):
    with raises_error(UnknownProviderError, key):
        Registry(hf_plugins()).find(PolicyLossProvider, name)
    assert keys(problems(f"pg_variant={name}")) == ["pg_variant"]
