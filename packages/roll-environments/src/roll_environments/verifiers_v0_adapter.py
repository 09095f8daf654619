"""`verifiers_v0`: environments of verifiers 0.2 and 0.3, which have a `load_environment`.

row of the dataset ──► Environment.run_rollout ──► OpenAI client ──► Session.base_url
                                └──► rubric: reward and metrics ──► Reward
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import os
import signal
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.spec.agent import Agent
from roll_core.types import Reward
from roll_environments.targets import WrappedError, calls_to, described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from roll_core.spec.agent import Session
    from roll_core.spec.environment import Task

_failed: ContextVar[list[str]] = ContextVar("failed")
"""Failures of reward functions in the current rollout."""


class VerifiersV0(Agent):
    """A rollout on a row of the dataset: row `idx`, or one that the seed determines.

    Runs in a process: verifiers handles signals, which only a main thread may.
    """

    def __init__(self, *, id: str, args: Mapping[str, Any] | None = None, split: str = "train") -> None:
        self.id, self.args, self.split = id, dict(args or {}), split
        self.what = f"verifiers environment {id}"

    @override
    def run(self, task: Task, session: Session) -> Reward:
        with calls_to(self.what, "load"):
            environment = _environment(self.id, json.dumps(self.args, sort_keys=True))
            rows = environment.get_eval_dataset() if self.split == "eval" else environment.get_dataset()
        index = int(task.get("idx", session.seed % len(rows)))
        if not 0 <= index < len(rows):
            raise WrappedError(f"{self.what}: idx is {index}, expected one of the {len(rows)} rows")
        failed: list[str] = []
        token = _failed.set(failed)
        try:
            with calls_to(self.what, "run"):
                output = _loop().run_until_complete(_rollout(environment, dict(rows[index]), session))
        finally:
            _failed.reset(token)
        if error := output.get("error"):
            raise WrappedError(f"{self.what}: {' '.join(error['error_chain_repr'].split())}")
        if failed:
            raise WrappedError(f"{self.what}: reward function {failed[0]}")
        return Reward(
            value=float(output["reward"]),
            detail={name: float(value) for name, value in (output["metrics"] or {}).items()},
        )


async def _rollout(environment: Any, row: dict[str, Any], session: Session) -> Any:
    openai = importlib.import_module("openai")
    client = _client_class()(openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key))
    try:
        return await environment.run_rollout(row, client, session.model, {})
    finally:
        await client.close()


@lru_cache(maxsize=1)
def _client_class() -> Any:
    """verifiers' client of OpenAI's API. A call beyond a limit of the run truncates the rollout, which is scored."""
    openai, clients = importlib.import_module("openai"), importlib.import_module("verifiers.clients")
    errors = importlib.import_module("verifiers.errors")

    class Client(clients.OpenAIChatCompletionsClient):  # type: ignore[name-defined,misc]
        async def get_native_response(self, *arguments: Any, **options: Any) -> Any:
            try:
                return await super().get_native_response(*arguments, **options)
            except openai.BadRequestError as error:
                if error.code in ("max_turns", "max_tokens", "context_length_exceeded"):
                    raise errors.OverlongPromptError from error
                raise

    return Client


def loader(id: str) -> Callable[..., Any]:
    """`load_environment` of the environment's module, also of one in the working directory.

    Raises what importing raises, and `ValueError` if the module has none.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    name = id.replace("-", "_").split("/")[-1]
    load_environment = getattr(importlib.import_module(name), "load_environment", None)
    if not callable(load_environment):
        raise ValueError(f"module {name} has no load_environment")
    return load_environment  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _environment(id: str, args: str) -> Any:
    """An environment, once for each process. Raises `ValueError` for one that cannot score a single rollout."""
    with _unchanged_signals():
        environment = loader(id)(**json.loads(args))
    environment.env_id = environment.env_id or id
    _prepare(environment)
    return environment


def _prepare(environment: Any) -> None:
    """Note failures of the reward functions. Raises `ValueError` if a single rollout has no reward."""
    if environment.requires_group_rollouts:
        raise ValueError("a reward function needs the rollouts of a group, which is not supported")
    if environment.message_type != "chat":
        raise ValueError(f"message_type is {environment.message_type}, expected chat")
    if not environment.score_rollouts:
        raise ValueError("score_rollouts is False: there is no reward")
    _note_failures(environment.rubric)
    for member in getattr(environment, "envs", ()):  # an EnvGroup
        _prepare(member)


def _note_failures(rubric: Any) -> None:
    """Replace the reward functions, whose failures verifiers logs and scores as 0."""
    rubric.funcs = [_noted(function) for function in rubric.funcs]
    for member in getattr(rubric, "rubrics", ()):
        _note_failures(member)


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def scored(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _failed.get().append(f"{function.__name__}: {described(error)}")
            raise

    return scored


@contextmanager
def _unchanged_signals() -> Iterator[None]:
    """Restore the signal handlers that an environment of verifiers replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all rollouts: clients of an environment, as a judge's, belong to one."""
    return asyncio.new_event_loop()
