"""Outputs of an engine as turns: a turn's prompt begins with the sequence of its parent."""

from __future__ import annotations

import numpy as np
import pytest

from roll_core.data.rollouts import rows
from roll_core.errors import DataError
from roll_core.types import CompletionOutput, Rollout
from roll_pipeline_agentic.recording import record_turn


def output(ids: list[int], *, experts: int | None = None) -> CompletionOutput:
    return CompletionOutput(
        token_ids=np.array(ids, dtype=np.int64),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        finish_reason="stop",
        routed_experts=None if experts is None else np.arange(experts, dtype=np.uint8).reshape(-1, 1, 1),
    )


def test_experts_of_a_row_are_of_the_turn_that_computed_them() -> None:
    first = record_turn(output([7, 8], experts=3), np.array([1, 2]), Rollout(turns=()), None)  # 1 2 7 | 8
    prompt = np.array([1, 2, 7, 8, 3])
    second = record_turn(output([9, 9], experts=6), prompt, Rollout(turns=(first,)), 0)  # 8 3 9 | 9
    (row,) = rows(Rollout(turns=(first, second)))
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    short = record_turn(output([9, 9], experts=4), prompt, Rollout(turns=(first,)), 0)
    third = record_turn(output([5], experts=8), np.array([*prompt, 9, 9]), Rollout(turns=(first, short)), 1)
    (row,) = rows(Rollout(turns=(first, short, third)))
    assert row.routed_experts is not None
    assert row.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3]  # the engine had no experts of later tokens


def test_a_prompt_that_does_not_continue_its_parent_is_an_error() -> None:
    first = record_turn(output([7, 8]), np.array([1, 2]), Rollout(turns=()), None)
    with pytest.raises(DataError):
        record_turn(output([9]), np.array([1, 2, 7, 9, 3]), Rollout(turns=(first,)), 0)
