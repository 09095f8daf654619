"""Gradients are added up, clipped and stepped as plain torch does it, wherever parameters and moments are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_programs import (
    MIXTURE,
    case_on,
    masters_after,
    resume,
    save_after,
    score_and_train,
    train_alike,
)

from roll_core.spec.model import LoraSpec
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Split, Step
from roll_testing.bounds import check_near, distance
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES, TRAINING
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import fail_to_build
from roll_testing.ranks import free_port
from roll_testing.reference import Reference, TransformersModel

TIED = QWEN3 | {"tie_word_embeddings": True}
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
HOST = {"optimizer_cpu_offload": True}
HALF = HOST | {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}


def case_of(folder, architecture, ranks, config, training=TRAINING, dtype="fp32"):
    model = write_checkpoint(folder, architecture, task="causal_lm", vocab_size=61)
    return case_on(ranks, config, replace(model, dtype=dtype), training=training)


def steps(number=2):
    split = Split(max_sequences=3)
    return [Step(sequences=make_batch(61, seed=seed), loss=LOSSES["sft"], split=split) for seed in range(number)]


def trained(host, case):
    every = steps()
    answers = host.run(
        score_and_train,
        case,
        every[0].sequences,
        every,
        WantedOutputs(logprobs=True),
        num_ranks=case.world_size,
        timeout_s=200,
    )
    return next(each for each in answers if each["place"].leader), answers


def reference_steps(case, training):
    reference = Reference(TransformersModel(case.model), "causal_lm")
    start = reference.weights()
    found = list(reference.train(training, steps()))
    return found, start, {name: each - start[name] for name, each in reference.weights().items()}


@pytest.mark.parametrize(
    ("architecture", "ranks", "config"),
    [
        pytest.param(MIXTURE, 2, EP, id="experts over replicas"),
        pytest.param(TIED, 2, PP, id="a tied embedding, on both stages"),
        pytest.param(TIED, 2, TP, id="shares of matrices, whole norms", marks=pytest.mark.slow),
        pytest.param(MIXTURE, 4, EP | PP, id="experts, stages", marks=pytest.mark.slow),
        pytest.param(MIXTURE, 2, TP, id="shares of experts", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_clipped_by_one_norm_over_all_ranks(host, tmp_path, architecture, ranks, config):
    free = case_of(tmp_path, architecture, ranks, config)
    clipped = replace(TRAINING, max_grad_norm=0.3)
    leader, _ = trained(host, free.with_(training=clipped))
    expected, start, should = reference_steps(free, clipped)
    for stats, right in zip(leader["stats"], expected, strict=True):
        assert stats.grad_norm == pytest.approx(right.grad_norm, rel=1e-4)
        assert right.grad_norm > 2 * 0.3
    check_near("the way", {name: leader["weights"][name] - each for name, each in start.items()}, should, 1e-4)
    _, _, unclipped = reference_steps(free, TRAINING)
    assert distance(unclipped, should) > 0.05


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_of_a_model_in_bf16_are_added_up_in_float32(host, tmp_path, ranks):
    still = replace(TRAINING, learning_rate=0.0)
    case = case_of(tmp_path, QWEN3, ranks, {}, still, dtype="bf16")
    answers = host.run(train_alike, case, make_batch(61), (1, 64), num_ranks=ranks, timeout_s=200)
    for once, often in answers:
        # 64 times the same: in bf16 each sum is rounded to 8 bits.
        assert often == pytest.approx(64 * once, rel=1e-5)


@pytest.mark.parametrize(
    ("architecture", "ranks", "config"),
    [
        pytest.param(MIXTURE, 2, EP | HOST, id="experts over replicas"),
        pytest.param(QWEN3, 2, PP | HALF, id="half, overlapped, stages"),
        pytest.param(QWEN3, 2, TP | HALF, id="half, overlapped, tensor", marks=pytest.mark.slow),
    ],
)
def test_moments_on_the_host_take_the_same_steps(host, tmp_path, architecture, ranks, config):
    clipped = replace(TRAINING, max_grad_norm=0.3)
    case = case_of(tmp_path, architecture, ranks, config, clipped, dtype="bf16")
    plain = {key: value for key, value in config.items() if "opti" not in key}
    kept, here = (
        host.run(masters_after, each, steps(), num_ranks=ranks, timeout_s=200)
        for each in (case, case.with_(strategy_config=plain, master_port=free_port()))
    )
    start = Reference(TransformersModel(case.model), "causal_lm").weights()
    went, should = ({name: each[0][0][name] - start[name] for name in start} for each in (kept, here))
    check_near("the way", went, should, 1e-3)
    parameters = sum(each.size for each in start.values())
    if config.keys() & TP.keys():  # each rank has the norms, which are not cut
        parameters += sum(each.size for each in start.values() if each.ndim == 1)
    assert sum(held for _, held in here) == pytest.approx(12 * parameters, rel=0.01)
    left = sum(held for _, held in kept)
    if "optimizer_offload_fraction" in config:  # whole tensors go, until it is half of each rank's
        assert 4 * parameters < left <= 8.1 * parameters
    else:  # masters
        assert left == pytest.approx(4 * parameters, rel=0.01)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2, alpha=4.0, targets=("q_proj",))])
def test_moments_of_tensors_in_float32_stay(host, tmp_path, lora):
    case = case_of(tmp_path, QWEN3, 1, HOST, dtype="bf16" if lora else "fp32")
    ((error, _),) = host.run(fail_to_build, case.with_(model=replace(case.model, lora=lora)), timeout_s=100)
    assert error.kinds[0] == "UnsupportedError"
    assert mentions(error.message, "optimizer_cpu_offload", "bf16")


@pytest.mark.parametrize(
    ("saved_by", "read_by"), [pytest.param(HALF, {}, id="to the device"), pytest.param({}, HALF, id="to the host")]
)
def test_state_resumes_with_other_optimizer_offload(host, tmp_path, saved_by, read_by):
    case = case_of(tmp_path / "model", QWEN3, 2, PP | saved_by, dtype="bf16")
    folder = str(tmp_path / "state")
    expected, weights = host.run(save_after, case, steps(3), folder, num_ranks=2, timeout_s=150)[0]
    other = case.with_(strategy_config=PP | read_by, master_port=free_port())
    found, again = host.run(resume, other, steps(3)[-1], folder, num_ranks=2, timeout_s=150)[0]
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert distance(again, weights) < 1e-5
