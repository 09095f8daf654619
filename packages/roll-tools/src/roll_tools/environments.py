"""Lists the environments of installed packages, plays an episode of one in the terminal, and tests one."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.config.explain import code_of, findings
from roll_core.data.media import received_message, with_parts
from roll_core.errors import ConfigError, ConfigProblem, EnvironmentFailure
from roll_core.plugins.registry import is_user_function
from roll_core.plugins.targets import load_class, options_schema, schema_of
from roll_core.runtime.cluster.concurrency import in_daemon_thread
from roll_core.spec.config import Config
from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.spec.providers import EnvironmentProvider
from roll_core.spec.rollout import IMAGE
from roll_core.types import Reward
from roll_tools.engine_player import EngineError
from roll_tools.settings import parse_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.plugins.registry import Registry
    from roll_core.spec.environment import Message, Task
    from roll_core.types import Media
    from roll_tools.engine_player import EnginePlayer


def list_environments(registry: Registry) -> int:
    """List every environment with its package and the keys of `env_config`."""
    for plugin in registry.plugins:
        for record in plugin.providers:
            if isinstance(record, EnvironmentProvider):
                sys.stdout.write(f"{record.name:<20} {plugin}\n    {record.summary}\n")
                for key, field in schema_of(record, Config, owner=registry.owner(record)).model_fields.items():
                    value = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
                    sys.stdout.write(f"    {field.alias or key}: {value}\n")
    return 0


def play_environment(
    name: str,
    settings: Sequence[str],
    registry: Registry,
    *,
    task: Task,
    seed: int,
    engine: EnginePlayer | None = None,
    max_turns: int | None = None,
) -> int:
    """Play one episode with replies from `engine`, otherwise from stdin.

    `settings` are `KEY=VALUE` of `env_config`, values in YAML; `task` is a row of data. `max_turns` ends the episode.
    """
    provider, options = _configured(name, settings, registry)
    owner = registry.owner(provider)
    cls = load_class(provider.target, Environment, owner=owner)  # type: ignore[type-abstract]
    return asyncio.run(_play(cls(**options), owner, task, seed, engine, max_turns))


def test_environment(
    name: str, settings: Sequence[str], registry: Registry, *, task: Task, expression: str, run: Callable[..., int]
) -> int:
    """Run the conformance tests and the integrity kit on an environment. Returns 1 if a test fails, otherwise 0.

    `run` is `roll_testing.integrity.test_environment`.
    """
    provider, options = _configured(name, settings, registry)
    return run(registry.owner(provider), provider.target, options, task, expression)


def _configured(name: str, settings: Sequence[str], registry: Registry) -> tuple[EnvironmentProvider, dict[str, Any]]:
    """An environment and its options, `KEY=VALUE` of `env_config`. Raises `ConfigError`."""
    provider = registry.find(EnvironmentProvider, name)
    owner = registry.owner(provider)
    schema = options_schema(provider) if is_user_function(provider) else schema_of(provider, Config, owner=owner)
    values = parse_settings(settings)
    try:
        options = schema(**values)
    except ValidationError as error:
        keys = ", ".join(field.alias or key for key, field in schema.model_fields.items())
        problems = [
            ConfigProblem(
                "command line",
                ".".join(finding.path),
                finding.message,
                f"keys of {name}: {keys}" if finding.kind == "extra_forbidden" else finding.hint,
                code=code_of(finding),
            )
            for finding in findings(error.errors(), values)
        ]
        raise ConfigError(problems) from error
    return provider, options.model_dump(mode="json")


async def _play(
    environment: Environment, owner: str, task: Task, seed: int, engine: EnginePlayer | None, max_turns: int | None
) -> int:
    totals: Counter[str] = Counter()
    stage = "reset"
    try:
        opening: Opening = await _result(environment.reset(task, seed), Opening)
        for tool in opening.tools:
            sys.stdout.write(f"[tool] {json.dumps(tool['function'])}\n")
        if opening.tools and engine is None:
            sys.stdout.write('To call a tool: /call NAME {"argument": …}\n')
        player = opening.player or next(iter(opening.players), "")
        _show(opening.messages, player, engine)
        for number in itertools.count(1):
            reply = await (_typed(environment) if engine is None else engine.reply(opening.tools, player))
            if reply is None:
                sys.stdout.write("\n")
                return 0
            if engine is not None:
                _show_reply(reply)
            stage = "step"
            turn: Turn = await _result(environment.step(reply), Turn)
            totals.update({player: turn.reward or 0.0})
            totals.update(turn.rewards)
            rewards = f"reward {turn.reward}" + "".join(f", {name} {reward}" for name, reward in turn.rewards.items())
            sys.stdout.write(f"[turn] {rewards}, state {turn.state}, metrics {dict(turn.metrics)}\n")
            if turn.done or turn.truncated or number == max_turns:
                break
            player = turn.player or player
            _show(turn.messages, player, engine)
        stage = "score"
        score: Reward | None = await _result(environment.score(), Reward, type(None))
        if score is not None:
            totals.update(dict.fromkeys(totals, score.value or 0.0))
            sys.stdout.write(f"[score] {score.value} {dict(score.detail)}\n")
        shown_totals = ", ".join(f"{name}{' ' if name else ''}{total:g}" for name, total in totals.items())
        sys.stdout.write(f"[end] {'done' if turn.done else 'truncated'}, total reward {shown_totals}\n")
        return 0
    except EngineError:
        raise
    except Exception as error:  # user code
        raise EnvironmentFailure(f"{owner}: {stage}: {type(error).__name__}: {error}") from error
    finally:
        await _result(environment.close(), type(None))


async def _typed(environment: Environment) -> Reply | None:
    """The next reply from stdin; None at its end. A daemon thread reads: Ctrl-C needs no further line."""
    oracle = getattr(environment, "oracle", None)
    while True:
        sys.stdout.write("reply (/hint for the oracle's)> " if oracle else "reply> ")
        sys.stdout.flush()
        line = await in_daemon_thread(sys.stdin.readline, name="stdin")
        if oracle is None or line.strip() != "/hint":
            return _reply(line.rstrip("\n")) if line else None
        sys.stdout.write("".join(f"[hint] {hint}\n" for hint in oracle()))


def _reply(line: str) -> Reply:
    """The reply of a line: its text, or the call `/call NAME ARGUMENTS`."""
    if not line.startswith("/call "):
        return Reply(text=line)
    name, _, arguments = line.removeprefix("/call ").strip().partition(" ")
    function = {"name": name, "arguments": arguments or "{}"}
    return Reply(text="", tool_calls=[{"id": "call00000", "type": "function", "function": function}])


def _show_reply(reply: Reply) -> None:
    if reply.reasoning:
        sys.stdout.write(f"[reasoning] {reply.reasoning}\n")
    if reply.text:
        sys.stdout.write(f"[reply] {reply.text}\n")
    for call in reply.tool_calls:
        sys.stdout.write(f"[call] {json.dumps(call.get('function'))}\n")


async def _result(value: Any, *types: type) -> Any:
    """The result of a method, coroutine function or not. Raises `TypeError` unless it is of one of `types`."""
    result = await value if inspect.isawaitable(value) else value
    if not isinstance(result, types):
        raise TypeError(f"returned {type(result).__name__}, expected {types[0].__name__}")
    return result


def _show(messages: Sequence[Message], player: str, engine: EnginePlayer | None) -> None:
    """Show messages, and add them to the conversation of an engine. Raises `TypeError` for what is no message."""
    if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages):
        raise TypeError(f"messages are {messages!r:.200}, expected dicts with role and content")
    received = [received_message(message) for message in messages]
    for message in received:
        content = message["content"].replace(IMAGE, "[image]") if message.get("media") else message["content"]
        sys.stdout.write(f"[{message['role']}{' to ' if player else ''}{player}] {content}\n")
        for media in message.get("media", ()):
            sys.stdout.write(f"[image] {media.width} x {media.height} pixels: {_saved(media)}\n")
    if engine is not None:
        engine.add(with_parts(received, data=True), player)


@cache
def _images() -> Path:
    """Directory of shown images, which the user opens after the episode."""
    return Path(tempfile.mkdtemp(prefix="roll-play-"))


def _saved(media: Media) -> Path:
    path = _images() / f"{media.digest[:12]}.png"
    if not path.exists():
        media.image().save(path)
    return path
