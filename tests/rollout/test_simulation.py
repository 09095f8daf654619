"""The clock and the engines on which schedulers are tried, against times that can be worked out by hand."""

import asyncio

import numpy as np
import pytest

from roll_core.types import GenerateRequest, SamplingParams
from roll_testing.errors import raises_error
from shared_tests.simulation import SimulatedEngine, Speed, VirtualTimeLoop

SPEED = Speed(base_s=0.02, row_s=0.001, prompt_token_s=0.01, max_rows=4)


def run(main):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def asked(id, n=1):
    return GenerateRequest(id=id, prompt_ids=np.arange(5), params=SamplingParams(max_new_tokens=1000), n=n)


def test_an_hour_passes_at_once_and_in_order():
    async def main():
        seen = []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            seen.append((seconds, asyncio.get_running_loop().time()))

        await asyncio.gather(sleeper(3600), sleeper(1), sleeper(60))
        return seen

    seen = run(main)
    assert [seconds for seconds, _ in seen] == [1, 60, 3600]
    assert all(at == pytest.approx(seconds) for seconds, at in seen)


def test_waiting_for_what_cannot_happen_is_an_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with raises_error(RuntimeError):
        run(main)


def test_times_of_an_engine_are_those_of_its_formula():
    async def main():
        loop, ended = asyncio.get_running_loop(), {}
        lengths = {"a": 100, "b": 50}
        engine = SimulatedEngine("0", SPEED, lambda id, index: lengths[id], prompt_tokens=5)
        engine.submit([asked("a"), asked("b")], lambda id, outcome: ended.__setitem__(id, (loop.time(), outcome)))
        await asyncio.sleep(100)
        return ended

    ended = run(main)
    # Two prompts of 5 tokens first; 50 steps of two rows; 50 steps of one.
    assert ended["b"][0] == pytest.approx(2 * 0.05 + 50 * 0.022)
    assert ended["a"][0] == pytest.approx(2 * 0.05 + 50 * 0.022 + 50 * 0.021)
    assert ended["a"][1].outputs[0].token_ids.tolist() == list(range(5, 105))


def test_rows_queue_for_capacity_and_groups_share_prefill():
    async def main():
        loop, ended = asyncio.get_running_loop(), []
        engine = SimulatedEngine("0", SPEED, lambda id, index: 10, prompt_tokens=5)
        engine.submit([asked("a", n=6)], lambda id, outcome: ended.append((loop.time(), outcome)))
        await asyncio.sleep(100)
        return ended

    ((at, completion),) = run(main)
    assert at == pytest.approx(0.05 + 10 * 0.024 + 10 * 0.022)
    assert len(completion.outputs) == 6


def test_aborted_request_has_the_tokens_of_its_elapsed_time():
    async def main():
        ended = {}
        engine = SimulatedEngine("0", SPEED, lambda id, index: 1000, prompt_tokens=5)
        engine.submit([asked("a"), asked("b")], ended.__setitem__)
        await asyncio.sleep(0.1 + 20.5 * 0.022)
        (told,) = [each for each in await engine.progress() if each.id == "a"]
        await engine.abort(["a", "unknown"])
        engine.cancel(["b"])
        await asyncio.sleep(100)
        return told, ended

    told, ended = run(main)
    assert told.outputs[0].token_ids.tolist() == ended["a"].outputs[0].token_ids.tolist() == list(range(5, 25))
    assert ended["a"].outputs[0].finish_reason == "abort"
    assert "b" not in ended
