"""Which layers are gathered as one, and what is refused before any rank waits for another."""

from __future__ import annotations

import pytest
from fsdp2_programs import TINY

from roll_core.errors import ModelError, PlacementError, WorkerError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_modeling.model import load_model
from roll_modeling.process_group import ProcessGroup
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.sharding import find_layers, make_meshes, shard
from roll_testing.errors import raises_error


@pytest.fixture(scope="module")
def model():
    return load_model(ModelSpec(random_init=TINY))


def test_layers_are_those_that_the_architecture_does_not_split(model):
    assert find_layers(model, []) == list(model.model.layers)


def test_a_list_of_all_layers_is_the_default_otherwise():
    keys = {"model_type": "openai-gpt", "vocab_size": 30, "n_positions": 8, "n_embd": 8, "n_layer": 3, "n_head": 2}
    model = load_model(ModelSpec(random_init=keys))
    assert not model._no_split_modules
    assert find_layers(model, []) == list(model.transformer.h)


def test_layers_that_share_a_weight_are_refused():
    model = load_model(ModelSpec(random_init=TINY))
    first, second = model.model.layers[:2]
    second.mlp.up_proj = first.mlp.up_proj
    with raises_error(ModelError, "Qwen3ForCausalLM", "mlp.up_proj.weight"):
        shard(model, None, FSDP2Config(), None)


def test_named_classes_are_found_outermost_first(model):
    found = find_layers(model, ["Qwen3DecoderLayer", "Qwen3MLP"])
    assert found == list(model.model.layers)
    assert find_layers(model, ["Qwen3MLP"]) == [each.mlp for each in model.model.layers]


def test_unknown_layer_class_error_names_the_models_classes(model):
    with raises_error(ModelError, "LlamaDecoderLayer", "Qwen3DecoderLayer"):
        find_layers(model, ["LlamaDecoderLayer"])


def test_fsdp_size_must_divide_the_ranks():
    with raises_error(PlacementError, "fsdp_size", "3", "4"):
        make_meshes(MeshInfo(role="actor_train", world_size=4), FSDP2Config(fsdp_size=3))


def test_roles_of_one_rank_share_a_process_and_others_do_not():
    import torch.distributed as dist

    one, two = (ProcessGroup(MeshInfo(role=name)) for name in ("actor_train", "reference"))
    with raises_error(WorkerError, "group"):
        ProcessGroup(MeshInfo(role="critic", world_size=2))
    one.close()
    one.close()
    assert dist.is_initialized()
    two.close()
    assert not dist.is_initialized()
