"""The engine's experts under every arrangement: as hf_train replays them, which its tests hold against transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from megatron_programs import PRELOAD, score_and_train
from test_arrangements import (
    DEEPSEEK,
    FOUR,
    MIXTRAL,
    MIXTURE,
    VOCABULARY,
    Arrangement,
    case_of,
    host,
    run,
    sizes,
    steps,
)

from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import Want
from roll_core.testing.bounds import check_near, check_rows
from roll_core.testing.models import make_batch
from roll_core.testing.subject import registry
from roll_strategy_megatron.config import MegatronConfig

__all__ = ["PRELOAD", "host", "run"]  # fixtures
WANT = Want(logprobs=True, entropy=True)
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


def with_experts(batch, model, seed=0):
    """Drawn at random; of one sequence nothing is known, of another only the beginning."""
    experts = next(model[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in model)
    layers = model["num_hidden_layers"] - model.get("first_k_dense_replace", 0)
    rng, found = np.random.default_rng(seed), []
    for at, each in enumerate(batch):
        drawn = np.argsort(rng.random((len(each) - 1, layers, experts)), axis=-1)[..., : model["num_experts_per_tok"]]
        known = {2: 3, 4: 0}.get(at, len(drawn))
        found.append(replace(each, routed_experts=drawn[:known].astype(np.uint8) if at != 0 else None))
    return found


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
    alone = case.with_(
        provider=registry().find(TrainProvider, "hf_train"), strategy_config={}, world_size=1, devices=("cpu",)
    )
    (right,) = run(score_and_train, alone, batch, updates, WANT)
    (plain,) = run(score_and_train, alone, [replace(each, routed_experts=None) for each in batch], [], WANT)
    leaders = [each for each in answers if each["place"].leader]
    for name in ("logprobs", "entropy"):
        found = {key: row for each in leaders for key, row in each["scored"][name].items()}
        check_rows(name, found, right["scored"][name], 1e-4)
    moved = max(
        np.abs(right["scored"]["logprobs"][key] - row).max() for key, row in plain["scored"]["logprobs"].items()
    )
    assert moved > 0.01  # it would be seen if nothing were replayed
    for at, stats in enumerate(right["stats"]):
        assert sum(each["losses"][at] for each in leaders) == pytest.approx(right["losses"][at], rel=1e-4)
        for each in answers:
            assert each["stats"][at].grad_norm == pytest.approx(stats.grad_norm, rel=1e-4)
    went = {name: leaders[0]["weights"][name] - each for name, each in leaders[0]["before"].items()}
    should = {name: right["weights"][name] - each for name, each in leaders[0]["before"].items()}
    check_near("the way that the weights went", went, should, 1e-4)


def test_models_without_experts_are_refused():
    with pytest.raises(ValueError, match="the model is of type qwen3"):
        MegatronConfig().check_router_replay({"model_type": "qwen3"})
    MegatronConfig().check_router_replay({"model_type": "deepseek_v3"})
    MegatronConfig().check_router_replay({})
