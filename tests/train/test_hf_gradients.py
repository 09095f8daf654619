"""The gradient of a batch is the same however it is split; steps are those of plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.pack import count_totals, pack
from roll_core.errors import DataError, NonFiniteError, UnsupportedError
from roll_core.spec.model import ModelSpec
from roll_core.spec.train import LossOutput, TokenOutputs, TrainingSpec, WantedOutputs
from roll_core.types import TrainSequence
from roll_modeling.model import load_model
from roll_modeling.optimizer import schedule
from roll_modeling.task_model import finite_loss
from roll_strategy_hf.config import HFTrainConfig
from roll_testing.errors import raises_error
from shared_tests.tiny_architectures import MIXERS


def summed_gradient(strategy, micros, loss):
    """The flat gradient of a batch, and the sum of its losses; the strategy is left without gradients."""
    metrics = strategy.forward_backward(micros, loss)
    gradient = strategy.optimizer.flat_grad.clone()
    strategy.optimizer.flat_grad.zero_()
    return gradient, sum(each["loss"] for each in metrics)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((found - expected).norm() / expected.norm())


OBJECTIVES = {"causal_lm": sft_objective(), "value": ValueObjective()}


@pytest.mark.parametrize("task", OBJECTIVES)
def test_the_gradient_does_not_depend_on_how_it_is_computed(build, sequences, task):
    micros = pack(sequences)
    whole, _ = summed_gradient(build(task=task), micros, OBJECTIVES[task])
    for other in (
        build(task=task, attn_implementation="sdpa"),
        build(task=task, attn_implementation="eager"),
        build(task=task, gradient_checkpointing=True),
        build(task=task, config=HFTrainConfig(logprob_chunk_tokens=3)),
    ):
        gradient, _ = summed_gradient(other, micros, OBJECTIVES[task])
        assert relative(gradient, whole) < 1e-6


def test_gradient_checkpointing_computes_every_layer_again(build, sequences, tiny):
    def calls_of(strategy):
        counted = []
        for layer in strategy.model.model.layers:
            layer.self_attn.register_forward_hook(lambda *_: counted.append(1))
        strategy.forward_backward(pack(sequences), sft_objective())
        return len(counted)

    assert calls_of(build()) == tiny["num_hidden_layers"]
    assert calls_of(build(gradient_checkpointing=True)) == 2 * tiny["num_hidden_layers"]


def test_sequences_without_a_token_in_the_loss_change_nothing(build, sequences):
    strategy = build()
    whole, _ = summed_gradient(strategy, pack(sequences), sft_objective())
    trained = [each for each in sequences if each.loss_mask.any()]
    gradient, _ = summed_gradient(strategy, pack(trained, totals=count_totals(sequences)), sft_objective())
    assert relative(gradient, whole) < 1e-6


def test_a_batch_wholly_masked_has_no_gradient(build):
    nothing = [TrainSequence(id="a", tokens=np.arange(4), loss_mask=np.zeros(4, np.bool_))]
    gradient, loss = summed_gradient(build(), pack(nothing), sft_objective())
    assert float(gradient.abs().sum()) == 0.0
    assert loss == 0.0


def test_masked_only_zeroes_other_tokens_and_keeps_the_masked(build, sequences):
    strategy = build()
    (micro,) = pack(sequences)
    full = strategy.forward(micro, WantedOutputs(logprobs=True)).logprobs_T
    part = strategy.forward(micro, WantedOutputs(logprobs=True, masked_only=True)).logprobs_T
    torch.testing.assert_close(part[micro.loss_mask_T], full[micro.loss_mask_T])
    assert float(part[~micro.loss_mask_T].abs().sum()) == 0.0


# -- steps -------------------------------------------------------------------------------------------------------------


SCHEDULES = [
    ("linear", {}),
    ("cosine", {"num_cycles": 1.0}),
    ("constant_with_warmup", {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_with_min_lr", {"min_lr": 1e-7}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 4e-7, "power": 2.0}),
    ("inverse_sqrt", {"timescale": 3.0}),
]


@pytest.mark.parametrize(("name", "kwargs"), SCHEDULES, ids=str)
def test_learning_rates_are_those_of_transformers(name, kwargs):
    from transformers import get_scheduler

    training = TrainingSpec(
        learning_rate=2e-6, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, warmup_steps=2, num_steps=6
    )
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-6)
    rate = get_scheduler(name, plain, num_warmup_steps=2, num_training_steps=6, scheduler_specific_kwargs=kwargs)
    factor = schedule(training)
    for step in range(8):
        assert training.learning_rate * factor(step) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
        plain.step()
        rate.step()


@pytest.mark.parametrize(
    ("name", "kwargs", "named"),
    [
        ("constant_with_warmup", {"min_lr_rate": 0.1}, "min_lr_rate"),
        ("linear", {"min_lr": 1e-7}, "min_lr"),
        ("cosine_with_min_lr", {}, "min_lr"),
        ("polynomial", {"lr_end": 1.0}, "lr_end"),
    ],
)
def test_arguments_that_a_schedule_does_not_have_are_refused(name, kwargs, named):
    training = TrainingSpec(learning_rate=2e-6, lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, num_steps=6)
    with raises_error(UnsupportedError, "lr_scheduler_kwargs", named):
        schedule(training)


class Poisoned:
    """A loss that is NaN because of one sequence's logprobs, or by itself."""

    want = WantedOutputs(logprobs=True)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, outputs, micro):
        return LossOutput(loss=outputs.logprobs_T.sum() * self.factor)


def test_a_nan_that_the_loss_made_itself_names_the_microbatch(build, sequences):
    with raises_error(NonFiniteError, "s0", "s1"):
        build().forward_backward(pack(sequences), Poisoned(math.nan))


@pytest.mark.parametrize(
    "name", ["logprobs_T", "entropy_T", "values_T", "gathered_logprobs_TK", "hidden_TH", "compared_T"]
)
def test_nan_in_an_output_read_by_a_loss_names_its_sequence(sequences, name):
    (micro,) = pack(sequences)
    output = torch.zeros(micro.num_tokens, 2) if name.endswith(("K", "H")) else torch.zeros(micro.num_tokens)
    output[micro.segments_T == 2] = math.nan

    def loss(outputs, micro):
        return LossOutput(loss=getattr(outputs, name).sum(), metrics={})

    with pytest.raises(NonFiniteError) as raised:
        finite_loss(
            loss, TokenOutputs(topk_ids_TK=micro.tokens_T.new_zeros(micro.num_tokens, 0), **{name: output}), micro
        )
    named = [each.id for each in sequences if each.id in str(raised.value)]
    assert named == ["s2"]


DROPOUT = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.5},
    # Falcon's layers themselves drop elements, not a module inside.
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout": 0.5},
}


@pytest.mark.parametrize("model_type", DROPOUT)
def test_dropout_in_the_config_does_not_reach_training(build, sequences, model_type):
    keys = {"model_type": model_type, "vocab_size": 61, **DROPOUT[model_type]}
    gradient, loss = summed_gradient(build(random_init=keys), pack(sequences), sft_objective())
    strategy = build(random_init=keys, gradient_checkpointing=True)
    for _ in range(2):
        again, loss_again = summed_gradient(strategy, pack(sequences), sft_objective())
        assert loss_again == loss
        assert relative(again, gradient) < 1e-6


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("task", OBJECTIVES)
def test_a_model_with_float32_residuals_trains_in_bfloat16(build, sequences, name, task):
    gradients = {}
    for dtype in ("fp32", "bf16"):
        strategy = build(random_init=MIXERS[name], dtype=dtype, task=task)
        gradients[dtype], _ = summed_gradient(strategy, pack(sequences), OBJECTIVES[task])
    assert relative(gradients["bf16"].float(), gradients["fp32"]) < 0.1
    if task == "causal_lm":
        model = load_model(ModelSpec(random_init=MIXERS[name], dtype="bf16", seed=3))
        row = sequences[2]
        tokens = torch.from_numpy(row.tokens)
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0].float(), dim=-1)
        found = strategy.forward(pack([row])[0], WantedOutputs(logprobs=True)).logprobs_T
        torch.testing.assert_close(found[1:], logp[:-1].gather(1, tokens[1:, None])[:, 0], rtol=0, atol=0.1)


@pytest.mark.parametrize("task", OBJECTIVES)
def test_sequences_beyond_a_table_of_positions_are_named(build, sequences, task):
    keys = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 11}
    strategy = build(random_init=keys, task=task)
    with raises_error(DataError, "s4", "12", "11"):
        strategy.forward_backward(pack(sequences), OBJECTIVES[task])
    want = WantedOutputs(values=True) if task == "value" else WantedOutputs(logprobs=True)
    with raises_error(DataError, "s4"):
        strategy.forward(pack(sequences)[0], want)
    strategy.forward(pack(sequences[:4])[0], want)
