"""Simulated agents against times that can be worked out by hand, and under the real queue and scheduler."""

import asyncio

import numpy as np
import pytest

from roll_core.types import GenerateRequest, SamplingParams
from shared_tests.simulated_agents import Environments, SimulatedAgents, Trajectory
from shared_tests.simulation import Speed, VirtualTimeLoop

SPEED = Speed(base_s=0.02, row_s=0.001, prompt_token_s=0.01, max_rows=4)
ALONE_S = 0.021
"""Of a token, by itself."""


def trajectory(drawn, observed, away_s):
    return Trajectory(generated_K=np.array(drawn), observed_K=np.array(observed), environment_s_K=np.array(away_s))


def run(main):
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


def asked(id, n=1):
    return GenerateRequest(id=id, prompt_ids=np.arange(5), params=SamplingParams(max_new_tokens=1000), n=n)


def engine_of(trajectories, speed=SPEED, environments=None):
    return SimulatedAgents(
        "0", speed, lambda id, index: trajectories[id], environments or Environments(), prompt_tokens=5
    )


def times(trajectories, speed=SPEED):
    """When each ends, all begun at 0."""

    async def main():
        loop, ended = asyncio.get_running_loop(), {}
        engine = engine_of(trajectories, speed)
        engine.submit([asked(id) for id in trajectories], lambda id, outcome: ended.__setitem__(id, loop.time()))
        await asyncio.sleep(1000)
        return ended

    return run(main)


def test_single_trajectory_takes_its_expected_time():
    ended = times({"a": trajectory([10, 20, 5], [0, 3, 4], [7.0, 2.0, 99.0])})
    assert ended["a"] == pytest.approx(0.05 + 7.0 + 0.03 + 2.0 + 0.04 + 35 * ALONE_S)


def test_an_output_has_the_tokens_of_all_turns():
    async def main():
        ended = {}
        engine_of({"a": trajectory([10, 20], [0, 3], [7.0, 0.0])}).submit([asked("a")], ended.__setitem__)
        await asyncio.sleep(100)
        return ended["a"].outputs[0]

    assert run(main).token_ids.tolist() == list(range(5, 35))


def test_working_environment_slows_no_other_trajectory():
    ended = times({"a": trajectory([10, 10], [0, 0], [100.0, 0.0]), "b": trajectory([50], [0], [0.0])})
    assert ended["b"] == pytest.approx(2 * 0.05 + 10 * 0.022 + 40 * ALONE_S)
    assert ended["a"] == pytest.approx(2 * 0.05 + 10 * 0.022 + 100 + 10 * ALONE_S)


def test_working_environment_frees_its_row():
    one_row = Speed(base_s=0.02, row_s=0.001, prompt_token_s=0.01, max_rows=1)
    ended = times({"a": trajectory([10, 10], [0, 0], [0.5, 0.0]), "b": trajectory([100], [0], [0.0])}, one_row)
    # b begins when a has drawn its first turn, and a has to wait for it though its environment answers sooner.
    assert ended["b"] == pytest.approx(2 * 0.05 + 110 * ALONE_S)
    assert ended["a"] == pytest.approx(2 * 0.05 + 120 * ALONE_S)


@pytest.mark.parametrize(("cut_at", "drawn", "ends_at"), [
    # In the first turn: it goes on in it, and what was drawn is computed again.
    (0.05 + 4.5 * ALONE_S, 4, 50 + 0.09 + 6 * ALONE_S + 7 + 0.03 + 20 * ALONE_S),
    # While the environment works, which has answered by the time it goes on: all of it is computed again.
    (1.0, 10, 50 + (5 + 10 + 3) * 0.01 + 20 * ALONE_S),
])  # fmt: skip
def test_interrupted_trajectory_resumes_in_its_turn(cut_at, drawn, ends_at):
    async def main():
        loop, ended = asyncio.get_running_loop(), []
        engine = engine_of({"a": trajectory([10, 20], [0, 3], [7.0, 0.0])})
        engine.submit([asked("a")], lambda id, outcome: ended.append((loop.time(), outcome.outputs[0])))
        await asyncio.sleep(cut_at)
        await engine.abort(["a"])
        await asyncio.sleep(50 - loop.time())
        prompt_ids = np.arange(5 + len(ended[0][1].token_ids))
        rest = GenerateRequest(id="a#0.0", prompt_ids=prompt_ids, params=SamplingParams(max_new_tokens=1000), n=1)
        engine.submit([rest], lambda id, outcome: ended.append((loop.time(), outcome.outputs[0])))
        await asyncio.sleep(100)
        return ended

    (_, first), (at, rest) = run(main)
    assert first.finish_reason == "abort"
    assert len(first.token_ids) == drawn
    assert at == pytest.approx(ends_at)
    assert [*first.token_ids, *rest.token_ids] == list(range(5, 35))


def test_environment_advances_while_its_trajectory_is_paused():
    async def main():
        loop, ended = asyncio.get_running_loop(), []
        environments, trajectories = Environments(), {"a": trajectory([10, 20], [0, 3], [7.0, 0.0])}
        engine, other = (engine_of(trajectories, environments=environments) for _ in range(2))
        engine.submit([asked("a")], lambda id, outcome: None)
        await asyncio.sleep(1.0)
        await engine.abort(["a"])
        rest = GenerateRequest(id="a#0.0", prompt_ids=np.arange(15), params=SamplingParams(max_new_tokens=1000), n=1)
        other.submit([rest], lambda id, outcome: ended.append(loop.time()))
        await asyncio.sleep(100)
        return ended

    # Not before 7 s after the first turn, however soon it is asked again.
    assert run(main) == pytest.approx([0.05 + 10 * ALONE_S + 7 + (5 + 10 + 3) * 0.01 + 20 * ALONE_S])
