"""Losses and metrics that are read once for all microbatches of a call."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_core.data.module_rows import module_batches
from roll_core.data.pack import pack
from roll_core.errors import NonFiniteError
from roll_core.spec.module_program import LossOutput, ModuleRow
from roll_core.spec.train import TokenOutputs
from roll_core.types import TrainSequence
from roll_modeling.pending_losses import PendingLosses, moved_ahead, non_finite_rows, non_finite_tokens
from roll_testing.errors import raises_error


def loss(value, **metrics):
    return LossOutput(loss=torch.tensor(value), metrics=metrics)


def error_of(name):
    return lambda value: NonFiniteError(f"{name} is {value}")


def micro_of(*lengths, **fields):
    """A microbatch of sequences `s0`, `s1`, ... whose tokens are trained but the first."""
    return pack(
        [
            TrainSequence(id=f"s{i}", tokens=np.arange(length), loss_mask=np.arange(length) > 0, **fields)
            for i, length in enumerate(lengths)
        ]
    )[0]


def test_metrics_keep_their_values():
    losses = PendingLosses("cpu")
    many = 2**24 + 1  # no float32
    losses.add(
        loss(0.1, tokens=torch.tensor(many), host=3, half=torch.tensor([0.5], dtype=torch.bfloat16)), error_of("a")
    )
    losses.add(loss(0.2, exact=torch.tensor(0.1, dtype=torch.float64), low=torch.tensor(-math.inf)), error_of("b"))
    losses.add(loss(0.3), error_of("c"))
    assert losses.read() == [{"tokens": many, "host": 3.0, "half": 0.5}, {"exact": 0.1, "low": -math.inf}, {}]


def test_a_call_without_batches_has_no_metrics():
    assert PendingLosses("cpu").read() == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_not_finite_is_raised(value):
    losses = PendingLosses("cpu")
    for name, each in (("a", 1.0), ("b", value), ("c", math.nan)):
        losses.add(loss(each), error_of(name))
    with raises_error(NonFiniteError, "b", str(value)):
        losses.read()


def test_an_error_of_a_loss_precedes_what_follows():
    losses = PendingLosses("cpu")
    losses.fail(NonFiniteError("raised"))
    losses.add(loss(math.nan), error_of("later"))
    losses.fail(NonFiniteError("later"))
    with raises_error(NonFiniteError, "raised"):
        losses.read()


def test_a_value_that_the_loss_reads_is_named_before_others():
    micro = micro_of(2, 3)
    logprobs_T = torch.tensor([math.inf, 0.0, 0.0, 0.0, math.nan])  # token 0 of s0 is in no loss mask
    error = non_finite_tokens(math.nan, TokenOutputs(logprobs_T=logprobs_T), micro)
    for part in ("logprobs", "token 2", "sequence s1", "s0"):
        assert part in str(error)


def test_inputs_count_at_tokens_that_the_loss_reads():
    fields = {"advantages": np.array([math.nan, 0.0], np.float32)}
    error = str(non_finite_tokens(math.nan, TokenOutputs(logprobs_T=torch.zeros(4)), micro_of(2, 2, **fields)))
    assert "advantages" not in error
    assert "s0" in error
    assert "s1" in error


def test_rows_without_a_value_that_is_not_finite_are_all_named():
    rows = [ModuleRow(id=f"r{i}", arrays={"x": np.array([1.0, math.nan if i == 1 else 0.0])}) for i in range(3)]
    ((_, batch),) = module_batches(rows, max_rows=3)
    assert [row for row in ("r0", "r1", "r2") if row in str(non_finite_rows(math.nan, batch))] == ["r1"]
    finite = replace(batch, tensors={"x": torch.zeros(3)})
    assert [row for row in ("r0", "r1", "r2") if row in str(non_finite_rows(math.nan, finite))] == ["r0", "r1", "r2"]


def test_batches_on_the_host_do_not_move():
    micros = [micro_of(2), micro_of(3, 1)]
    for given, (micro, moved) in zip(micros, moved_ahead(micros, "cpu"), strict=True):
        assert micro is given
        assert moved.tokens_T.data_ptr() == given.tokens_T.data_ptr()
