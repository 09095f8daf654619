"""Mistakes in env_config are located before a run, and `roll-core envs` lists and plays."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from roll_core.cli import main as cli
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import EnvironmentProvider
from roll_environments import config
from roll_environments.plugin import roll_environments
from roll_testing.errors import mentions
from roll_testing.part_checks import check_part


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


CONFIG = """\
pipeline: agentic
tokenizer: {kind: byte}
prompt_length: 64
rollout_batch_size: 128
custom_envs:
  env: {environment: text_game}
train_env_manager: {group_size: 2}
actor_train:
  model_args: {random_init: {model_type: qwen3, hidden_size: 64, num_hidden_layers: 2}}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
"""


@pytest.mark.parametrize(
    ("entry", "module", "requirement"),
    [
        ("environment: gymnasium, env_config: {id: CartPole-v1}", "gymnasium", "roll-environments[gymnasium]"),
        ('environment: gymnasium, env_config: {make: "gem:make", id: "game:x"}', "gem", "gem-llm"),
        ('environment: tools, env_config: {class: "helpers_environments:Counter"}', "transformers", "[tools]"),
        ("environment: mcp, env_config: {command: [x], reward_tool: y}", "mcp", "roll-environments[mcp]"),
        ('environment: openenv, env_config: {url: "http://x", action: y}', "websockets", "[openenv]"),
        ("agent: verifiers, agent_config: {env: {}}", "verifiers", "verifiers>=0.4,<0.5"),
        ("agent: verifiers_v0, agent_config: {id: words}", "verifiers", "verifiers>=0.2,<0.4"),
        ("environment: reasoning_gym, env_config: {dataset: x}", "reasoning_gym", "[reasoning-gym]"),
        ("environment: textarena, env_config: {id: x}", "textarena", "roll-environments[textarena]"),
    ],
)
def test_a_missing_package_is_located_with_what_to_install(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    entry: str,
    module: str,
    requirement: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("environment: text_game", entry))
    assert cli.main(["check", str(file)]) == 2
    shown = capsys.readouterr().err
    key = f"custom_envs.env.{'agent_config' if 'agent_config' in entry else 'env_config'}"
    assert mentions(shown, f"{file}:6:", "ROLL-C014", key, module, "pip", requirement)
    assert shown.count("ROLL-C014") == 1


@pytest.mark.parametrize(
    ("found", "agent", "options", "wanted", "other"),
    [
        ("0.2.14", "verifiers", "env: {}", "verifiers>=0.4,<0.5", "verifiers_v0"),
        ("0.3.1", "verifiers", "env: {}", "verifiers>=0.4,<0.5", "verifiers_v0"),
        ("0.1.14", "verifiers_v0", "id: words", "verifiers>=0.2,<0.4", "verifiers"),
        ("0.4.0", "verifiers_v0", "id: words", "verifiers>=0.2,<0.4", "verifiers"),
    ],
)
def test_another_verifiers_is_refused_with_its_version(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: str,
    agent: str,
    options: str,
    wanted: str,
    other: str,
) -> None:
    site = tmp_path / "site"
    (site / f"verifiers-{found}.dist-info").mkdir(parents=True)
    (site / f"verifiers-{found}.dist-info" / "METADATA").write_text(f"Name: verifiers\nVersion: {found}\n")
    (site / "verifiers").mkdir()
    (site / "verifiers" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.replace("environment: text_game", f"agent: {agent}, agent_config: {{{options}}}"))
    assert cli.main(["check", str(file)]) == 2
    shown = capsys.readouterr().err
    key = "custom_envs.env.agent_config"
    assert mentions(shown, f"{file}:6:", "ROLL-C014", key, found, wanted, other)


def test_environments_are_listed_with_package_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envs", "list"]) == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "text_game", "roll-environments", "rooms: 6", "class:", "sokoban")


def test_an_episode_is_played_by_hand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["/hint", '/call python {"expression": "2 + 3"}', "/call python", "1"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    words = ["envs", "play", "math_with_python", "num_operations=1", "--seed", "3"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert mentions(shown, "[hint]", "[tool] 5", "error", "[end]")
    for order in ([4, 5, 2, 3], [2, 4, 5, 3]):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        assert cli.main([*words[:2], *(words[index] for index in order)]) == 0
        assert capsys.readouterr().out == shown


def test_a_played_image_is_saved_as_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/call paint\n"))
    assert cli.main(["envs", "play", "tools", "class=helpers_environments:Painter"]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "4 x 2" in line]
    with Image.open(line.rpartition(" ")[2]) as image:
        assert image.getpixel((3, 1)) == (3, 0, 0)


def test_a_task_has_the_columns_of_a_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the answer is 7\n"))
    task = json.dumps({"question": "3 + 4?", "answer": 7})
    assert cli.main(["envs", "play", "math_with_python", "--task", task]) == 0
    shown = capsys.readouterr().out
    assert "3 + 4?" in shown
    assert shown.split()[-1] == "1"  # the total reward
    for wrong in ("[7]", "{question: 7}"):
        with pytest.raises(SystemExit):
            cli.main(["envs", "play", "math_with_python", "--task", wrong])


GREEDY = """
from roll_core.spec.environment import Environment, Opening, Turn


class Greedy(Environment):
    def reset(self, task, seed):
        return Opening(messages=[{"role": "user", "content": "a number"}])

    def step(self, reply):
        try:
            return Turn(reward=float(reply.text), done=True)
        except ValueError:
            return Turn(reward=0.0, done=True)
"""


def test_tricks_are_tried_from_the_command_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "greedy_env.py").write_text(GREEDY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["envs", "test", "greedy_env:Greedy", "-k", "no_finite or links"]) == 1
    assert mentions(capfd.readouterr().out, "no_finite_number", "nan", "1 failed, 1 passed")
    assert cli.main(["envs", "test", "text_game", "romos=3"]) == 2
    assert mentions(capfd.readouterr().err, "romos", "ROLL-C010")


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


@pytest.mark.parametrize(
    ("result", "found"),
    [("'which level?'", "str"), ("Opening(messages=['which level?'])", "messages"), ("None", "NoneType")],
)
def test_a_wrong_result_of_the_users_class_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, result: str, found: str
) -> None:
    (tmp_path / "my_levels.py").write_text(LEVELS.replace("RESULT", result), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_levels", raising=False)
    assert cli.main(["envs", "play", "my_levels:Levels"]) == 1
    assert mentions(capsys.readouterr().err, "ROLL-D003", "my_levels:Levels", "reset", found)


LEVELS = """
from roll_core.spec.environment import Environment, Opening


class Levels(Environment):
    def reset(self, task, seed):
        return RESULT

    def step(self, reply):
        raise AssertionError
"""


def test_a_failing_environment_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert cli.main(["envs", "play", "tools", "class=helpers_environments:Faulty", "options={at: reset}"]) == 1
    assert mentions(capsys.readouterr().err, "tools", "roll-environments", "helpers_environments:Faulty", "reset")
