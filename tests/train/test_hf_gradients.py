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
from roll_modeling.model import load_model, scalar_head
from roll_modeling.optimizer import schedule
from roll_modeling.task_model import finite_loss
from roll_strategy_hf.config import HFTrainConfig
from roll_testing.errors import raises_error
from roll_testing.models import MIXERS


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


def plain_loss(model, sequences):
    """The mean negative log-likelihood, sequence by sequence, as a textbook has it."""
    total = 0.0
    for row in sequences:
        tokens = torch.from_numpy(row.tokens)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        nll = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (nll * torch.from_numpy(row.loss_mask)[1:]).sum()
    return total / sum(row.loss_mask.sum() for row in sequences)


def test_the_gradient_equals_plain_transformers(build, sequences, tiny):
    strategy = build()
    gradient, loss = summed_gradient(strategy, pack(sequences), sft_objective())
    model = load_model(ModelSpec(random_init=tiny, seed=3))
    expected = plain_loss(model, sequences)
    expected.backward()
    flat = torch.cat([each.grad.flatten() for each in model.parameters()])
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert relative(gradient, flat) < 1e-6


@pytest.mark.parametrize("task", OBJECTIVES)
@pytest.mark.parametrize(
    "split", [{"max_sequences": 1}, {"max_sequences": 2}, {"max_tokens": 10}, {"max_tokens": 3}], ids=str
)
def test_gradient_does_not_depend_on_the_microbatch_split(build, sequences, task, split):
    strategy = build(task=task)
    whole, loss = summed_gradient(strategy, pack(sequences), OBJECTIVES[task])
    micros = pack(sequences, totals=count_totals(sequences), **split)
    assert len(micros) > 1
    gradient, loss_of_parts = summed_gradient(strategy, micros, OBJECTIVES[task])
    assert relative(gradient, whole) < 1e-6
    assert loss_of_parts == pytest.approx(loss, abs=1e-6)


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


def test_bf16_accumulates_in_float32_near_the_exact_gradient(build, sequences):
    exact, _ = summed_gradient(build(), pack(sequences), sft_objective())
    strategy = build(dtype="bf16")
    micros = pack(sequences, totals=count_totals(sequences), max_sequences=1)
    gradient, _ = summed_gradient(strategy, micros, sft_objective())
    assert gradient.dtype == torch.float32
    assert relative(gradient, exact) < 0.05


def test_values_are_of_the_state_before_each_token(build, sequences, tiny):
    strategy = build(task="value", forward_only=True)
    (micro,) = pack(sequences)
    values = strategy.forward(micro, WantedOutputs(values=True)).values_T
    model = load_model(ModelSpec(random_init=tiny, seed=3, task="value"))
    expected = []
    for row in sequences:
        with torch.no_grad():
            hidden = model.model(input_ids=torch.from_numpy(row.tokens)[None]).last_hidden_state[0]
            expected += [torch.zeros(1), scalar_head(model)(hidden)[:-1, 0]]
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=1e-5)


def test_last_value_of_a_reward_model_is_its_transformers_score(build, sequences, tiny):
    strategy = build(task="reward", forward_only=True)
    (micro,) = pack(sequences)
    values = strategy.forward(micro, WantedOutputs(values=True)).values_T
    model = load_model(ModelSpec(random_init=tiny, seed=3, task="reward"))
    for at, row in enumerate(sequences):
        with torch.no_grad():
            score = model(input_ids=torch.from_numpy(row.tokens)[None]).logits[0, 0]
        assert float(values[int(micro.cu_seqlens[at + 1]) - 1]) == pytest.approx(float(score), abs=1e-5)


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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_steps_equal_torchs_adamw_with_transformers_schedule(build, sequences, dtype, tiny):
    from transformers import get_scheduler

    training = TrainingSpec(
        learning_rate=1e-2,
        weight_decay=0.1,
        adam_beta2=0.95,
        warmup_steps=2,
        num_steps=6,
        lr_scheduler_type="cosine",
        max_grad_norm=0.5,
    )
    strategy = build(training=training, dtype=dtype)
    model = load_model(ModelSpec(random_init=tiny, seed=3))
    if dtype == "bf16":
        # The masters begin at the rounded weights, so the exact run must too.
        model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    start = torch.cat([each.detach().flatten() for each in model.parameters()])
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
        foreach=False,
    )
    rate = get_scheduler("cosine", adam, num_warmup_steps=2, num_training_steps=6)
    for _ in range(4):
        strategy.forward_backward(pack(sequences), sft_objective())
        stats = strategy.optimizer_step()
        adam.zero_grad()
        plain_loss(model, sequences).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert stats.learning_rate == pytest.approx(rate.get_last_lr()[0])
        adam.step()
        rate.step()
        if dtype == "fp32":
            assert stats.grad_norm == pytest.approx(float(norm), rel=1e-3)
    theirs = torch.cat([each.detach().flatten() for each in model.parameters()])
    mine = torch.cat([each.float().flatten() for _, each in strategy.export_weights()])
    moved = theirs - start
    assert relative(mine - start, moved) < (1e-3 if dtype == "fp32" else 0.2)


def test_biases_and_norms_are_not_decayed(build, sequences, tiny):
    training = TrainingSpec(learning_rate=1e-2, weight_decay=10.0, num_steps=9, lr_scheduler_type="constant")
    strategy = build(training=training, random_init=tiny | {"attention_bias": True})
    nothing = [TrainSequence(id="a", tokens=np.arange(4), loss_mask=np.zeros(4, np.bool_))]
    before = {name: each.clone() for name, each in strategy.export_weights()}
    strategy.forward_backward(pack(nothing), sft_objective())
    strategy.optimizer_step()
    for name, each in strategy.export_weights():
        factor = 1.0 if name.endswith((".bias", "norm.weight")) else 0.9
        torch.testing.assert_close(each, before[name] * factor)


def test_a_gradient_that_is_not_finite_changes_nothing(build, sequences):
    training = TrainingSpec(learning_rate=1e-2, warmup_steps=5, num_steps=10)
    skipping, straight = build(training=training), build(training=training)
    for at in range(3):
        for strategy in (skipping, straight):
            strategy.forward_backward(pack(sequences), sft_objective())
        if at == 1:
            skipping.optimizer.flat_grad[7] = math.inf
            before = [each.clone() for _, each in skipping.export_weights()]
            stats = skipping.optimizer_step()
            assert stats.skipped
            assert not math.isfinite(stats.grad_norm)
            assert all(torch.equal(a, b) for a, (_, b) in zip(before, skipping.export_weights(), strict=True))
            skipping.forward_backward(pack(sequences), sft_objective())
        assert skipping.optimizer_step() == straight.optimizer_step()
    for (_, one), (_, two) in zip(skipping.export_weights(), straight.export_weights(), strict=True):
        assert torch.equal(one, two)


class Poisoned:
    """A loss that is NaN because of one sequence's logprobs, or by itself."""

    want = WantedOutputs(logprobs=True)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, outputs, micro):
        return LossOutput(loss=outputs.logprobs_T.sum() * self.factor)


def test_a_nan_loss_names_the_sequences_and_leaves_no_gradient(build, sequences):
    strategy = build()
    with torch.no_grad():
        strategy.model.model.embed_tokens.weight[int(sequences[2].tokens[0])] = math.nan
    hit = [each.id for each in sequences if sequences[2].tokens[0] in each.tokens[:-1]]
    with raises_error(NonFiniteError, *hit):
        strategy.forward_backward(pack(sequences), Poisoned(1.0))
    assert float(strategy.optimizer.flat_grad.abs().sum()) == 0.0


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


def test_a_role_that_only_scores_has_no_optimizer(build, sequences):
    strategy = build(forward_only=True)
    assert set(strategy.memory()) == {"weights"}
    with raises_error(UnsupportedError, "student", "scores"):
        strategy.forward_backward(pack(sequences), sft_objective())
    with raises_error(UnsupportedError, "student", "scores"):
        strategy.optimizer_step()


def test_a_language_model_has_no_values_and_a_critic_no_logprobs(build, sequences):
    (micro,) = pack(sequences)
    with raises_error(UnsupportedError, "values"):
        build(forward_only=True).forward(micro, WantedOutputs(values=True))
    with raises_error(UnsupportedError, "logprobs"):
        build(task="value", forward_only=True).forward(micro, WantedOutputs(logprobs=True))


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
