"""A plugin's reward: `timeout_s` holds whatever its `score` does, because its process is killed."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import date, datetime, timedelta
from datetime import time as dtime
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from roll_core.errors import PluginLoadError, UnsupportedError
from roll_core.runtime.cluster.executors.base import Peers, Place
from roll_core.runtime.workers.reward import RewardWorker
from roll_core.spec.config import RewardConfig
from roll_core.spec.providers import RewardProvider
from roll_rewards.plugin import roll_rewards
from roll_testing.errors import mentions, raises_error

OWNER = "reward 'acme' of roll-acme 1.2"
REWARD = """
    import os, pathlib, re, time
    from roll_core.errors import RewardFailure
    from roll_core.spec.rollout import RewardFunction
    from roll_core.types import Reward

    class Acme(RewardFunction):
        def start(self):
            self.started = os.getpid()

        def score(self, request):
            if request.response == "hang":
                time.sleep(600)
            if request.response == "c code":
                re.match(r"(a+)+$", "a" * 60 + "b")
            if request.response == "raise":
                raise KeyError("oops")
            if request.response == "fail":
                raise RewardFailure("the sandbox died")
            if request.response == "number":
                return 1.0
            if request.response == "component":
                return Reward(value=1.0, detail={"part": float("nan")})
            value = len(request.response) + int(request.sample.response_ids.sum()) + request.metadata["extra"]
            return Reward(value=value, detail={"pid": float(os.getpid()), "started": self.started, "tag": "x"})

        def close(self):
            pathlib.Path("closed").touch()

    class Broken(Acme):
        def start(self):
            raise OSError("no such service")

    class NoReward:
        pass
"""


@pytest.fixture
def worker_of(user_module):
    workers = []
    module = user_module(REWARD)

    def make(name="Acme", **config):
        made = RewardWorker(
            place=Place(rank=0, world_size=1),
            peers=Peers(),
            role="rewards.acme",
            provider=RewardProvider(
                name="acme", target=f"{module}:{name}", summary="", config="roll_core.spec.config:RewardConfig"
            ),
            owner=OWNER,
            config=RewardConfig(reward="acme", **({"processes": 2, "timeout_s": 60.0} | config)).model_dump(),
        )
        workers.append(made)
        return made

    yield make
    for each in workers:
        asyncio.run(each.close())


def scored(worker, requests):
    async def main():
        await worker.start()
        return await worker.score(requests)

    return asyncio.run(main())


def test_score_runs_in_a_separate_process(worker_of, asking):
    (reward,) = scored(worker_of(weight=2.0), [asking("four", extra=np.int64(3))])
    assert reward.value == 2.0 * (4 + 2 + 3)
    assert reward.detail["pid"] == reward.detail["started"] != float(__import__("os").getpid())
    assert reward.detail["tag"] == "x"


@pytest.mark.parametrize("hangs", ["hang", "c code"])
def test_hanging_score_fails_at_its_deadline_without_the_others(worker_of, asking, hangs):
    worker = worker_of(timeout_s=3.0)
    began = time.monotonic()
    right, hung, later = scored(worker, [asking(each, extra=0) for each in ("a", hangs, "bb")])
    assert (right.value, later.value) == (3.0, 4.0)
    assert hung.value is None
    assert mentions(hung.failure, "3 s")
    assert time.monotonic() - began < 120  # not the 600 s of the sleep
    assert [each.value for each in asyncio.run(worker.score([asking("ccc", extra=0)]))] == [5.0]


def test_exception_failure_names_reward_package_and_line(worker_of, asking, caplog):
    caplog.set_level(logging.INFO, "roll_core")
    responses = ("raise", "fail", "number", "component")
    raised, failed, number, component = scored(worker_of(), [asking(each, extra=0) for each in responses])
    assert raised.failure.startswith(f"{OWNER}: KeyError: 'oops' (user_rewards_")
    assert failed.failure == "the sandbox died"
    assert mentions(number.failure, OWNER, "TypeError")
    assert mentions(component.failure, "part", "nan")
    assert mentions(caplog.text, "Traceback")


@pytest.mark.parametrize(("name", "facts"), [("Broken", ("service",)), ("NoReward", ("subclass",))])
def test_a_reward_that_cannot_be_loaded_is_an_error_at_the_start(worker_of, name, facts):
    with raises_error(PluginLoadError, OWNER, *facts):
        asyncio.run(worker_of(name).start())


def test_closing_closes_the_reward_in_its_process(worker_of, asking, tmp_path):
    worker = worker_of()
    scored(worker, [asking("a", extra=0)])
    assert not (tmp_path / "closed").exists()
    asyncio.run(worker.close())
    assert (tmp_path / "closed").exists()


def test_columns_may_have_whatever_a_table_has(worker_of, asking):
    # The types that pyarrow returns for timestamp, date32, time64, duration, decimal128 and dictionary columns.
    columns = {
        "made": datetime(2026, 1, 2, 3, 4, tzinfo=ZoneInfo("Europe/Berlin")),
        "day": date(2026, 1, 2),
        "at": dtime(3, 4),
        "took": timedelta(seconds=1),
        "price": Decimal("12.50"),
        "more": {"tags": ("a", None), "mask": np.array([True])},
    }
    (reward,) = scored(worker_of(), [asking("four", extra=3, **columns)])
    assert (reward.failure, reward.value) == ("", 4 + 2 + 3)


def test_a_column_that_cannot_be_sent_is_a_failure_of_its_sample(worker_of, asking):
    wrong, right = scored(worker_of(), [asking("a", extra=object()), asking("a", extra=0)])
    assert UnsupportedError.__name__ in wrong.failure
    assert right.value == 3.0


def test_rewards_with_own_processes_enforce_their_timeout():
    assert {each.name for each in roll_rewards() if each.enforces_timeout} == {"code", "function", "math_rule"}
