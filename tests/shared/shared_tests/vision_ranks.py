"""Ranks of which one has no image train as `hf_train` does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from roll_core.data.pack import balance
from roll_core.spec.providers import TrainProvider
from roll_core.spec.rollout import IMAGE
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Step
from roll_testing.bounds import check_near, check_rows
from roll_testing.kit import registry
from roll_testing.losses import LOSSES, SPLITS
from roll_testing.programs import score, train
from shared_tests.tiny_vision import picture, vision_batch, vision_sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from roll_core.types import TrainSequence
    from roll_testing.bench import Case


def batches(folder: Path) -> list[list[TrainSequence]]:
    """Images on one of two ranks, on none, and on both."""
    image = vision_sequence(folder, f"look{IMAGE}", "reply", picture(56, 84), id="image")
    text = vision_sequence(folder, "t" * (len(image) - 6), "reply!", id="text")
    one = [image, text]
    assert {len(share) for share in balance(one, 2)} == {1}
    return [one, [text, replace(text, id="other")], [*vision_batch(folder), text]]


def check_images_on_ranks(ranks: Callable[..., Any], case: Case, folder: Path) -> None:
    """`case` has two ranks. Steps, weights and logprobs must equal those of `hf_train`."""
    steps = [Step(sequences=batch, loss=LOSSES["sft"], split=SPLITS["one by one"]) for batch in batches(folder)]
    provider = registry().find(TrainProvider, "hf_train")
    plain = case.with_(provider=provider, strategy_config={})
    found, expected = ranks(train, case, steps)[0], ranks(train, plain, steps)[0]
    for one, other in zip(found.stats, expected.stats, strict=True):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    moved, plainly = (
        {name: each - trained.before[name] for name, each in trained.after.items()} for trained in (found, expected)
    )
    check_near("weights", moved, plainly, 1e-4)
    rows = batches(folder)[2]
    logprobs = [
        {name: row for rank in answers for name, row in rank.get("logprobs", {}).items()}
        for answers in (
            ranks(score, each, rows, WantedOutputs(logprobs=True), SPLITS["one by one"]) for each in (case, plain)
        )
    ]
    check_rows("logprobs", logprobs[0], logprobs[1], 1e-4)
