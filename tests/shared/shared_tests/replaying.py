"""Checks of router replay in train strategies, against `hf_train` in one process.

`hf_train`'s own tests use transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import WHOLE, Split, Step
from roll_testing.bounds import check_near, check_rows
from roll_testing.kit import registry
from roll_testing.losses import LOSSES
from roll_testing.models import make_batch
from roll_testing.programs import Trained, score, train

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.types import TrainSequence
    from roll_testing.bench import Case

WANT = WantedOutputs(logprobs=True, entropy=True)
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys that architectures use for their number of experts."""


def with_experts(batch: Sequence[TrainSequence], architecture: Mapping[str, Any], seed: int = 0) -> list[TrainSequence]:
    """Return the batch with randomly sampled expert choices.

    One sequence has none, another has them for no token, and another for its first tokens only.
    """
    experts = next(architecture[key] for key in NUMBERS_OF_EXPERTS if key in architecture)
    layers = architecture["num_hidden_layers"] - architecture.get("first_k_dense_replace", 0)
    top_k = architecture["num_experts_per_tok"]
    rng, found = np.random.default_rng(seed), []
    for at, each in enumerate(batch):
        sampled = np.argsort(rng.random((len(each) - 1, layers, experts)), axis=-1)[..., :top_k]
        known = {2: 3, 4: 0}.get(at, len(sampled))
        found.append(replace(each, routed_experts=sampled[:known].astype(np.uint8) if at != 0 else None))
    return found


def on_hf_train(case: Case) -> Case:
    """Return the same case for `hf_train` in one process on the CPU."""
    hf_train = registry().find(TrainProvider, "hf_train")
    return case.with_(provider=hf_train, strategy_config={}, world_size=1, devices=("cpu",))


def check_replay(
    run: Callable[..., tuple[Any, ...]], case: Case, architecture: Mapping[str, Any], vocab_size: int
) -> None:
    """Fail unless outputs, optimizer steps and routing disagreement equal those of `hf_train`.

    `run(function, case, *arguments)` calls the function on the ranks of a case. `architecture` is the architecture of
    the case's model.
    """
    case = case.with_(model=replace(case.model, router_replay=True))
    batch = with_experts(make_batch(vocab_size), architecture)
    steps = [
        Step(
            sequences=with_experts(make_batch(vocab_size, seed=seed), architecture, seed),
            loss=LOSSES["policy"],
            split=Split(max_sequences=3),
        )
        for seed in (1, 2)
    ]
    (right,) = run(score, on_hf_train(case), batch, WANT, WHOLE)
    (plain,) = run(score, on_hf_train(case), [replace(each, routed_experts=None) for each in batch], WANT, WHOLE)
    moved = max(float(np.abs(row - plain["logprobs"][key]).max()) for key, row in right["logprobs"].items())
    assert moved > 0.01, "the test would pass without replay: the experts hardly change the logprobs"
    answers = run(score, case, batch, WANT, WHOLE)
    for name, rows in right.items():
        found = {key: row for each in answers for key, row in each.get(name, {}).items()}
        check_rows(name, found, rows, 1e-4)
    _check_steps(run(train, case, steps), run(train, on_hf_train(case), steps)[0])


def _check_steps(answers: Sequence[Trained], right: Trained) -> None:
    leaders = [each for each in answers if each.data_rank.leader]
    for at, stats in enumerate(right.stats):
        for name in ("loss", "routing_disagreement"):
            together = sum(each.metrics[at].get(name, 0.0) for each in leaders)
            assert together == pytest.approx(right.metrics[at][name], rel=1e-4), name
        assert 0.1 < right.metrics[at]["routing_disagreement"] < 1
        for each in answers:
            assert each.stats[at].grad_norm == pytest.approx(stats.grad_norm, rel=1e-4)
    went = {name: leaders[0].after[name] - each for name, each in leaders[0].before.items()}
    should = {name: right.after[name] - each for name, each in leaders[0].before.items()}
    check_near("the change of the weights", went, should, 1e-4)
