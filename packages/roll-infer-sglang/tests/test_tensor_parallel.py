"""An engine that is spread over two processes: it draws what one process draws, each process takes its part of
published weights, and together they show the whole."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from sglang_on_a_cpu import ON_A_CPU

from roll_infer_sglang.config import SglangConfig
from shared_tests.live_engine import Live, biased
from shared_tests.loaded_engine import CLOSE, LONG, PROMPT, digests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.engine("sglang"),
]


GREEDY, SEEDED, FREE = {"temperature": 0.0}, {"seed": 3}, {}
"""`FREE` samples from the engine's own random stream, of which each process has one."""


def drawn(num_slots, spec):
    """Answers under new weights, each beside what the trainer's model says of it; those that one process gives, too."""
    from roll_infer_sglang.strategy import SglangStrategy

    live = Live(SglangStrategy(SglangConfig.model_validate({**ON_A_CPU, "bucket_mib": 1})), spec, num_slots=num_slots)
    found = []
    try:
        for _ in range(2):
            live.step()
            manifest, receipt = live.publish()
            assert dict(receipt.digests) == digests(manifest)
            for at, (prompt, how) in enumerate(product((PROMPT, list(LONG)), (GREEDY, SEEDED, FREE))):
                output = live.generate(f"{live.version}-{at}", prompt, max_new_tokens=16, **how).outputs[0]
                right = live.logprobs([*prompt, *output.token_ids], len(prompt))
                np.testing.assert_allclose(output.logprobs, right, atol=CLOSE)
                found += [output] if how else []
    finally:
        live.close()
    return found


SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 101}


@pytest.mark.parametrize(
    "spec",
    [biased(**SIZES), biased(**SIZES, model_type="phi3", pad_token_id=0)],
    ids=["qwen2", "phi3, fused in transformers"],
)
def test_tensor_parallel_ranks_equal_one_and_hold_the_weights(spec):
    """Two query heads and a key head each; tied embeddings of an odd vocabulary, and biases."""
    alone, together = (drawn(num_slots, spec) for num_slots in (1, 2))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=CLOSE)
