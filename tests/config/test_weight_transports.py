"""Trainers and engines without a common weight transport are refused before anything starts."""

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.pipelines.plans import rlvr
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.runtime.workers.build import separate_processes_reason
from roll_core.spec.providers import (
    InferCapabilities,
    InferProvider,
    TrainCapabilities,
    TrainProvider,
    WeightTransportProvider,
)
from shared_tests.hf_plugins import hf_plugins

RLVR = """
pipeline: rlvr
actor_train:
  model_args: {random_init: {model_type: qwen3}}
  data_args: {file_name: prompts.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards: {math: {reward: math_rule}}
"""
TRAINERS = {"apart_train": ("shm", "collective"), "alone_train": ("disk",), "silent_train": ()}
ENGINES = {"apart": ("shm", "shared"), "alone": ("disk",)}


@pytest.fixture(scope="module")
def registry():
    providers = [
        TrainProvider(name=name, target="no:where", summary="", capabilities=TrainCapabilities(weight_transports=ways))
        for name, ways in TRAINERS.items()
    ] + [
        InferProvider(name=name, target="no:where", summary="", capabilities=InferCapabilities(weight_transports=ways))
        for name, ways in ENGINES.items()
    ]
    providers.append(WeightTransportProvider(name="pigeon", target="no:where", summary="", any_strategy=True))
    acme = Plugin(
        package="roll-acme", version="1", entry_point="acme", target="acme", state="loaded", providers=tuple(providers)
    )
    return Registry([*hf_plugins(), acme])


@pytest.fixture
def read(tmp_path, registry):
    """The config of a trainer and an engine, with overrides."""

    def read(trainer="hf_train", engine="hf_infer", *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(RLVR.lstrip(), encoding="utf-8")
        names = (
            f"actor_train.strategy_args.strategy_name={trainer}",
            f"actor_infer.strategy_args.strategy_name={engine}",
        )
        return load(path, [*names, *overrides], registry).config

    return read


@pytest.mark.parametrize(
    ("names", "overrides", "words"),
    [
        (("hf_train", "hf_infer"), (), []),
        (("hf_train", "apart"), (), []),
        (("apart_train", "hf_infer"), (), ["actor_infer", "apart_train", "hf_infer", "shm, collective"]),
        (("hf_train", "hf_infer"), ("model_update_dir=/mnt/weights",), ["actor_infer", "model_update_dir"]),
        (("hf_train", "hf_infer"), ("weight_transport=shm",), ["actor_infer", "shm"]),
        (("hf_train", "hf_infer"), ("weight_transport=pigeon",), ["actor_infer", "pigeon"]),
        (("hf_train", "hf_infer"), ("weight_transport=shared",), []),
    ],
)
def test_roles_that_need_separate_processes_are_known_early(read, registry, names, overrides, words):
    config = read(*names, *overrides)
    why = separate_processes_reason(rlvr(config).roles, config, registry)
    assert bool(why) == bool(words)
    assert all(word in why for word in words)


@pytest.mark.parametrize(
    ("names", "overrides", "key", "code", "words"),
    [
        (("apart_train", "hf_infer"), ("executor=local",), "executor", "ROLL-C014", ["shm, collective"]),
        (
            ("hf_train", "hf_infer"),
            ("executor=local", "model_update_dir=/mnt/weights"),
            "executor",
            "ROLL-C014",
            ["model_update_dir"],
        ),
        (
            ("apart_train", "hf_infer"),
            ("model_update_dir=/mnt/weights",),
            "model_update_dir",
            "ROLL-C030",
            ["apart_train", "hf_infer", "shm, collective"],
        ),
        (
            ("alone_train", "apart"),
            (),
            "actor_infer.strategy_args.strategy_name",
            "ROLL-C030",
            ["alone_train", "apart", "disk", "shm, shared"],
        ),
        (
            ("alone_train", "alone"),
            (),
            "actor_infer.strategy_args.strategy_name",
            "ROLL-C030",
            ["disk", "model_update_dir"],
        ),
        (
            ("silent_train", "hf_infer"),
            (),
            "actor_infer.strategy_args.strategy_name",
            "ROLL-C030",
            ["silent_train", "none"],
        ),
        (
            ("apart_train", "hf_infer"),
            ("weight_transport=shared",),
            "weight_transport",
            "ROLL-C030",
            ["shared", "train strategy"],
        ),
        (
            ("hf_train", "apart"),
            ("weight_transport=disk",),
            "weight_transport",
            "ROLL-C030",
            ["disk", "infer strategy"],
        ),
        (
            ("hf_train", "hf_infer"),
            ("weight_transport=disk",),
            "weight_transport",
            "ROLL-C030",
            ["disk", "model_update_dir"],
        ),
        (
            ("hf_train", "hf_infer"),
            ("weight_transport=shm", "model_update_dir=/mnt/weights"),
            "weight_transport",
            "ROLL-C030",
            ["shm", "model_update_dir"],
        ),
        (
            ("silent_train", "hf_infer"),
            ("weight_transport=pigeon",),
            "weight_transport",
            "ROLL-C030",
            ["pigeon", "train strategy"],
        ),
        (("hf_train", "hf_infer"), ("weight_transport=shn",), "weight_transport", "ROLL-P004", ["'shn'", "'shm'"]),
        (("hf_train", "hf_infer"), ("executor=local", "weight_transport=pigeon"), "executor", "ROLL-C014", ["pigeon"]),
    ],
)
def test_roles_without_a_common_transport_are_refused_in_config(read, names, overrides, key, code, words):
    with pytest.raises(ConfigError) as caught:
        read(*names, *overrides)
    (problem,) = caught.value.problems
    assert (problem.key, problem.code) == (key, code)
    assert all(word in f"{problem.message} {problem.hint}" for word in words)


SFT = """
pipeline: sft
sft_train:
  model_args: {random_init: {model_type: qwen3}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: silent_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
validation: {data_args: {file_name: prompts.jsonl}}
rewards: {math: {reward: math_rule}}
"""


def test_an_engine_that_only_evaluates_needs_a_transport_too(tmp_path, registry):
    path = tmp_path / "config.yaml"
    path.write_text(SFT, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, [], registry)
    (problem,) = caught.value.problems
    assert (problem.key, problem.code) == ("actor_infer.strategy_args.strategy_name", "ROLL-C030")
    assert load(path, ["sft_train.strategy_args.strategy_name=hf_train"], registry).config.actor_infer


def test_unknown_trainer_is_reported_once(read):
    with pytest.raises(ConfigError) as caught:
        read("hf_trian", "apart")
    assert len(caught.value.problems) == 1
