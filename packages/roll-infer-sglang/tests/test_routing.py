"""The experts in SGLang's answers, without an engine; the conformance kit has one return them."""

from __future__ import annotations

import asyncio
import base64
from types import SimpleNamespace

import numpy as np
import pytest

from roll_core.errors import UnsupportedError
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_sglang.output import SglangOutput
from roll_infer_sglang.routing import Routing
from roll_testing.errors import raises_error

DEEPSEEK = {"n_routed_experts": 300, "first_k_dense_replace": 1}
QWEN = {"num_experts": 8, "mlp_only_layers": [0], "decoder_sparse_step": 2}


def config(**given):
    return SimpleNamespace(**{"model_type": "mixture", "num_hidden_layers": 4, "num_experts_per_tok": 2} | given)


@pytest.mark.parametrize(
    ("keys", "layers", "dtype"),
    [
        (DEEPSEEK, (1, 2, 3), np.uint16),
        (QWEN, (1, 3), np.uint8),
        ({"num_local_experts": 8}, (0, 1, 2, 3), np.uint8),
    ],
)
def test_layers_without_experts_are_left_out(keys, layers, dtype):
    every = np.arange(3 * 4 * 2, dtype=np.int32).reshape(3, 4, 2)
    found = Routing.of(config(**keys)).read({"routed_experts": base64.b64encode(every.tobytes()).decode()})
    assert np.array_equal(found, every[:, list(layers)])
    assert found.dtype == dtype


def test_an_answer_that_does_not_tell_and_a_model_without_experts():
    assert Routing.of(config(num_experts=8)).read({"finish_reason": None}) is None
    with raises_error(UnsupportedError, "dense"):
        Routing.of(config(model_type="dense"))


def test_tokens_that_were_computed_before_an_interruption_keep_their_experts():
    async def act():
        request = GenerateRequest(id="r", prompt_ids=np.arange(3), params=SamplingParams(), routed_experts=True)
        output = SglangOutput(request=request, index=0, response=asyncio.get_running_loop().create_future())
        output.add_experts(None)  # interrupted before anything was told
        for mark, num in ((1, 4), (2, 6)):
            output.add_experts(np.full((num, 1, 1), mark, np.uint8))
        output.tokens, output.logprobs, output.versions = [1, 2, 3, 4], [0.0] * 4, [0] * 4
        return output.completion((4, "length", None)), output.completion((2, "stop", 2))

    whole, cut = asyncio.run(act())
    assert whole.routed_experts.ravel().tolist() == [1, 1, 1, 1, 2, 2]
    assert cut.routed_experts.ravel().tolist() == [1, 1, 1, 1]
