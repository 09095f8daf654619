"""Trainers and engines between which weights have no way are refused before anything starts."""

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.pipelines.plans import rlvr
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.registry import Registry
from roll_core.runtime.build import kept_apart
from roll_core.spec.providers import InferCapabilities, InferProvider, TrainCapabilities, TrainProvider

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
ENGINES = {"apart": ("shm", "shared")}


@pytest.fixture(scope="module")
def registry():
    providers = [
        TrainProvider(name=name, target="no:where", summary="", capabilities=TrainCapabilities(weight_transports=ways))
        for name, ways in TRAINERS.items()
    ] + [
        InferProvider(name=name, target="no:where", summary="", capabilities=InferCapabilities(weight_transports=ways))
        for name, ways in ENGINES.items()
    ]
    acme = Plugin(
        package="roll-acme", version="1", entry_point="acme", target="acme", state="loaded", providers=tuple(providers)
    )
    return Registry([*load_plugins(environ={"ROLL_PLUGINS": ""}), acme])


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
    ("names", "overrides", "why"),
    [
        (("hf_train", "hf_infer"), (), ""),
        (("hf_train", "apart"), (), ""),
        (
            ("apart_train", "hf_infer"),
            (),
            "actor_infer: apart_train brings its weights to hf_infer by shm, collective,"
            " between processes of their own",
        ),
        (
            ("hf_train", "hf_infer"),
            ("model_update_dir=/mnt/weights",),
            "actor_infer: model_update_dir is for trainers and engines in processes of their own",
        ),
    ],
)
def test_who_cannot_be_in_one_process_is_known_before_anything_starts(read, registry, names, overrides, why):
    config = read(*names, *overrides)
    assert kept_apart(rlvr(config).roles, config, registry) == why


@pytest.mark.parametrize(
    ("names", "overrides", "problem"),
    [
        (
            ("apart_train", "hf_infer"),
            ("executor=local",),
            "executor: apart_train brings its weights to hf_infer by shm, collective, between processes of their own:"
            " executor local has only one",
        ),
        (
            ("hf_train", "hf_infer"),
            ("executor=local", "model_update_dir=/mnt/weights"),
            "executor: model_update_dir is for trainers and engines in processes of their own: executor local",
        ),
        (
            ("apart_train", "hf_infer"),
            ("model_update_dir=/mnt/weights",),
            "model_update_dir: asks for the weight transport disk, which apart_train and hf_infer do not share",
        ),
        (
            ("alone_train", "apart"),
            (),
            "actor_infer.strategy_args.strategy_name: alone_train and apart have no weight transport in common",
        ),
        (("silent_train", "hf_infer"), (), "silent_train and hf_infer have no weight transport in common"),
    ],
)
def test_pairs_without_a_way_are_refused_where_they_are_written(read, names, overrides, problem):
    with pytest.raises(ConfigError) as caught:
        read(*names, *overrides)
    assert len(caught.value.problems) == 1
    assert problem in str(caught.value)


def test_a_trainer_that_nobody_knows_is_said_once(read):
    with pytest.raises(ConfigError) as caught:
        read("hf_trian", "apart")
    assert len(caught.value.problems) == 1
