"""What the conformance kit does not ask: uneven work, `hf_train` beside it, memory, and a host without a compiler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from deepspeed_programs import (
    Held,
    export_in_pieces,
    forward_while_away,
    hand_over,
    hold,
    move_and_count,
    raise_and_go_on,
)

from roll_core.spec.model import LoraSpec
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Step
from roll_testing.bounds import check_near, check_rows, check_same, check_same_run
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES, SPLITS, TRAINING, SpoiltLoss
from roll_testing.models import make_batch, write_checkpoint
from roll_testing.programs import Trained, score, train
from roll_testing.reference import Reference, TransformersModel
from roll_testing.train_kit import registry
from shared_tests.flow_experts import check_experts
from shared_tests.module_programs import check_disagreement, check_low_precision
from shared_tests.moving_average import check_moving_average
from shared_tests.stored_buffers import check_stored_buffers
from shared_tests.tiny_architectures import write_multimodal
from shared_tests.tiny_models import tiny_config

BATCH = make_batch(61)
STEPS = [
    Step(sequences=make_batch(61, seed=seed), loss=LOSSES["sft"], split=SPLITS["three at a time"]) for seed in range(3)
]
TWICE = STEPS[:2], STEPS[1:]
HOST = {"device": "cpu", "pin_memory": False}
OFFLOADED = {
    "zero1": {"stage": 1, "offload_optimizer": HOST},
    "zero2": {"stage": 2, "offload_optimizer": HOST},
    "zero3": {"stage": 3, "offload_optimizer": HOST},
    "zero3, parameters too": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}


def zero(stage, **keys):
    small = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"zero_optimization": {"stage": stage, **small, **keys}}


ON_HOST = [{"zero_optimization": OFFLOADED[name]} for name in ("zero2", "zero3")]


def sometimes(*values):
    """Parameters that CI leaves out: DeepSpeed has one optimizer for stages 1 and 2, and one for stage 3."""
    return [pytest.param(each, marks=pytest.mark.slow) for each in values]


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_ranks_score_any_number_of_microbatches(ranks, case, stage, num_sequences):
    """One and none; three and two."""
    some, want = BATCH[-num_sequences:], WantedOutputs(logprobs=True)
    two = case.with_(strategy_config=zero(stage), world_size=2, training=None)
    answers = ranks(score, two, some, want, SPLITS["one by one"])
    assert len({len(each.get("logprobs", ())) for each in answers}) == 2, "ranks have shares of unequal size"
    found = {name: row for each in answers for name, row in each.get("logprobs", {}).items()}
    expected = Reference(TransformersModel(case.model), "causal_lm").by_sequence(some, want)["logprobs"]
    check_rows("logprobs", found, expected, 1e-4)


@pytest.mark.parametrize("keys", OFFLOADED.values(), ids=OFFLOADED)
def test_with_states_on_the_host_it_trains_as_hf_train(ranks, case, keys):
    trains_as_hf_train(ranks, case, {"zero_optimization": keys})


@pytest.mark.parametrize("stage", [1, 3])
def test_selective_recomputation_trains_as_hf_train(ranks, case, stage):
    recomputed = case.with_(model=replace(case.model, gradient_checkpointing=True))
    trains_as_hf_train(ranks, recomputed, zero(stage) | {"recompute_granularity": "selective"})


@pytest.mark.parametrize("stage", [*sometimes(0, 1), 2, 3])
def test_text_trains_a_model_with_images_as_in_hf_train(ranks, case, tmp_path, stage):
    trains_as_hf_train(ranks, case.with_(model=write_multimodal(tmp_path, "qwen3_vl")), zero(stage))


@pytest.mark.slow
def test_heads_of_several_layers_train_as_in_hf_train(ranks, case, tmp_path):
    """The head is a dense layer, a norm and the output layer. ZeRO gathers each for the model's own code."""
    model = write_checkpoint(tmp_path, tiny_config("modernbert-decoder"), task="causal_lm", vocab_size=61)
    trains_as_hf_train(ranks, case.with_(model=model), zero(3))


def trains_as_hf_train(ranks, case, strategy_config):
    found: Trained = ranks(train, case.with_(strategy_config=strategy_config, world_size=2), STEPS)[0]
    hf = case.with_(provider=registry().find(TrainProvider, "hf_train"), world_size=2)
    plain: Trained = ranks(train, hf, STEPS)[0]
    for one, other in zip(found.stats, plain.stats, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert one.learning_rate == other.learning_rate
    way = {name: each - plain.before[name] for name, each in found.after.items()}
    check_near("way", way, {name: each - plain.before[name] for name, each in plain.after.items()}, 1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_non_finite_loss_of_a_rank_is_raised_on_all_ranks(ranks, case, stage):
    case = case.with_(strategy_config=zero(stage), world_size=2)
    spoilt = replace(STEPS[0], loss=SpoiltLoss(sequence=STEPS[0].sequences[4].id))
    straight = ranks(train, case, STEPS[1:])
    for (error, after), expected in zip(ranks(raise_and_go_on, case, spoilt, STEPS[1:]), straight, strict=True):
        assert error.kinds[0] == "NonFiniteError"
        assert STEPS[0].sequences[4].id in error.message
        check_same_run("steps after the error", after, expected)


@pytest.mark.parametrize("keys", [*sometimes({"stage": 0}, {"stage": 2}), OFFLOADED["zero1"], {"stage": 3}], ids=str)
def test_moving_average_equals_hf_train_and_resumes_exactly(ranks, case, tmp_path, keys):
    """At stage 3, small parameters stay gathered between steps."""
    check_moving_average(ranks, case.with_(strategy_config={"zero_optimization": keys}, world_size=2), tmp_path)


# -- module programs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_programs_that_differ_between_ranks_raise_on_all(ranks, case, stage):
    check_disagreement(ranks, case.with_(strategy_config=zero(stage)))


@pytest.mark.parametrize("stage", [0, 3])
def test_programs_in_bf16_stay_near_float32(ranks, case, stage):
    check_low_precision(ranks, case.with_(strategy_config=zero(stage)), "bf16", 0.02)


@pytest.mark.parametrize("keys", [*sometimes(zero(0), zero(1), *ON_HOST), zero(2), zero(3)], ids=str)
def test_ranks_with_different_experts_train_as_one_rank(ranks, case, keys, tmp_path):
    pytest.importorskip("diffusers")
    check_experts(ranks, case.with_(strategy_config=keys), tmp_path)


# -- states and exports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"stage": 0}, {"stage": 1}, OFFLOADED["zero2"], {"stage": 3}], ids=str)
@pytest.mark.parametrize("lora", [None, LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)], ids=["whole", "lora"])
def test_stage_3_state_resumes_at_every_stage(ranks, case, keys, lora):
    case = case.with_(model=replace(case.model, lora=lora), strategy_config=zero(3))
    to = case.with_(strategy_config={"zero_optimization": keys})
    first, second = ranks(hand_over, case, to, *TWICE)[0]
    check_same("weights as imported", second.before, first.before)
    check_near("weights in the end", second.after, first.after, 1e-5)
    assert [each.learning_rate for each in second.stats] == [each.learning_rate for each in first.stats]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_export_is_written_while_it_is_gathered(ranks, case, tmp_path, stage):
    two = case.with_(strategy_config=zero(stage), world_size=2)
    (held, most), (_, nothing) = ranks(export_in_pieces, two, str(tmp_path), 20_000)
    assert nothing == 0
    assert 0 < most <= 20_000
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 3
    loaded = Reference(TransformersModel(replace(case.model, path=str(tmp_path))), "causal_lm").weights()
    check_same("weights", loaded, {name: held[name] for name in loaded})


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "copies"),
    [
        # Of the parameters' 4 bytes each, on each of two ranks: weights, gradients, and masters apart with two moments.
        (0, {"weights": 1, "grads": 1, "optimizer": 2}),
        (1, {"weights": 1, "grads": 1, "optimizer": 1.5}),
        (2, {"weights": 1, "grads": 0.5, "optimizer": 1.5}),
        (3, {"weights": 0.5, "grads": 0.5, "optimizer": 1.5}),
    ],
)
def test_memory_is_what_the_stage_leaves_on_each_rank(ranks, case, stage, copies):
    two = case.with_(strategy_config=zero(stage), world_size=2)
    weights = Reference(TransformersModel(case.model), "causal_lm").weights()
    numbers = 4 * sum(each.size for each in weights.values())
    for found in ranks(hold, two, STEPS[0]):
        for part, copy in copies.items():
            assert found[part] == pytest.approx(copy * numbers, rel=0.03), part


@pytest.mark.parametrize("stage", [*sometimes(1), 2, 3])
@pytest.mark.parametrize("parts", [("weights",), ("grads",), ("optimizer",), ("weights", "grads", "optimizer")])
def test_offloaded_states_leave_the_memory(ranks, case, stage, parts):
    found: Held = ranks(move_and_count, case.with_(strategy_config=zero(stage)), STEPS[0], parts)[0]
    assert found.said > 0
    assert found.said_away == 0
    # Counted over everything that Python can reach, but for the copies on the host.
    assert found.before - found.away >= found.said
    assert found.back == found.before


def test_a_role_whose_weights_are_away_says_so(ranks, case):
    raised = ranks(forward_while_away, case.with_(strategy_config=zero(1)), BATCH)[0]
    assert raised.kinds[0] == "UnsupportedError"
    assert mentions(raised.message, "weights", "onload")


# -- no compiler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [*sometimes({"stage": 0}, *OFFLOADED.values())[:-1], OFFLOADED["zero3, parameters too"]],
    ids=["zero0", *OFFLOADED],
)
def test_a_host_without_a_compiler_computes_the_same(ranks, ranks_without_programs, case, keys):
    case = case.with_(strategy_config={"zero_optimization": keys})
    found, expected = (run(train, case, STEPS)[0] for run in (ranks_without_programs, ranks))
    check_same_run("without a compiler", found, expected)
    check_same("weights", found.before, expected.before)
    assert any(not np.array_equal(each, found.before[name]) for name, each in found.after.items())
    assert TRAINING.learning_rate == found.stats[0].learning_rate


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_stored_buffers_are_part_of_the_portable_state(ranks, case, tmp_path, stage):
    check_stored_buffers(ranks, case.with_(strategy_config=zero(stage), world_size=2), tmp_path)
