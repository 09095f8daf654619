"""What tensor parallelism refuses; its numbers, and what each rank holds, are in `test_numbers`."""

from __future__ import annotations

import pytest
from fsdp2_programs import TINY, Job, train
from torch.distributed.device_mesh import init_device_mesh

from roll_core.errors import PlacementError, UnsupportedError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_modeling.model import load_model
from roll_modeling.process_group import ProcessGroup
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.sharding import make_meshes
from roll_strategy_fsdp2.tensor_parallel import parallelize
from roll_testing.errors import raises_error
from roll_testing.ranks import RanksFailedError

pytestmark = pytest.mark.engine

TENSOR = {"tensor_model_parallel_size": 2}
ATTENTION = "layers.*.self_attn."


@pytest.fixture
def mesh():
    """Of one rank."""
    group = ProcessGroup(MeshInfo(role="actor_train"))
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    group.close()


@pytest.fixture
def model():
    return load_model(ModelSpec(random_init=TINY))


def test_an_architecture_without_a_plan_is_refused(mesh):
    gpt2 = load_model(ModelSpec(random_init={"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_head": 4}))
    with raises_error(UnsupportedError, "GPT2LMHeadModel"):
        parallelize(gpt2, mesh)


def test_a_style_that_is_not_known_is_named(mesh, model):
    model.base_model._tp_plan = model.base_model._tp_plan | {f"{ATTENTION}o_proj": "sequence_parallel"}
    with raises_error(UnsupportedError, "layers.0.self_attn.o_proj", "'sequence_parallel'"):
        parallelize(model, mesh)


def test_plan_without_norms_between_cut_layers_is_refused(mesh, model):
    plan = dict(model.base_model._tp_plan)
    del plan[f"{ATTENTION}k_norm"]
    model.base_model._tp_plan = plan
    with raises_error(UnsupportedError, "layers.0.self_attn.k_norm"):
        parallelize(model, mesh)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, ("num_key_value_heads", "3")),
        (
            {"intermediate_size": 49},
            ("0", "layers.0.mlp.gate_proj.weight", "49", "32"),
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            ("3", "layers.0.mlp.experts"),
        ),
    ],
    ids=["heads", "hidden units", "experts"],
)
def test_sizes_that_are_no_multiple_of_the_ranks_are_named(ranks, change, facts):
    job = Job(world_size=2, config=TENSOR, model={"random_init": TINY | change})
    with raises_error(RanksFailedError, "PlacementError", *facts):
        ranks(train, job)


def test_sizes_must_divide_the_ranks():
    mesh = MeshInfo(role="actor_train", world_size=6)
    with raises_error(PlacementError, "tensor_model_parallel_size", "4", "6"):
        make_meshes(mesh, FSDP2Config(tensor_model_parallel_size=4))
    with raises_error(PlacementError, "fsdp_size", "2", "3"):
        make_meshes(mesh, FSDP2Config(tensor_model_parallel_size=2, fsdp_size=2))
