"""`verifiers`: environments of verifiers 0.4. Their harness calls the policy at the recording endpoint.

task of the taskset ──► Env.run_episode ──► harness ──► interception server of verifiers ──► Session.base_url
                              └──► Episode: one trace, with rewards and metrics ──► Reward
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.agent import Agent
from roll_core.types import Reward
from roll_environments.targets import WrappedError, calls_to

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.agent import Session
    from roll_core.spec.environment import Task


class Verifiers(Agent):
    """An episode on a task of the taskset: row `idx` of the selection, or one that the seed determines."""

    def __init__(self, *, env: Mapping[str, Any], select: Mapping[str, Any] | None = None) -> None:
        self.env, self.select = dict(env), dict(select or {})
        self.what = f"verifiers environment {name_of(env)}"

    @override
    async def run(self, task: Task, session: Session) -> Reward:
        vf = importlib.import_module("verifiers.v1")
        with calls_to(self.what, "load"):
            config = env_config(self.env)
            environment = importlib.import_module("verifiers.v1.utils.loaders").load_environment(config)
            tasks = _tasks(json.dumps(self.env, sort_keys=True), json.dumps(self.select, sort_keys=True))
        index = int(task.get("idx", session.seed % len(tasks)))
        if not 0 <= index < len(tasks):
            raise WrappedError(f"{self.what}: idx is {index}, expected one of the {len(tasks)} tasks")
        secret = f"ROLL_API_KEY_{uuid.uuid4().hex}"  # verifiers reads a variable, and hides such names from programs
        os.environ[secret] = session.api_key
        discarded: list[Any] = []
        try:
            client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=secret)
            context = vf.ModelContext(model=session.model, client=client, sampling=vf.SamplingConfig())
            with calls_to(self.what, "run"):
                async with environment.serving():
                    episode = await environment.run_episode(tasks[index], context, on_discard=discarded.append)
        finally:
            os.environ.pop(secret, None)
        return self._reward(episode, client, discarded)

    def _reward(self, episode: Any, client: Any, discarded: list[Any]) -> Reward:
        """The reward of the episode's only trace whose calls are the policy's. Raises `WrappedError`."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            problem = f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not ok"
            raise WrappedError(f"{self.what}: {' '.join(problem.split())}")
        traces = [trace for trace in episode.traces if trace.agent.config.client == client]
        if len(traces) != 1 or discarded:
            raise WrappedError(
                f"{self.what}: {len(traces) + len(discarded)} agent runs called the policy, expected one: the rollout"
                " has one reward"
            )
        (trace,) = traces
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise WrappedError(f"{self.what}: reward {missing[0]} was not computed")
        if not trace.rewards:
            raise WrappedError(f"{self.what}: the task {trace.task.type} has no rewards")
        parts = {name: reward.value for name, reward in trace.rewards.items()}
        metrics = {name: float(number) for name, number in trace.metrics.items() if number is not None}
        return Reward(value=float(trace.reward), detail=metrics | parts)


def name_of(env: Mapping[str, Any]) -> str:
    """Names of the environment and its taskset, as in the config."""
    names = (env.get("id"), (env.get("taskset") or {}).get("id"))
    return " on ".join(str(name) for name in names if name) or "without a taskset"


def env_config(env: Mapping[str, Any]) -> Any:
    """`env` as the config class of its environment. Imports the taskset's module, also of the working directory.

    Raises what importing and validating raise, and `ValueError` for an environment whose episodes have no single
    rollout of the policy.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    seats_of = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields
    block = env.get("taskset")
    taskset = block.get("id") if isinstance(block, dict) else None
    if not taskset:
        raise ValueError("taskset.id is missing, expected the module of a taskset")
    loaders.taskset_class(taskset)
    config = loaders.resolve_env_config(dict(env))
    seats = [name for name, seat in seats_of(config).items() if seat.client is None]
    if len(seats) != 1:
        raise ValueError(
            f"{len(seats)} agents call the policy{': ' if seats else ''}{', '.join(seats)}; expected one: set client of"
            " the others"
        )
    for name, seat in seats_of(config).items():
        if seat.runtime.type == "prime":
            try:
                importlib.import_module("verifiers.v1.utils.prime").ensure_prime_auth()
            except SystemExit as error:  # it would end the process that runs the episode
                raise ValueError(f"{name}.runtime is prime, the default: {error}. Or set {name}.runtime") from error
    retries = getattr(config, seats[0]).retries
    if retries.max_retries or any(rule.max_retries for rule in retries.rules):
        raise ValueError(
            f"{seats[0]}.retries is set, but every call would be trained on: set custom_envs.<tag>.max_retries"
        )
    return config


def select_config(select: Mapping[str, Any]) -> Any:
    """`select` as verifiers' config."""
    return importlib.import_module("verifiers.v1").SelectConfig.model_validate(dict(select))


@lru_cache(maxsize=8)
def _tasks(env: str, select: str) -> list[Any]:
    """Tasks of a selection, once for each process."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    view = loaders.load_taskset(env_config(json.loads(env)).taskset).select(select_config(json.loads(select)))
    if not view.bounded:
        raise ValueError("the taskset has no end: set select.limit")
    if not (tasks := list(view)):
        raise ValueError("the taskset has no tasks")
    return tasks
