"""What the conformance kit does not ask, because it is vLLM's own: on the real engine, where it is installed."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import psutil
import pytest
from vllm_live import CACHE, CACHE_BYTES, start

from roll_core.spec.model import MeshInfo
from roll_core.spec.weights import digest
from roll_infer_vllm.config import VllmConfig
from roll_modeling.engine_files import engine_files
from roll_testing.errors import raises_error
from roll_testing.infer.holding import HoldingTests, digests
from roll_testing.infer.live import biased, request

pytestmark = pytest.mark.engine("vllm")


@pytest.fixture(scope="module")
def live():
    engine = start(biased(), CACHE | {"bucket_mib": 1, "max_num_seqs": 4})
    yield engine
    engine.close()


class TestHolding(HoldingTests):
    cache_bytes = CACHE_BYTES


def test_the_arguments_that_check_knows_are_the_engines_own():
    from vllm.engine.arg_utils import AsyncEngineArgs

    from roll_infer_vllm.arguments import PASSED_ON, REJECTED

    known = set(VllmConfig.model_fields) - set(VllmConfig.own_keys)
    assert known >= set(PASSED_ON) | set(REJECTED)
    own = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    assert known == {name for name in own if not name.startswith("_")}


def test_requests_without_a_seed_draw_from_one_that_is_the_starts_own():
    from roll_infer_vllm.launch import _arguments

    with engine_files(biased(), "vLLM") as files:
        seeds = [
            _arguments(biased(), files, {}, 1, MeshInfo(role="actor_infer", sampling_seed=drawn)).seed
            for drawn in (0, 2**40 + 7)
        ]
    assert seeds == [0, 7]


def test_heads_that_the_cpus_attention_does_not_take_are_refused_at_the_start():
    from roll_core.errors import ModelError

    with raises_error(ModelError, "actor_infer rank 0", "16", "CPU", "32", "64"):
        start(biased(num_attention_heads=4))


def test_the_urgent_are_served_first_where_not_all_can_be(live):
    assert live.place_of_the_urgent(12) < 8  # with the second four at the latest


def test_levels_are_those_of_the_steps(live):
    live.strategy.metrics()
    live.generate("counted", [4, 5, 6], max_new_tokens=7)
    found = live.strategy.metrics()
    assert 0.5 < found["running/mean"] <= found["running/max"] == 1  # of the last step vLLM says that nothing runs
    assert 0 < found["kv_cache_usage/mean"] <= found["kv_cache_usage/max"] < 1


def test_an_engine_of_one_slot_is_one_process(live):
    """vLLM itself would start another one for its worker on a CPU."""
    titles = [" ".join(each.cmdline()).strip() for each in psutil.Process().children(recursive=True)]
    assert [title for title in titles if title.startswith("VLLM::")] == ["VLLM::EngineCore"]


def test_vllm_still_counts_in_metrics_that_it_has_handed_out(live):
    """When this fails `VllmOutput.weights_changed` no longer knows how much was drawn."""
    from vllm.inputs import tokens_input

    from roll_infer_vllm.sampling import PROGRESS_TOKENS, sampling_params

    num = 3 * PROGRESS_TOKENS + 9
    params = sampling_params(request("counted", [4, 5, 6], max_new_tokens=num), 0, ())

    async def outputs():
        return [each async for each in live.strategy._engine.generate(tokens_input([4, 5, 6]), params, "counted")]

    found = live.run(outputs())
    ends = list(accumulate(len(each.outputs[0].token_ids) for each in found))
    assert len(ends) > 1
    # vLLM joins outputs that nobody has taken yet, as on a busy host.
    assert {*ends} <= {*range(1, num, PROGRESS_TOKENS), num}
    assert ends[-1] == num
    assert [each.metrics.num_generation_tokens for each in found] == [num] * len(found)


def test_vllm_still_has_no_logprobs_at_the_temperature():
    """When this fails, `workarounds.TemperedSampler` may be no longer needed."""
    from typing import get_args

    from vllm.config.model import LogprobsMode

    assert set(get_args(LogprobsMode)) == {"raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"}


def test_vllm_still_leaves_a_tied_head_as_it_was(live, tmp_path):
    """When this fails, `workarounds.pack_tied_heads` is no longer needed. The receipt would tell, besides."""
    live.publish()
    live.step()
    live.model.save_pretrained(tmp_path)
    name = "model.embed_tokens.weight"

    async def reload_as_vllm_does():
        engine = live.strategy._engine
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
        return await engine.collective_rpc("roll_act", args=("digest", [name, "model.norm.weight"]))

    (held,) = live.run(reload_as_vllm_does())
    assert held["model.norm.weight"] == digest(live.model.get_parameter("model.norm.weight"))
    assert held[name] != digest(live.model.get_parameter(name))
    manifest, receipt = live.publish()
    assert receipt.digests == digests(manifest)
