"""Simulated engines for tests: outputs whose right tokens are known beforehand."""

import asyncio
import zlib

import numpy as np

from roll_core.spec.pipeline import Prompt, RolloutPlan
from roll_core.testing.simulation import SimulatedEngine, Speed, VirtualTimeLoop
from roll_core.types import GenerateRequest, SamplingParams

PROMPT = np.arange(10)
LONGEST = 400


def length_of(id, index):
    """Of an output, by the prompt that its request is for."""
    return 1 + zlib.crc32(f"{id.rpartition('/')[2]}/{index}".encode()) % LONGEST


def right_tokens(id, index):
    return list(range(len(PROMPT), len(PROMPT) + length_of(id, index)))


class Noted(SimulatedEngine):
    """Notes the ids that it was asked, in order."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.begun = []

    def begin(self, requests, answered):
        self.begun += [each.id for each in requests]
        super().begin(requests, answered)


def engine(name, **speed):
    return Noted(name, Speed(**({"max_rows": 8} | speed)), length_of, prompt_tokens=len(PROMPT))


def request(id, n=1, *, priority=0, **params):
    params = SamplingParams(**({"max_new_tokens": 500} | params))
    return GenerateRequest(id=id, prompt_ids=PROMPT, params=params, n=n, priority=priority)


def prompt(tag, position):
    return Prompt(id=f"{tag}{position}", tokens=PROMPT, text="", tag=tag)


def plan(**given):
    return RolloutPlan(
        **({"counts": {"a": 6}, "params": SamplingParams(max_new_tokens=500), "n": 4, "prompt": prompt} | given)
    )


def in_virtual_time(main):
    """Run a coroutine function on a loop that waits for nothing, without leaving a task behind."""

    async def alone():
        await main()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(alone())
