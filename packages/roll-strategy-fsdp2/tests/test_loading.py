"""A stored model is read share by share, and is then the one that transformers loads."""

from __future__ import annotations

import json

import pytest
from fsdp2_programs import TINY, Job, peak_of_build, same_weights, scored, train, train_from_files, weights

from roll_core.spec.model import MeshInfo, ModelSpec
from roll_modeling.model import load_model
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from roll_testing.ranks import RanksFailedError

pytestmark = pytest.mark.engine

ROPE = TINY | {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}


def write(folder, model, shard_size, task="causal_lm"):
    """A directory with the weights in several files, or one."""
    load_model(ModelSpec(random_init=model, seed=5, task=task)).save_pretrained(folder, max_shard_size=shard_size)
    return str(folder)


@pytest.mark.parametrize(
    ("job", "change", "shard_size"),
    [
        (Job(world_size=2), {}, "20KB"),
        (Job(world_size=3), {"tie_word_embeddings": True}, "1GB"),
        (Job(world_size=2, model={"dtype": "bf16"}), {}, "20KB"),
        (Job(world_size=2, model={"task": "reward"}), {}, "20KB"),
        (Job(world_size=4, config={"fsdp_size": 2, "offload_policy": True}), {}, "1GB"),
        (Job(world_size=2, config={"tensor_model_parallel_size": 2}), {"tie_word_embeddings": True}, "20KB"),
        (Job(world_size=4, config={"tensor_model_parallel_size": 2}), {"intermediate_size": 50}, "1GB"),
    ],
    ids=["several files", "3 ranks, tied", "bf16", "reward", "2 x 2, on the host", "tensor 2", "2 x tensor 2, uneven"],
)
def test_a_model_read_share_by_share_is_the_one_loaded_whole(ranks, tmp_path, job, change, shard_size):
    task = job.model.get("task", "causal_lm")
    path = write(tmp_path, ROPE | change, shard_size, task)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "20KB")
    answers = ranks(train_from_files, job.with_(model=job.model | {"path": path}))
    strategy = HFTrainStrategy(HFTrainConfig(), None)
    strategy.build(ModelSpec(path=path, task=task, dtype=job.model.get("dtype", "fp32")), MeshInfo(role="reference"))
    assert same_weights(answers[0]["before"], weights(strategy))
    # Rotary frequencies stand in no file; their base here is not the default.
    expected = scored(strategy, job)
    strategy.close()
    found = {name: rows for each in answers for name, rows in each["scored_before"].items()}
    for name, rows in expected.items():
        bound = 0.1 if "dtype" in job.model else 1e-5
        assert abs(found[name][:, :2] - rows[:, :2]).max() < bound


def test_critic_from_a_language_model_is_loaded_with_a_new_head(ranks, tmp_path):
    path = write(tmp_path, TINY, "1GB")
    answers = ranks(train, Job(world_size=2, model={"path": path, "task": "value"}), 1)
    whole = load_model(ModelSpec(path=path, task="value", seed=3))
    assert same_weights(answers[0]["before"], {name: each.detach().numpy() for name, each in whole.named_parameters()})


def test_files_of_another_shape_are_named(ranks, tmp_path):
    path = write(tmp_path, TINY, "1GB")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with raises_error(RanksFailedError, "ModelError", "model.safetensors", "model.layers.0.mlp.gate_proj.weight"):
        ranks(train, Job(world_size=2, model={"path": path}), 1)


def test_no_rank_holds_the_whole_model_while_it_is_read(ranks, tmp_path):
    large = TINY | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}
    path = write(tmp_path, large, "20MB")
    whole = sum(each.stat().st_size for each in tmp_path.glob("*.safetensors"))
    assert whole > 90 << 20
    for peak in ranks(peak_of_build, Job(world_size=4, model={"path": path}, training=None)):
        # Its quarter, and layers (a sixteenth each) that are gathered while the model is tried.
        assert 0.25 * whole < peak < 0.6 * whole
