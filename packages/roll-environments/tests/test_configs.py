"""Mistakes in env_config are located before a run, and `roll-core envs` lists and plays."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from roll_core.cli import main as cli
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import check_part
from roll_core.spec.providers import EnvironmentProvider
from roll_environments import config
from roll_environments.plugin import roll_environments
from roll_testing.errors import mentions


def test_every_part_fits_its_contract() -> None:
    registry = load_registry()
    for record in roll_environments():
        check_part(record, owner="roll-environments")
        assert registry.find(EnvironmentProvider, record.name) == record


@pytest.mark.parametrize(
    ("schema", "options", "facts"),
    [
        ("TextGameConfig", {"rooms": 2}, ["rooms"]),
        ("LocalSearchConfig", {"corpus": "no.jsonl"}, ["no.jsonl"]),
        ("ToolsConfig", {}, ["class"]),
        ("ToolsConfig", {"class": "helpers_environments"}, ["class", "module:attribute"]),
        ("ToolsConfig", {"class": "helpers_environments:Missing"}, ["class", "Missing"]),
        ("ToolsConfig", {"class": "no_such_module:Game"}, ["class", "no_such_module"]),
        ("ToolsConfig", {"class": "helpers_environments:Silent"}, ["Silent", "get_reward"]),
        ("ToolsConfig", {"class": "helpers_environments:Counter", "rewards": ["x:y"]}, ["rewards.0"]),
        ("GymnasiumConfig", {"make": "helpers_environments:Missing"}, ["Missing"]),
        ("OpenEnvConfig", {"url": "localhost:1", "action": "x"}, []),
    ],
)
def test_mistakes_are_located(schema: str, options: dict[str, Any], facts: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        getattr(config, schema)(**options)
    text = "\n".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in caught.value.errors())
    assert mentions(text, *facts), text


def test_options_of_a_class_are_keyword_arguments() -> None:
    given = config.ToolsConfig(**{"class": "helpers_environments:Counter"})
    assert given.model_dump(mode="json")["target"] == "helpers_environments:Counter"


@pytest.mark.engine("gymnasium")
def test_a_name_that_gymnasium_does_not_know_is_located() -> None:
    with pytest.raises(ValidationError, match="FrozenLaake"):
        config.GymnasiumConfig(id="FrozenLaake-v1")


def test_environments_are_listed_with_package_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envs", "list"]) == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "text_game", "roll-environments", "rooms: 6", "class:", "sokoban")


def test_an_episode_is_played_by_hand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["/hint", '/call python {"expression": "2 + 3"}', "/call python", "1"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.main(["envs", "play", "math_with_python", "num_operations=1", "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "[hint]", "[tool] 5", "error", "[end]")


def test_the_end_of_the_input_ends_the_game(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("look\n"))
    assert cli.main(["envs", "play", "text_game"]) == 0
    assert "[turn]" in capsys.readouterr().out


def test_an_interrupt_ends_the_game_without_another_line() -> None:
    command = [sys.executable, "-m", "roll_core", "envs", "play", "text_game"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    usual = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in background jobs
    with subprocess.Popen(command, preexec_fn=usual, **pipes) as process:
        assert process.stdout is not None
        shown = b""
        while b"reply" not in shown:
            shown += os.read(process.stdout.fileno(), 1000)
        try:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


def test_mistakes_of_the_command_are_located(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envs", "play", "text_game", "rooms=1"]) == 2
    assert mentions(capsys.readouterr().err, "rooms", "ROLL-C013")
    assert cli.main(["envs", "play", "text_game", "rooms"]) == 2
    assert "ROLL-C025 rooms" in capsys.readouterr().err
    assert cli.main(["envs", "play", "text_game", "romos=3"]) == 2
    assert mentions(capsys.readouterr().err, "romos", "ROLL-C010", "key_reward")
    assert cli.main(["envs", "play", "tools"]) == 2
    assert mentions(capsys.readouterr().err, "class", "ROLL-C011")
    assert cli.main(["envs", "play", "text_gmae"]) == 2
    assert "'text_game'" in capsys.readouterr().err


def test_a_failing_environment_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert cli.main(["envs", "play", "tools", "class=helpers_environments:Faulty", "options={at: reset}"]) == 1
    assert mentions(capsys.readouterr().err, "tools", "roll-environments", "helpers_environments:Faulty", "reset")
