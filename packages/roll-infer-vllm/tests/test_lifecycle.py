"""The endpoint and the engine's end: on the real engine, where it is installed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import numpy as np
import psutil
import pytest
from vllm_live import CACHE, start, strategy

from roll_core.errors import EngineDiedError, RollError
from roll_core.spec.weights import make_manifest
from roll_infer_vllm.config import VllmConfig
from roll_testing.errors import raises_error
from roll_testing.infer.interrupting import until_interrupted
from roll_testing.infer.live import biased
from shared_tests.continuing import check_that_it_goes_on

pytestmark = pytest.mark.engine("vllm")
WAIT_S = 60.0


@pytest.fixture(scope="module")
def live():
    engine = start(biased())
    yield engine
    engine.close()


# -- the endpoint ------------------------------------------------------------------------------------------------------


def test_the_endpoint_takes_and_gives_ids_and_logprobs(live):
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


def test_requests_to_the_endpoint_wait_while_the_engine_sleeps_and_what_runs_ends_there(live):
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


def was_answered(completion):
    return completion["choices"][0]["finish_reason"] == "length"


async def begun(live, body):
    """A request to the endpoint, once the engine draws it."""
    live.strategy.metrics()
    asking = asyncio.create_task(asyncio.to_thread(live.ask, "completions", body))
    while not live.strategy.metrics()["generated_tokens"]:
        await asyncio.sleep(0.001)
    return asking


def test_a_request_to_the_endpoint_goes_on_through_a_publish(live):
    body = {"model": "actor_infer", "prompt": [5, 6], "max_tokens": 200, "return_token_ids": True, "ignore_eos": True}

    async def publish_meanwhile():
        asking = await begun(live, body)
        await live.update()
        return None if asking.done() else await asking

    answer = until_interrupted(lambda: live.run(publish_meanwhile()), lambda each: each is None)
    assert answer is not None, "the engine had drawn it all before it could be interrupted"
    (choice,) = answer["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (200, "length")


def test_a_model_that_is_not_served_is_not_found(live):
    with raises_error(urllib.error.HTTPError, "404") as caught:
        live.post("completions", {"model": "gpt", "prompt": [5], "max_tokens": 1})
    caught.value.close()


def test_an_address_that_is_not_the_hosts_is_named():
    with raises_error(RollError, "endpoint_host", "192.0.2.1"):
        start(biased(), {**CACHE, "endpoint_host": "192.0.2.1"})


# -- the end -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_while_weights_are_replaced_says_so_and_its_requests_go_on_elsewhere(live):
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


OWNER = """
import sys
sys.path.insert(0, sys.argv[1])
from vllm_live import start
from roll_testing.infer.live import biased
if __name__ == "__main__":
    live = start(biased())
    print("ready", flush=True)
    import time
    time.sleep(600)
"""


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
