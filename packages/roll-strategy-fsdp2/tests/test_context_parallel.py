"""What is refused when ranks share the tokens of a microbatch; its numbers are in `test_numbers`."""

from __future__ import annotations

import pytest
from fsdp2_programs import TINY, Job, train, train_with_tokens_mixed

from roll_core.errors import PlacementError
from roll_core.spec.model import MeshInfo
from roll_strategy_fsdp2.config import FSDP2Config
from roll_strategy_fsdp2.sharding import make_meshes
from roll_testing.errors import raises_error
from roll_testing.ranks import RanksFailedError
from shared_tests.tiny_architectures import MIXERS

pytestmark = pytest.mark.engine

ULYSSES = {"ulysses_size": 2}
RING = {"ring_size": 2}


def test_heads_that_cannot_be_dealt_out_are_named(ranks):
    with raises_error(RanksFailedError, "PlacementError", "ulysses_size", "3", "4"):
        ranks(train, Job(world_size=3, config={"ulysses_size": 3}))
    odd = TINY | {"num_attention_heads": 12, "num_key_value_heads": 3}
    with raises_error(RanksFailedError, "ulysses_size", "2", "3"):
        ranks(train, Job(world_size=2, config=ULYSSES, model={"random_init": odd}))


@pytest.mark.parametrize("config", [ULYSSES, RING], ids=["ulysses", "ring"])
def test_a_model_that_computes_with_padding_is_refused(ranks, config):
    job = Job(world_size=2, config=config, model={"attn_implementation": "sdpa"})
    with raises_error(RanksFailedError, "UnsupportedError", "attn_implementation"):
        ranks(train, job)


@pytest.mark.parametrize("config", [ULYSSES, RING], ids=["ulysses", "ring"])
def test_model_that_mixes_tokens_outside_attention_is_refused(ranks, config):
    with raises_error(RanksFailedError, "ModelError"):
        ranks(train_with_tokens_mixed, Job(world_size=2, config=config))


def test_a_model_without_attention_heads_is_refused(ranks):
    job = Job(world_size=2, config=ULYSSES, model={"random_init": MIXERS["mamba2"]})
    with raises_error(RanksFailedError, "UnsupportedError", "Mamba2ForCausalLM"):
        ranks(train, job)


def test_sizes_must_divide_the_ranks():
    with raises_error(PlacementError, "ring_size", "4", "6"):
        make_meshes(MeshInfo(role="actor_train", world_size=6), FSDP2Config(ring_size=4))
