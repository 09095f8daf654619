"""Options of the environments. Light."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import sys
from importlib.metadata import version
from typing import Annotated, Any, Literal

from packaging.requirements import Requirement
from pydantic import AfterValidator, Field, model_validator

from roll_core.errors import install_command
from roll_core.spec.config import Config, EnvVars, PositiveFloat, PositiveInt
from roll_environments.targets import described, importable, load

Target = Annotated[str, AfterValidator(importable)]
"""`module:attribute` of a function or class, also of a file in the working directory."""


class MathWithPythonConfig(Config):
    """Options of the environment `math_with_python`."""

    num_operations: Annotated[int, Field(ge=1, le=20)] = 3
    """Operators in a problem."""
    digits: Annotated[int, Field(ge=1, le=9)] = 3
    """Digits of the numbers in a problem."""


class LocalSearchConfig(Config):
    """Options of the environment `local_search`."""

    corpus: str | None = None
    """JSON Lines file of documents with `title` and `text`. Default: the corpus of the package."""
    num_results: PositiveInt = 3
    """Documents per search."""

    @model_validator(mode="after")
    def _can_be_read(self) -> LocalSearchConfig:
        if self.corpus is not None:
            from roll_environments.local_search import read_corpus

            read_corpus(self.corpus)
        return self


class TextGameConfig(Config):
    """Options of the environment `text_game`."""

    rooms: Annotated[int, Field(ge=3, le=20)] = 6
    """Rooms of the house."""
    key_reward: float = 0.0
    """Reward of finding the key. The open chest has 1."""


class ToolsConfig(Config):
    """Options of the environment `tools`."""

    target: Target = Field(alias="class")
    """Your class, `module:Class`, or a function that returns an object. Its public methods are tools."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    rewards: list[Target] = Field(default_factory=list)
    """Reward functions, `module:function`, called as TRL calls them. Their rewards are added to `get_reward`'s."""
    tool_errors: Literal["reply", "fail"] = "reply"
    """`reply`: the policy gets the message of an exception in a tool, as in TRL. `fail`: the episode fails."""

    @model_validator(mode="after")
    def _has_reset_and_a_reward(self) -> ToolsConfig:
        _installed("transformers", "roll-environments[tools]")
        target = load(self.target)
        if not isinstance(target, type):
            return self
        if not callable(getattr(target, "reset", None)):
            raise ValueError(f"{self.target} has no method reset")
        if not self.rewards and not callable(getattr(target, "get_reward", None)):
            raise ValueError(f"there is no reward: {self.target} has no method get_reward, and rewards is empty")
        return self


class GymnasiumConfig(Config):
    """Options of the environment `gymnasium`."""

    make: str = "gymnasium:make"
    """Function or class that makes the environment, `module:attribute`. For GEM: `gem:make`."""
    id: str | None = None
    """Name of the environment, passed to `make`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `make`."""
    prompt: str | None = None
    """Text before the first observation. Default: what the action space expects."""
    actions: list[str] = Field(default_factory=list)
    """Words for the numbers of a discrete action space, in order."""
    observation: str = "text"
    """`text`: texts as they are, other values as JSON. `render`: what `render` returns as text. `image`: the image that
    `render` returns with `render_mode: rgb_array`, for a model that reads images. Or your own function,
    `module:function`, from an observation to a text or an image of Pillow."""
    action: Target | None = None
    """Your own function, `module:function`, from a reply's text to an action, or None for an invalid reply."""
    invalid_reward: float = 0.0
    """Reward of a reply without a valid action."""

    @model_validator(mode="after")
    def _can_be_made(self) -> GymnasiumConfig:
        if self.make == "gymnasium:make":
            _installed("gymnasium", "roll-environments[gymnasium]")
            if self.id is None:
                raise ValueError("id is missing, expected the name of a gymnasium environment")
            import gymnasium

            try:
                gymnasium.spec(self.id)
            except gymnasium.error.Error as error:
                raise ValueError(f"id: {error}") from error
        else:
            try:
                importable(self.make)
            except ValueError:
                if self.make.startswith("gem:"):
                    _installed("gem", "gem-llm")
                raise
        if self.observation == "image":
            _installed("PIL", "roll-core[images]")
        if self.observation not in ("text", "render", "image"):
            importable(self.observation)
        return self


class ReasoningGymConfig(Config):
    """Options of the environment `reasoning_gym`."""

    dataset: str
    """Name of the dataset."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset. The seed is the episode's."""
    prompt: str | None = None
    """Text after the question. Default: write the answer between tags."""

    @model_validator(mode="after")
    def _exists(self) -> ReasoningGymConfig:
        _installed("reasoning_gym", "roll-environments[reasoning-gym]")
        return self


class TextArenaConfig(Config):
    """Options of the environment `textarena`."""

    id: str
    """Name of the game."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `textarena.make`."""
    num_players: PositiveInt = 1
    """Players of the game."""
    player: Annotated[int, Field(ge=0)] = 0
    """Number of the policy's player."""
    opponent: Target | None = None
    """Your function, `module:function`, from what another player sees to the action. Needed with several players."""
    self_play: bool = False
    """True if the policy plays all players, each with a baseline of its own."""

    @model_validator(mode="after")
    def _has_players(self) -> TextArenaConfig:
        _installed("textarena", "roll-environments[textarena]")
        if self.player >= self.num_players:
            raise ValueError(f"player is {self.player}, expected less than num_players {self.num_players}")
        if self.self_play and (self.player or self.opponent is not None):
            raise ValueError("player and opponent have no effect with self_play: remove them")
        if self.num_players > 1 and self.opponent is None and not self.self_play:
            raise ValueError(f"num_players is {self.num_players}, but there is no opponent: set it or self_play")
        return self


class McpConfig(Config):
    """Options of the environment `mcp`."""

    command: list[str] = Field(default_factory=list)
    """Command of a stdio server, started for each episode and killed at its end."""
    url: str | None = None
    """Address of a server with streamable HTTP, instead of `command`. Episodes share it."""
    env: EnvVars = Field(default_factory=dict)
    """Environment variables of the stdio server."""
    prompt: str | None = None
    """First message. Default: the column `prompt` of the task."""
    tools: list[str] = Field(default_factory=list)
    """Tools that the policy may call. Default: all."""
    reset_tool: str | None = None
    """Tool that begins the episode. Gets `seed` and columns of the task, if it has such parameters. Its text is added
    to the messages."""
    reward_tool: str | None = None
    """Tool without parameters that returns the reward of the episode."""
    reward: Target | None = None
    """Your function instead, `module:function(task, messages)`, that returns the reward."""
    images: bool = True
    """Pass on images of results, for a model that reads images. If false, the policy reads `[image]` instead."""

    @model_validator(mode="after")
    def _is_complete(self) -> McpConfig:
        _installed("mcp", "roll-environments[mcp]")
        if bool(self.command) == (self.url is not None):
            raise ValueError("expected either command or url")
        if (self.reward_tool is None) == (self.reward is None):
            raise ValueError("there is no reward: expected either reward_tool or reward")
        return self


class OpenEnvConfig(Config):
    """Options of the environment `openenv`."""

    url: str | None = None
    """Address of a running server. Each episode is a session."""
    command: list[str] = Field(default_factory=list)
    """Command of a server instead, started for each episode. `{port}` in it is replaced by a free port."""
    action: str | None = None
    """Field of the action that is the text of a reply."""
    observation: str | None = None
    """Field of the observation that is the text for the policy. Default: the whole observation as JSON."""
    tools: bool = False
    """Offer the server's MCP tools. Without `action`, a reply without a tool call ends the episode."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Parameters of `reset`, beside the seed and the columns of the task."""
    prompt: str = ""
    """Text before the first observation. Default: the column `prompt` of the task."""

    @model_validator(mode="after")
    def _is_complete(self) -> OpenEnvConfig:
        _installed("websockets", "roll-environments[openenv]")
        if bool(self.command) == (self.url is not None):
            raise ValueError("expected either url or command")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url}, expected http:// or https://")
        if self.action is None and not self.tools:
            raise ValueError("action is missing: name the field of the action, or set tools: true")
        return self


class ContainerConfig(Config):
    """`container`: the commands of a container, if it is none of the known programs.

    `{name}`, `{image}`, `{workdir}`, `{context}` and `{folder}`, an empty directory of the episode, are replaced.
    """

    build: list[str] = Field(default_factory=list)
    """Build `{image}` from the directory `{context}`. Default: copy the files of the task's `environment`."""
    start: list[str] = Field(min_length=1)
    """Start the container and return. It runs until `remove`."""
    exec: list[str] = Field(min_length=1)
    """Run a program in the container, with standard input; the program and its arguments follow."""
    stop: list[str] = Field(min_length=1)
    """Kill all processes in the container and wait for their end. Its files remain, and `exec` works afterwards."""
    remove: list[str] = Field(min_length=1)
    """Remove the container with its processes and files."""


class RemoteContainerConfig(Config):
    """`container`: containers of a service, by its API."""

    api: Literal["daytona"]
    """Service: Daytona, also one that you host."""
    url: str = ""
    """Address of its API. Default: that of its library."""
    token: str = "DAYTONA_API_KEY"
    """Environment variable with the token of the API."""
    target: str = ""
    """Region. Default: that of the account."""


class HarborConfig(Config):
    """Options of the environment `harbor`."""

    tasks: str = ""
    """Directory of a task in Harbor's layout, or of directories of tasks. Empty: each row of data is a task, with the
    columns `instruction`, `image` and `test`."""
    container: Literal["docker", "podman", "local"] | ContainerConfig | RemoteContainerConfig = "docker"
    """Program that runs the containers, its commands, or a service. `local`: directories and namespaces of this host,
    without images."""
    mounts: dict[str, str] = Field(default_factory=dict)
    """Directories of the host that `container: local` shows read-only, with their paths in the container."""
    command_timeout_s: PositiveFloat = 30.0
    """Maximum seconds of a command of the tool `bash`."""
    max_output: PositiveInt = 10_000
    """Maximum bytes of a command's output that the policy reads."""

    @model_validator(mode="after")
    def _can_run(self) -> HarborConfig:
        from roll_environments.harbor import read_tasks
        from roll_environments.workspaces import commands_of

        try:
            tasks = read_tasks(self.tasks) if self.tasks else ()
        except (OSError, ValueError) as error:
            raise ValueError(f"tasks: {error}") from error
        if self.mounts and self.container != "local":
            raise ValueError("mounts has no effect without container: local")
        for source, target in self.mounts.items():
            if not os.path.exists(os.path.expanduser(source)):
                raise ValueError(f"mounts: {source} does not exist")
            if not target.startswith("/"):
                raise ValueError(f"mounts: {source} is shown at {target!r}, expected an absolute path")
        if self.container == "local" and not sys.platform.startswith("linux"):
            raise ValueError(f"container: local needs Linux, this is {sys.platform}")
        if isinstance(self.container, RemoteContainerConfig):
            _installed("daytona", "daytona>=0.200")
            if lacking := next((task for task in tasks if not task.image), None):
                raise ValueError(
                    f"{lacking.where}: environment.docker_image is missing: container.api builds no images"
                )
            return self
        container = self.container.model_dump() if isinstance(self.container, ContainerConfig) else self.container
        for key, command in commands_of(container, self.mounts).items():
            if command and shutil.which(command[0]) is None:
                raise ValueError(f"container.{key}: {command[0]} is not a program on this host")
        return self


class VerifiersConfig(Config):
    """Options of the agent `verifiers`."""

    env: dict[str, Any]
    """The block `env` of verifiers: `taskset`, `agent` and others. Modules of the working directory are found."""
    select: dict[str, Any] = Field(default_factory=dict)
    """The block `select` of verifiers: which tasks. Default: all. An endless taskset needs `limit`."""

    @model_validator(mode="after")
    def _can_be_loaded(self) -> VerifiersConfig:
        _installed("verifiers", "verifiers>=0.4,<0.5", "for older versions set agent: verifiers_v0")
        from roll_environments.verifiers_adapter import env_config, select_config

        for key, check in (("env", env_config), ("select", select_config)):
            try:
                check(getattr(self, key))
            except (Exception, SystemExit) as error:  # the taskset's module may raise anything
                raise ValueError(f"{key}: {described(error)}") from error
        return self


class VerifiersV0Config(Config):
    """Options of the agent `verifiers_v0`."""

    id: str
    """Module with `load_environment`, installed or of the working directory."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `load_environment`."""
    split: Literal["train", "eval"] = "train"
    """Dataset of the environment. Without one for evaluation, `eval` is the one for training."""

    @model_validator(mode="after")
    def _can_be_loaded(self) -> VerifiersV0Config:
        _installed("verifiers", "verifiers>=0.2,<0.4", "for newer versions set agent: verifiers")
        from roll_environments.verifiers_v0_adapter import loader

        try:
            load_environment = loader(self.id)
        except (Exception, SystemExit) as error:  # the module may raise anything
            raise ValueError(f"id: {described(error)}") from error
        try:
            inspect.signature(load_environment).bind(**self.args)
        except TypeError as error:
            raise ValueError(f"args: {error}") from error
        return self


def _installed(module: str, requirement: str, otherwise: str = "") -> None:
    """Raises `ValueError` with the requirement that brings a module, if it cannot be found or has another version.

    `otherwise` is what to do instead with another version.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{module} is not installed: {install_command(requirement)}")
    required = Requirement(requirement)
    if required.specifier and not required.specifier.contains(installed := version(required.name), prereleases=True):
        raise ValueError(
            f"{required.name} {installed} is installed, expected {required.specifier}: {install_command(requirement)}"
            f"{', or ' if otherwise else ''}{otherwise}"
        )
