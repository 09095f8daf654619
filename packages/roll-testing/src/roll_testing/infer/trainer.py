"""Compares an engine's logprobs with those of a train strategy, the other side of every importance ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_core.types import TrainSequence
from roll_testing.bench import Case, built, outputs
from roll_testing.bounds import BOUNDS, check_rows
from roll_testing.kit import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Completion, Floats, GenerateRequest
    from roll_testing.infer.engine import Setup


def trains_in(strategy: str, dtype: str) -> bool:
    """True if the train strategy of this name supports `dtype`."""
    provider: TrainProvider = registry().find(TrainProvider, strategy)
    return dtype in provider.capabilities.dtypes


def check_against_trainer(
    strategy: str, setup: Setup, requests: Sequence[GenerateRequest], completions: Sequence[Completion]
) -> None:
    """Fail unless each sampled token has the logprob that the named train strategy computes on the model of `setup`.

    The train strategy computes all sequences in one packed pass. All requests must have the same temperature.
    """
    (temperature,) = {request.params.temperature for request in requests}
    sequences: list[TrainSequence] = []
    logprobs: dict[str, Floats] = {}
    num_prompt: dict[str, int] = {}
    for request, completion in zip(requests, completions, strict=True):
        for index, output in enumerate(completion.outputs):
            key = f"{request.id}, output {index}"
            tokens = np.concatenate([request.prompt_ids, output.token_ids])
            num_prompt[key] = len(request.prompt_ids)
            sampled = np.arange(len(tokens)) >= num_prompt[key]
            sequences.append(TrainSequence(id=key, tokens=tokens, media=request.media, loss_mask=sampled))
            logprobs[key] = output.logprobs
    case = Case(
        provider=registry().find(TrainProvider, strategy),
        strategy_config={},
        model=setup.model,
        training=None,
        backend=setup.backend,
        devices=(setup.device,),
        timeout_s=setup.timeout_s,
    )
    with built(case, 0) as trainer:
        rows = outputs(trainer, sequences, WantedOutputs(logprobs=True, temperature=temperature))["logprobs"]
    expected = {key: row[num_prompt[key] :] for key, row in rows.items()}
    check_rows(f"the logprob beside {strategy}'s", logprobs, expected, BOUNDS[setup.model.dtype].outputs)
