"""The experts in SGLang's answers, without an engine; the conformance kit has one return them."""

from __future__ import annotations

import asyncio
import base64

import numpy as np

from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_sglang.output import SglangOutput
from roll_infer_sglang.sampling import routed_experts
from roll_modeling.routing import RoutingLayout


def test_rows_of_layers_with_experts_are_read_from_a_response():
    layout = RoutingLayout(num_layers=3, layers=(1, 2), top_k=2, num_experts=300)
    every = np.arange(4 * 3 * 2, dtype=np.int32).reshape(4, 3, 2)
    found = routed_experts({"routed_experts": base64.b64encode(every.tobytes()).decode()}, layout)
    assert np.array_equal(found, every[:, 1:])
    assert found.dtype == np.uint16
    assert routed_experts({"finish_reason": None}, layout) is None


def test_tokens_before_an_interruption_keep_their_experts():
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
