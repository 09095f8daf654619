"""Losses of routers are in the gradient as plain torch puts them there, whatever the arrangement, and are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_programs import DEEPSEEK, MIXTURE, case_on, score_and_train

from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Split, Step
from roll_testing.bounds import check_near, distance
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES, TRAINING
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import fail_to_build
from roll_testing.reference import TransformersModel
from shared_tests.router_losses import METRICS, ROUTER_LOSSES, Balanced

VOCABULARY = 61
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
EP = {"expert_model_parallel_size": 2}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
CP = {"context_parallel_size": 2}


def case_of(folder, architecture, ranks, config, *, checkpointing=False):
    model = write_checkpoint(folder, architecture, task="causal_lm", vocab_size=VOCABULARY)
    return case_on(ranks, config, replace(model, gradient_checkpointing=checkpointing))


def steps(calls=1):
    split = Split(max_sequences=3)
    return [
        Step(sequences=make_batch(VOCABULARY, seed=seed), loss=LOSSES["sft"], split=split, calls=calls)
        for seed in range(2)
    ]


@pytest.mark.parametrize(
    ("architecture", "ranks", "config", "checkpointing"),
    [
        pytest.param(MIXTURE, 1, ROUTER_LOSSES, False, id="one rank"),
        pytest.param(MIXTURE, 2, ROUTER_LOSSES | EP, False, id="experts over replicas"),
        pytest.param(MIXTURE, 2, ROUTER_LOSSES | TP, True, id="tensor, layers recomputed"),
        pytest.param(MIXTURE, 2, ROUTER_LOSSES | PP, True, id="stages, layers recomputed"),
        pytest.param(MIXTURE, 2, ROUTER_LOSSES | CP, False, id="context"),
        pytest.param(MIXTURE, 1, ROUTER_LOSSES | {"moe_layer_recompute": True}, True, id="experts recomputed"),
        pytest.param(MIXTURE, 1, {"moe_aux_loss_coeff": 0.5}, False, id="balance alone", marks=pytest.mark.slow),
        pytest.param(MIXTURE, 1, {"moe_z_loss_coeff": 0.05}, False, id="z alone", marks=pytest.mark.slow),
        pytest.param(
            DEEPSEEK,
            2,
            ROUTER_LOSSES | EP | TP | WHOLE_EXPERTS,
            False,
            id="deepseek, experts, tensor",
            marks=pytest.mark.slow,
        ),
        pytest.param(MIXTURE, 4, ROUTER_LOSSES | CP | TP, False, id="tensor, context", marks=pytest.mark.slow),
        pytest.param(MIXTURE, 4, ROUTER_LOSSES | EP | PP, False, id="experts, stages", marks=pytest.mark.slow),
    ],
)
def test_router_losses_have_equal_gradients_for_any_split(host, tmp_path, architecture, ranks, config, checkpointing):
    case = case_of(tmp_path, architecture, ranks, config, checkpointing=checkpointing)
    every = steps(calls=2)
    answers = host.run(
        score_and_train, case, every[0].sequences, every, WantedOutputs(logprobs=True), num_ranks=ranks, timeout_s=200
    )
    leaders = [each for each in answers if each["place"].leader]
    reference, plain = (Balanced(TransformersModel(case.model), each) for each in (config, {}))
    start = reference.weights()
    for at, right in enumerate(reference.train(TRAINING, every)):
        assert leaders[0]["stats"][at].grad_norm == pytest.approx(right.grad_norm, rel=1e-4)
        assert sum(each["losses"][at] for each in leaders) == pytest.approx(right.loss, rel=1e-4)
        for name, key in METRICS:
            shares = [each["metrics"][at].get(name) for each in leaders]
            if key in config:
                assert sum(each or 0.0 for each in shares) == pytest.approx(reference.reported[at][name], rel=1e-4)
            else:
                assert shares == [None] * len(leaders)
    list(plain.train(TRAINING, every))
    went = {name: leaders[0]["weights"][name] - each for name, each in start.items()}
    should, without = (
        {name: each - start[name] for name, each in found.weights().items()} for found in (reference, plain)
    )
    check_near("the way that the weights went", went, should, 1e-4)
    assert distance(without, should) > 1e-2


def test_experts_that_a_model_does_not_have_cannot_be_balanced(host, tmp_path):
    case = case_of(tmp_path, QWEN3, 1, {"moe_aux_loss_coeff": 0.001})
    ((error, _),) = host.run(fail_to_build, case, timeout_s=100)
    assert error.kinds[0] == "ModelError"
    assert mentions(error.message, "experts")
