"""Test group *adapted*: engines that load trained adapters themselves, in their own processes.

Beside the conformance kit, on a model with biases, for engines that support all of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from typing_extensions import override

from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import CorruptTensorError, MissingTensorError, StaleWeightsError, UnexpectedTensorError
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import LoraSpec
from roll_testing.errors import raises_error
from roll_testing.infer.adapters import merged, random_adapter
from roll_testing.infer.interrupting import until_interrupted, was_whole
from roll_testing.infer.kit import RANK
from shared_tests.live_engine import Live, biased, request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.types import Completion

PARTS = ("self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
LAYERS = [f"model.layers.{number}.{part}" for number in range(2) for part in PARTS]
"""Layers of each kind: some that engines do not fuse, and some that they do."""
RANKS = {"down_proj": 8}
"""`rank_pattern`: the other layers have a smaller rank than the engine's buffers."""
PROMPT = [5, 6, 7]
CLOSE = 1e-4
"""Bound on the difference of logprobs of the same weights in fp32."""


class Adapted(Live):
    """Publishes adapters to an engine; the trainer's model has them merged."""

    def __init__(self, strategy: InferStrategy) -> None:
        """Start the engine, whose configuration must enable adapters."""
        lora = LoraSpec(targets=("all-linear",), rank=RANK, alpha=2.0 * RANK, rank_pattern=RANKS)
        self._folder = tempfile.TemporaryDirectory()  # OpenAI's routes need a tokenizer
        make_tokenizer(TokenizerConfig(kind="char", alphabet=string.printable[:90]), (), Path(self._folder.name))
        super().__init__(strategy, dataclasses.replace(biased(), lora=lora, tokenizer=self._folder.name))
        self.base = {name: each.detach().clone() for name, each in self.model.named_parameters()}

    @override
    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    def random_adapter(self, seed: int) -> dict[str, Tensor]:
        """Return a random adapter of `LAYERS`."""
        return random_adapter(self.base, LAYERS, seed, RANKS)

    def take(self, adapter: Mapping[str, Tensor]) -> None:
        """Replace the trainer's model by the base model with this adapter merged."""
        with torch.no_grad():
            for name, each in merged(self.base, adapter).items():
                self.model.get_parameter(name).copy_(each)

    def check(self, adapter: Mapping[str, Tensor], tokens: list[int], logprobs: object) -> None:
        """Fail unless these are the logprobs of the last tokens under the adapter."""
        self.take(adapter)
        given = np.asarray(logprobs)
        np.testing.assert_allclose(given, self.logprobs(tokens, len(tokens) - len(given)), atol=CLOSE)


class AdaptedTests:
    """Tests use the engine of the author's fixture `live`, and leave it with an adapter loaded."""

    def test_requests_continue_under_the_next_adapter(self, live: Adapted) -> None:
        """A running request must continue under the next adapter.

        Each token must have the version and the logprob of the adapter that generated it.
        """
        before, after = live.random_adapter(1), live.random_adapter(2)

        async def update_meanwhile() -> Completion:
            await live.update(list(before.items()))
            running = asyncio.create_task(live.strategy.generate(request("long", PROMPT, max_new_tokens=240)))
            await live.strategy.generate(request("short", [5], max_new_tokens=6))
            await live.update(list(after.items()))
            return await running

        found = until_interrupted(
            lambda: live.run(update_meanwhile()), lambda each: was_whole(each, 240, live.version - 1)
        )
        (output,), old = found.outputs, live.version - 1
        first = int((output.versions == old).sum())
        assert output.versions.tolist() == [old] * first + [old + 1] * (240 - first)
        assert 0 < first < 240
        tokens = [*PROMPT, *output.token_ids.tolist()]
        live.check(before, tokens[: len(PROMPT) + first], output.logprobs[:first])
        live.check(after, tokens, output.logprobs[first:])

    def test_the_endpoint_serves_the_adapter_and_the_base_model(self, live: Adapted) -> None:
        """The endpoint must serve the adapter under the role's name.

        It must serve the base model under that name with `-base`.
        """
        adapter = live.random_adapter(3)
        live.publish(list(adapter.items()))
        for model, weights in (("actor_infer", adapter), ("actor_infer-base", {})):
            body = {"model": model, "prompt": PROMPT, "max_tokens": 5, "temperature": 1.0, "ignore_eos": True}
            ids = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
            (choice,) = live.post("completions", body | ids)["choices"]
            live.check(weights, [*PROMPT, *choice["token_ids"]], choice["logprobs"]["token_logprobs"])

    def test_adapter_of_another_rank_is_refused_without_change(self, live: Adapted) -> None:
        """A publish with half a layer, another rank, a tensor of the base model or an old version must be refused.

        It must not change the loaded adapter.
        """
        adapter = live.random_adapter(4)
        live.publish(list(adapter.items()))
        half = {name: each for name, each in adapter.items() if name != f"{LAYERS[0]}.lora_B.weight"}
        with raises_error(MissingTensorError, f"{LAYERS[0]}.lora_B.weight"):
            live.publish(list(half.items()))
        smaller = {name: each[:-1] if ".lora_A." in name else each[:, 1:] for name, each in adapter.items()}
        with raises_error(CorruptTensorError, f"rank {RANK - 1}", RANK):
            live.publish(list(smaller.items()))
        with raises_error(UnexpectedTensorError, "model.norm.weight"):
            live.publish([("model.norm.weight", live.base["model.norm.weight"])])
        with pytest.raises(StaleWeightsError):
            live.publish(list(adapter.items()), version=0)
        output = live.generate("after", PROMPT).outputs[0]
        live.check(adapter, [*PROMPT, *output.token_ids.tolist()], output.logprobs)
        live.version += 50
        live.publish(list(adapter.items()))
