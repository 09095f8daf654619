"""The engine's experts under every arrangement: as hf_train replays them, which its tests hold against transformers.
So is what the routers would have chosen otherwise, which each rank knows a part of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron_programs import score_and_train
from replay_programs import take_experts
from test_arrangements import (
    DEEPSEEK,
    FOUR,
    MIXTRAL,
    MIXTURE,
    VOCABULARY,
    Arrangement,
    case_of,
    run,
    sizes,
    steps,
)

from roll_core.data.pack import pack
from roll_strategy_megatron.config import MegatronConfig
from roll_strategy_megatron.packing import pack_for
from roll_testing.bounds import check_near, check_rows
from roll_testing.errors import raises_error
from roll_testing.models import make_batch
from shared_tests.replaying import WANT, on_hf_train, with_experts

__all__ = ["run"]  # a fixture
RECOMPUTED = {"checkpointing": True, "model": MIXTURE | FOUR}
QUICK = {
    "one rank": Arrangement(ranks=1, model=MIXTURE),
    "pp 2, vpp 2, layers recomputed": Arrangement(ranks=2, config=sizes(pp=2, vpp=2), **RECOMPUTED),
    "ep 2, cp 2": Arrangement(ranks=2, config=sizes(ep=2, cp=2), model=MIXTURE),
    "ep 2, tp 2, sp": Arrangement(ranks=2, config=sizes(ep=2, tp=2, etp=1, sp=True), model=MIXTURE),
    "deepseek, pp 2": Arrangement(ranks=2, config=sizes(pp=2), model=DEEPSEEK),
}
PRODUCTS = {
    "mixtral": Arrangement(ranks=1, model=MIXTRAL),
    "deepseek, layers recomputed": Arrangement(ranks=1, model=DEEPSEEK, checkpointing=True),
    "experts recomputed, pp 2": Arrangement(ranks=2, config=sizes(pp=2, moe_layer_recompute=True), **RECOMPUTED),
    "some layers recomputed": Arrangement(
        ranks=1,
        config={"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        **RECOMPUTED,
    ),
    "two layers recomputed together": Arrangement(
        ranks=1, config={"recompute_granularity": "full", "recompute_num_layers": 2}, **RECOMPUTED
    ),
    "dp 2, ep 2, allgather": Arrangement(
        ranks=2, config=sizes(ep=2, moe_token_dispatcher_type="allgather"), model=MIXTURE
    ),
    "ep 2, pp 2, several calls": Arrangement(ranks=4, config=sizes(ep=2, pp=2), model=MIXTURE, calls=(1, 2, 1)),
    "tp 2, cp 2, sp": Arrangement(ranks=4, config=sizes(tp=2, cp=2, sp=True), model=MIXTURE),
}
ARRANGEMENTS = [pytest.param(each, id=name) for name, each in QUICK.items()] + [
    pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in PRODUCTS.items()
]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_experts_are_replayed_as_in_one_process(run, tmp_path, arrangement):
    case = case_of(arrangement, tmp_path)
    case = case.with_(model=replace(case.model, router_replay=True))
    batch = with_experts(make_batch(VOCABULARY, seed=10), arrangement.model)
    updates = [
        replace(each, sequences=with_experts(each.sequences, arrangement.model, seed=1 + at))
        for at, each in enumerate(steps(arrangement.calls, "causal_lm"))
    ]
    answers = run(score_and_train, case, batch, updates, WANT)
    alone = on_hf_train(case)
    (right,) = run(score_and_train, alone, batch, updates, WANT)
    (plain,) = run(score_and_train, alone, [replace(each, routed_experts=None) for each in batch], [], WANT)
    leaders = [each for each in answers if each["place"].leader]
    for name in ("logprobs", "entropy", "routing_disagreement"):
        found = {key: row for each in leaders for key, row in each["scored"][name].items()}
        check_rows(name, found, right["scored"][name], 1e-4)
    moved = max(
        np.abs(right["scored"]["logprobs"][key] - row).max() for key, row in plain["scored"]["logprobs"].items()
    )
    assert moved > 0.01  # it would be seen if nothing were replayed
    for at, stats in enumerate(right["stats"]):
        assert sum(each["losses"][at] for each in leaders) == pytest.approx(right["losses"][at], rel=1e-4)
        shares = [each["metrics"][at].get("routing_disagreement", 0.0) for each in leaders]
        assert sum(shares) == pytest.approx(right["metrics"][at]["routing_disagreement"], rel=1e-4)
        assert 0.1 < sum(shares) < 1
        for each in answers:
            assert each["stats"][at].grad_norm == pytest.approx(stats.grad_norm, rel=1e-4)
    went = {name: leaders[0]["weights"][name] - each for name, each in leaders[0]["before"].items()}
    should = {name: right["weights"][name] - each for name, each in leaders[0]["before"].items()}
    check_near("the way that the weights went", went, should, 1e-4)


def test_stage_gets_the_experts_of_its_layers_per_microbatch(run, tmp_path):
    """The host has those of all layers and tokens."""
    case = case_of(Arrangement(ranks=2, config=sizes(pp=2), model=MIXTURE | FOUR), tmp_path)
    case = case.with_(model=replace(case.model, router_replay=True))
    batch = with_experts(make_batch(VOCABULARY, lengths=(9, 5, 3, 7)), MIXTURE | FOUR)  # of the first nothing is known
    for stage, taken in enumerate(run(take_experts, case, batch)):
        layers = [2 * stage, 2 * stage + 1]
        assert taken == [(layers, (length, 2, 2), 0) for length in (5, 3, 7)]


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_experts_lie_as_the_tokens_of_a_rank_do(cp_rank):
    experts = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # of 5 tokens but the last, in 3 layers, 2 each
    sequence = replace(make_batch(VOCABULARY, lengths=(5,))[0], routed_experts=experts)
    packing = pack_for(pack([sequence])[0], device=torch.device("cpu"), cp_rank=cp_rank, cp_size=2, align=2)
    # Two of four pieces of two, the first with the last: 5 tokens and 3 of padding.
    places = [0, 1, -1, -1] if cp_rank == 0 else [2, 3, 4, -1]
    expected = np.array([experts[place][[0, 2]] if 0 <= place < 4 else np.full((2, 2), -1) for place in places])
    assert packing.routed_experts.of([0, 2]).tolist() == expected.tolist()
    assert packing.routed_experts.of([0, 2], 1, 2).tolist() == expected[2:].tolist()


def test_models_without_experts_are_refused():
    with raises_error(ValueError, "qwen3"):
        MegatronConfig().check_router_replay({"model_type": "qwen3"})
    MegatronConfig().check_router_replay({"model_type": "deepseek_v3"})
    MegatronConfig().check_router_replay({})
