"""What the conformance kit does not ask, because it is vLLM's own: on the real engine, where it is installed."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import psutil
import pytest
from packaging.version import Version
from vllm_live import CACHE, CACHE_BYTES, start, strategy

from roll_core.errors import EngineDiedError, RollError
from roll_core.runtime.workers.infer import completion_problem
from roll_core.spec.model import MeshInfo
from roll_core.spec.weights import digest, make_manifest
from roll_infer_vllm.config import VllmConfig
from roll_modeling.engine_files import engine_files
from roll_testing.errors import raises_error
from roll_testing.infer.interrupting import until_interrupted
from shared_tests.continuing import check_that_it_goes_on
from shared_tests.live_engine import biased, request
from shared_tests.loaded_engine import LoadedEngineTests, check_in_fp16, digests

pytestmark = pytest.mark.engine("vllm")
WAIT_S = 60.0


class TestEngine(LoadedEngineTests):
    """One engine for all of them: starting one takes 20 s of CPU time."""

    cache_bytes = CACHE_BYTES

    @pytest.fixture(scope="class")
    @classmethod
    def live(cls):
        engine = start(biased(), CACHE | {"bucket_mib": 1, "max_num_seqs": 4})
        yield engine
        errors = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = errors.append
        logging.getLogger("vllm").addHandler(handler)
        engine.close()
        logging.getLogger("vllm").removeHandler(handler)
        assert not [each.getMessage() for each in errors]

    def test_the_urgent_are_served_first_where_not_all_can_be(self, live):
        assert live.place_of_the_urgent(12) < 8  # with the second four at the latest

    def test_levels_are_those_of_the_steps(self, live):
        live.strategy.metrics()
        live.generate("counted", [4, 5, 6], max_new_tokens=7)
        found = live.strategy.metrics()
        assert 0.5 < found["running/mean"] <= found["running/max"] == 1  # of the last step vLLM says that nothing runs
        assert 0 < found["kv_cache_usage/mean"] <= found["kv_cache_usage/max"] < 1

    def test_engine_of_one_slot_is_one_process_with_a_watchdog(self, live):
        """vLLM itself would start another one for its worker on a CPU. See `test_watchdog` for how it exits."""
        titles = {each.pid: " ".join(each.cmdline()).strip() for each in psutil.Process().children(recursive=True)}
        (engine,) = [pid for pid, title in titles.items() if title.startswith("VLLM::")]
        assert titles[engine] == "VLLM::EngineCore"
        opened = [file.read_text(encoding="ascii") for file in Path(f"/proc/{engine}/fdinfo").iterdir()]
        assert [each for each in opened if f"\nPid:\t{os.getpid()}\n" in each]  # a pidfd of this process

    def test_vllm_still_counts_in_metrics_that_it_has_handed_out(self, live):
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

    def test_vllm_still_leaves_a_tied_head_as_it_was(self, live, tmp_path):
        """When this fails, `workarounds.pack_tied_heads` is no longer needed. The receipt would tell, besides."""
        live.publish()
        live.step()
        live.model.save_pretrained(tmp_path)
        name = "model.embed_tokens.weight"

        async def reload_as_vllm_does():
            engine = live.strategy._engine
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
            return await engine.collective_rpc(
                "roll_act", args=("digest", [(name, "F32", ""), ("model.norm.weight", "F32", "")])
            )

        (held,) = live.run(reload_as_vllm_does())
        assert held["model.norm.weight"] == digest(live.model.get_parameter("model.norm.weight"))
        assert held[name] != digest(live.model.get_parameter(name))
        manifest, receipt = live.publish()
        assert receipt.digests == digests(manifest)

    def test_request_aborted_before_prefill_has_no_prompt_logprobs(self, live):
        async def aborted():
            engine = live.strategy._engine
            await engine.pause_generation(mode="keep", clear_cache=False)
            asked = dataclasses.replace(request("early", [5, 6, 7], prompt_logprobs=True), prompt_topk=2)
            calling = asyncio.create_task(live.strategy.generate(asked))
            await asyncio.sleep(0.1)  # to reach vLLM
            await live.strategy.abort([asked.id])
            await engine.resume_generation()
            return asked, await calling

        asked, found = live.run(aborted())
        assert completion_problem(found, asked, vocab_size=100) == ""
        assert [(len(each.token_ids), each.finish_reason) for each in found.outputs] == [(0, "abort")]

    # -- the endpoint --------------------------------------------------------------------------------------------------

    def test_the_endpoint_takes_and_gives_ids_and_logprobs(self, live):
        live.step()
        live.publish()
        prompt = [5, 6, 7, 8]
        body = {
            "model": "actor_infer",
            "prompt": prompt,
            "max_tokens": 6,
            "temperature": 0.5,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
        }
        (choice,) = live.post("completions", body)["choices"]
        tokens = choice["token_ids"]
        assert len(tokens) == 6
        assert [f"token_id:{token}" for token in tokens] == choice["logprobs"]["tokens"]
        right = live.logprobs([*prompt, *tokens], len(prompt), temperature=0.5)
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], right, atol=1e-4)

    def test_endpoint_requests_wait_for_wake_and_running_ones_end(self, live):
        live.publish()
        body = {"model": "actor_infer", "prompt": [5, 6], "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}

        async def sleep_and_wake():
            running = await begun(live, body | {"max_tokens": 250})
            await live.strategy.sleep()
            ended = await running
            asking = asyncio.create_task(asyncio.to_thread(live.ask, "completions", body))
            done, _ = await asyncio.wait([asking], timeout=0.5)
            assert not done
            await live.strategy.wake()
            await live.update()
            return ended, await asking

        ended, answer = until_interrupted(lambda: live.run(sleep_and_wake()), lambda each: was_answered(each[0]))
        assert ended["choices"][0]["finish_reason"] == "abort"
        assert 0 < len(ended["choices"][0]["token_ids"]) < 250
        assert len(answer["choices"][0]["token_ids"]) == 4

    def test_endpoint_request_continues_through_a_publish(self, live):
        body = {
            "model": "actor_infer",
            "prompt": [5, 6],
            "max_tokens": 200,
            "return_token_ids": True,
            "ignore_eos": True,
        }

        async def publish_meanwhile():
            asking = await begun(live, body)
            await live.update()
            return None if asking.done() else await asking

        answer = until_interrupted(lambda: live.run(publish_meanwhile()), lambda each: each is None)
        assert answer is not None, "the engine had drawn it all before it could be interrupted"
        (choice,) = answer["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (200, "length")

    def test_a_model_that_is_not_served_is_not_found(self, live):
        with raises_error(urllib.error.HTTPError, "404") as caught:
            live.post("completions", {"model": "gpt", "prompt": [5], "max_tokens": 1})
        caught.value.close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def test_engine_killed_in_a_publish_raises_and_requests_move(self, live):
        live.publish()
        settings = VllmConfig.model_validate(CACHE)
        dying = strategy(settings)
        before = set(psutil.Process().children(recursive=True))

        def its_own():
            return set(psutil.Process().children(recursive=True)) - before

        def weights():
            for at, each in enumerate(live.model.named_parameters()):
                if at == 3:
                    for process in its_own():
                        process.kill()
                yield each

        async def update():
            manifest = make_manifest(1, live.model.named_parameters())
            with raises_error(EngineDiedError):
                await dying.update_weights(1, manifest, weights())

        try:
            live.start(dying)
            check_that_it_goes_on(live, dying, [each.pid for each in its_own()], update)
        finally:
            live.run(dying.stop())


def was_answered(completion):
    return completion["choices"][0]["finish_reason"] == "length"


async def begun(live, body):
    """A request to the endpoint, once the engine draws it."""
    live.strategy.metrics()
    asking = asyncio.create_task(asyncio.to_thread(live.ask, "completions", body))
    while not live.strategy.metrics()["generated_tokens"]:
        await asyncio.sleep(0.001)
    return asking


def test_an_address_that_is_not_the_hosts_is_named():
    with raises_error(RollError, "endpoint_host", "192.0.2.1"):
        start(biased(), {**CACHE, "endpoint_host": "192.0.2.1"})


def test_the_arguments_that_check_knows_are_the_engines_own():
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs

    from roll_infer_vllm.arguments import PASSED_ON, REJECTED
    from roll_infer_vllm.versions import SINCE

    known = set(VllmConfig.model_fields) - set(VllmConfig.own_keys)
    assert known >= set(PASSED_ON) | set(REJECTED) | set(SINCE)
    installed = Version(vllm.__version__).release[:2]
    known -= {name for name, version in SINCE.items() if Version(version).release > installed}
    own = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    assert known == {name for name in own if not name.startswith("_")}


def test_requests_without_a_seed_use_one_of_the_start():
    from roll_infer_vllm.launch import _arguments

    with engine_files(biased(), "vLLM") as files:
        seeds = [
            _arguments(biased(), files, {}, 1, MeshInfo(role="actor_infer", sampling_seed=drawn)).seed
            for drawn in (0, 2**40 + 7)
        ]
    assert seeds == [0, 7]


def test_heads_that_cpu_attention_lacks_are_refused_at_start():
    from roll_core.errors import ModelError

    with raises_error(ModelError, "actor_infer rank 0", "16", "CPU", "32", "64"):
        start(biased(num_attention_heads=4))


def test_vllm_still_raises_low_temperatures():
    """When this fails, `sampling.MIN_TEMPERATURE` is another or no longer needed."""
    from vllm.sampling_params import SamplingParams

    from roll_infer_vllm.sampling import MIN_TEMPERATURE

    assert SamplingParams(temperature=MIN_TEMPERATURE / 2).temperature == MIN_TEMPERATURE


def test_vllm_still_has_no_logprobs_at_the_temperature():
    """When this fails, `workarounds.TemperedSampler` may be no longer needed."""
    from typing import get_args

    from vllm.config.model import LogprobsMode

    assert set(get_args(LogprobsMode)) == {"raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"}


OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from vllm_live import start
from shared_tests.live_engine import biased
if __name__ == "__main__":
    live = start(biased())
    print("ready", flush=True)
    import time
    time.sleep(600)
"""


@pytest.mark.slow  # `test_engine_of_one_slot_is_one_process_with_a_watchdog`, and `test_watchdog`
def test_a_worker_that_is_killed_leaves_no_engine_behind(tmp_path):
    program = tmp_path / "owner.py"
    program.write_text(OWNER, encoding="utf-8")
    command = [sys.executable, str(program), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        said = next(line for line in owner.stdout if line == "ready\n" or owner.poll() is not None)
        children = psutil.Process(owner.pid).children(recursive=True)
        assert said == "ready\n"
        assert any("EngineCore" in " ".join(each.cmdline()) for each in children)
        os.kill(owner.pid, signal.SIGKILL)
        until = time.monotonic() + WAIT_S
        while (left := [each for each in children if alive(each)]) and time.monotonic() < until:
            time.sleep(0.05)
        for each in left:
            each.kill()
        assert not left


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_fp16_weights_are_read_back_and_computed_with():
    engine = start(replace(biased(), dtype="fp16"))
    try:
        check_in_fp16(engine)
    finally:
        engine.close()
