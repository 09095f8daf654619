"""Simulated engines for tests: outputs whose right tokens are known beforehand."""

import asyncio
import zlib
from collections import Counter

import numpy as np

from roll_core.spec.pipeline import RolloutPlan
from roll_core.spec.rollout import Prompt
from roll_core.types import GenerateRequest, SamplingParams
from shared_tests.simulation import SimulatedEngine, Speed, VirtualTimeLoop

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

    def submit(self, requests, on_result):
        self.begun += [each.id for each in requests]
        super().submit(requests, on_result)


def engine(name, **speed):
    return Noted(name, Speed(**({"max_rows": 8} | speed)), length_of, prompt_tokens=len(PROMPT))


def request(id, n=1, *, priority=0, **params):
    params = SamplingParams(**({"max_new_tokens": 500} | params))
    return GenerateRequest(id=id, prompt_ids=PROMPT, params=params, n=n, priority=priority)


def ask(queue, requests, on_done, sampled=None, *, replica=None):
    """Submit requests and call `on_done(id, completion or error)` for each; returns them pending."""

    def done(id, future):
        if not future.cancelled():
            on_done(id, future.exception() or future.result())

    pending = [queue.submit(each, (sampled or {}).get(each.id), replica=replica) for each in requests]
    for each in pending:
        each.done.add_done_callback(lambda future, id=each.request.id: done(id, future))
    return pending


def check_requests(queue, *callers):
    """No request is lost or counts twice.

    Each incomplete output of a request that wants tokens is in one place: in the queue, at one replica, or waiting for
    one. What is complete or paused is in none. With `callers`, schedulers and lists of pending requests, each request
    that is not finished has one caller, and each caller's requests are known to the queue.
    """
    slots = list(queue._router.slots.values())
    subs = [item[-1] for item in queue._queue] + [item[-1] for slot in slots for item in slot.waiting]
    subs = [sub for sub in subs if sub.parent.wants_tokens] + [sub for slot in slots for sub in slot.running.values()]
    places = Counter(output for sub in subs for output in sub.outputs)
    for id, pending in queue._requests.items():
        assert pending.request.id == id
        assert pending.state.value in ("queued", "running", "pausing", "paused")
        assert bool(pending.running) == (pending.state.value in ("running", "pausing")), id
        for output in pending.outputs:
            most = 0 if output.complete or pending.state.value == "paused" else 1
            least = most if pending.wants_tokens and pending.replica is None else 0
            assert least <= places[output] <= most, f"output {output.index} of {id} is in {places[output]} places"
    assert queue.num_running == sum(len(sub.outputs) for slot in slots for sub in slot.running.values())
    if callers:
        waited_for = [each for caller in callers for each in _pending_of(caller) if each.state.value != "finished"]
        assert Counter(waited_for) == Counter(queue._requests.values())


def _pending_of(caller):
    if isinstance(caller, list):
        return caller
    rollouts = [slot.rollout for group_queue in caller._queues for slot in group_queue.slots.values()]
    return [each for rollout in rollouts if rollout is not None for each in rollout.pending]


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
