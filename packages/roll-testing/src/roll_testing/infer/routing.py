"""Test group *routing*: engines that return the experts chosen by a mixture of experts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_testing.infer.engine import ask
from roll_testing.infer.kit import InferKit
from roll_testing.infer.models import CLEAR, SMALL
from roll_testing.models import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from roll_core.spec.model import ModelSpec
    from roll_core.types import Completion, GenerateRequest, RoutedExperts, TokenIds
    from roll_testing.infer.engine import Engine, Setup

EXPERTS, TOP_K = 8, 2
ABORTED = 300
"""Maximum number of tokens of a request that is aborted."""
MIXTURE: Mapping[str, Any] = {
    **SMALL,
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


class RoutingTests(InferKit):
    """Compares with the router's logits as transformers computes them, one whole sequence at a time."""

    def mixture(self, folder: Path) -> ModelSpec:
        """Write a small float32 mixture of experts into `folder` and return its spec. Default: a Qwen3-MoE."""
        return write_checkpoint(folder, MIXTURE, task="causal_lm", vocab_size=self.vocab_size)

    def test_routed_experts_are_those_that_the_model_chooses(
        self, setup: Setup, fresh: Callable[[Setup], Engine], tmp_path: Path
    ) -> None:
        """Returned experts must be those with the largest router logits, in every layer.

        They cover the prompt and all but the last token of the response, in uint8, and are present only if requested.
        An aborted output may have none, or those of its first tokens.
        """
        self.need(self.can.routed_experts, "routed_experts")
        self.need_exact(setup)
        model = replace(self.mixture(tmp_path), dtype=setup.model.dtype, router_replay=True)
        engine = fresh(setup.with_(model=model))
        engine.start()
        requests = [
            replace(
                ask(self.prompt(length), n=2, seed=self.seed(engine, length)),
                routed_experts=length != 5,
                prompt_logprobs=length == 12 and self.can.prompt_logprobs,  # as the logprob probe asks
            )
            for length in (1, 30, 5, 30, 12)
        ]
        module: Any = self.reference_model(model).module
        for request, completion in zip(requests, engine.generate(*requests), strict=True):
            for output in completion.outputs:
                if request.routed_experts:
                    _check(output.routed_experts, np.concatenate([request.prompt_ids, output.token_ids]), module)
                elif output.routed_experts is not None:
                    raise AssertionError(f"{request.id} did not request routed_experts but got them")

        async def abort() -> tuple[GenerateRequest, Completion]:
            request = replace(ask(self.prompt(5), max_new_tokens=ABORTED), routed_experts=True)
            running = asyncio.create_task(engine.strategy.generate(request))
            await engine.strategy.generate(ask(self.prompt(2), max_new_tokens=6))  # by then the other runs
            await engine.strategy.abort([request.id])
            return request, await running

        request, completion = engine.run(abort)
        (output,) = completion.outputs
        if (experts := output.routed_experts) is not None:
            _check(experts, np.concatenate([request.prompt_ids, output.token_ids])[: len(experts) + 1], module)


def _check(experts: RoutedExperts | None, tokens: TokenIds, module: Any) -> None:
    chosen, clear = _choices(tokens, module)
    expected = (len(tokens) - 1, *chosen.shape[1:])
    if experts is None or experts.shape != expected or experts.dtype != np.uint8:
        what = "None" if experts is None else f"{experts.shape} of {experts.dtype}"
        raise AssertionError(f"routed_experts of {len(tokens)} tokens are {what}; expected {expected} of uint8")
    wrong = np.argwhere((np.sort(experts, axis=-1) != chosen[:-1]).any(-1) & clear[:-1])
    if len(wrong):
        position, layer = wrong[0]
        raise AssertionError(
            f"token {position}: experts {sorted(experts[position, layer].tolist())} of layer {layer} were"
            f" returned; router logits are largest at {chosen[position, layer].tolist()}"
        )


def _choices(tokens: TokenIds, module: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the best experts `[L, M, K]`, in ascending order, and a mask `[L, M]`.

    The mask is True where the next best expert is clearly worse.
    """
    with torch.no_grad():
        answer = module(input_ids=torch.from_numpy(tokens)[None], use_cache=False, output_router_logits=True)
    logits_LME = torch.stack([logits.view(len(tokens), -1) for logits in answer.router_logits], dim=1)
    best = logits_LME.sort(dim=-1, descending=True)
    clear = best.values[..., TOP_K - 1] - best.values[..., TOP_K] > CLEAR
    return np.sort(best.indices[..., :TOP_K].numpy(), axis=-1), clear.numpy()
