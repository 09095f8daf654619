"""What expert parallelism refuses; its numbers, and what each rank holds, are in `test_numbers`."""

from __future__ import annotations

import pytest
from fsdp2_programs import MOE, TINY, Job, train

from roll_core.errors import PlacementError
from roll_core.spec.model import MeshInfo
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.sharding import make_meshes
from roll_testing.errors import raises_error
from roll_testing.ranks import RanksFailedError


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({}, ("UnsupportedError",)),
        (MOE | {"num_experts": 3}, ("PlacementError", "ep_size", "2", "3", "layers.0.mlp.experts")),
    ],
    ids=["no experts", "number"],
)
def test_models_whose_experts_cannot_be_spread_are_named(ranks, change, facts):
    job = Job(world_size=2, config={"ep_size": 2}, model={"random_init": TINY | change})
    with raises_error(RanksFailedError, *facts):
        ranks(train, job)


def test_the_ranks_of_a_copy_must_be_a_multiple():
    with raises_error(PlacementError, "ep_size", "4", "2"):
        make_meshes(MeshInfo(role="actor_train", world_size=4), FSDP2Config(ep_size=4, fsdp_size=2))
