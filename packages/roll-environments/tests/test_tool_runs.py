"""Runs with tool calls: a model that has memorised conversations calls tools, and is trained on its calls once."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from helpers_environment_runs import metrics, run

import roll_pipeline_agentic
from roll_core.config import load
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.console import Console
from roll_core.runtime.run.loop import execute
from roll_testing.errors import raises_error

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tools"
QUESTION = "What is (12) + 34?\nUse the tool python. Then reply with the number."
SUM = '<tool_call>{"name": "python", "arguments": {"expression": "(12) + 34"}}</tool_call>'
ADD = '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call>'
CONVERSATIONS = (
    ["tools: python", QUESTION, SUM, "46", "46"],
    ["tools: add undo", " Count to 3.", ADD, "3", "done"],
)
ROLES = ("system", "user", "assistant", "tool", "assistant")


@pytest.fixture(scope="module")
def make_data() -> Any:
    spec = importlib.util.spec_from_file_location("tools_make_data", EXAMPLE / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pretrained(make_data: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has memorised two conversations, with the tokenizer of the example."""
    folder = tmp_path_factory.mktemp("memorised")
    make_data.write_tokenizer(folder / "tokenizer")
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for texts in CONVERSATIONS:
            messages = [{"role": role, "content": text} for role, text in zip(ROLES, texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")
    changes = [
        f"pretrain={folder / 'tokenizer'}",
        f"output_dir={folder / 'output'}",
        f"sft_train.data_args.file_name={folder / 'rows.jsonl'}",
        "sft_train.model_args.random_init.num_hidden_layers=1",
        *("max_steps=50", "track_with=[]", "executor=local"),
        *("sft_train.training_args.learning_rate=0.02", "sft_train.training_args.per_device_train_batch_size=2"),
    ]
    registry = load_registry()
    result = execute(
        load(EXAMPLE / "sft.yaml", changes, registry), registry, console=Console(stream=io.StringIO(), terminal=False)
    )
    if result.error is not None:
        raise result.error
    return str(folder / "output" / "tools-sft" / "latest" / "export")


def test_tool_calls_are_trained_on_exactly_once(
    pretrained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an environment in the driver, and of a class of the user in a process."""
    import roll_core.pipelines.experience as experience

    trained: list[tuple[Any, Any]] = []
    cut = experience.sequences_of

    def recorded(sample: Any, **given: Any) -> Any:
        trained.append((sample, cut(sample, **given)))
        return trained[-1][1]

    monkeypatch.setattr(experience, "sequences_of", recorded)
    monkeypatch.chdir(Path(__file__).parent)  # where the environment's process finds the class
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "What is (12) + 34?", "answer": "46"}) + "\n", encoding="utf-8"
    )
    environments = {
        "math": {"environment": "math_with_python", "data_args": {"file_name": str(tmp_path / "rows.jsonl")}},
        "count": {"environment": "tools", "env_config": {"class": "helpers_environments:Counter"}, "concurrency": 1},
    }
    config: dict[str, Any] = {
        "pretrain": pretrained,
        "tokenizer": None,
        "max_steps": 2,
        "rollout_batch_size": 8,
        "max_actions_per_traj": 3,
        "max_tokens_per_step": 40,
        "custom_envs": environments,
    }
    for role in ("actor_train", "actor_infer"):
        config[role] = {
            "model_args": {"dtype": "fp32", "random_init": None},
            "data_args": {"template": "native"},
            "strategy_args": {"strategy_name": f"hf_{role.removeprefix('actor_')}"},
            "device_mapping": [0],
        }
    config["actor_train"]["training_args"] = {"learning_rate": 1e-4, "per_device_train_batch_size": 4}
    result = run(tmp_path, {}, **config)
    line = metrics(result)
    assert line["rollout/forks"] == 0
    assert line["env/math/tool_errors"] == line["env/count/tool_errors"] == 0
    from roll_core.runtime.run.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(pretrained)
    called: dict[str, int] = {"math": 0, "count": 0}
    assert len(trained) == 2 * 8
    for sample, (sequence,) in trained:
        turns = [tokenizer.decode(turn.sampled_ids.tolist()) for turn in sample.rollout.turns]
        sampled = [number for turn in sample.rollout.turns for number in turn.sampled_ids.tolist()]
        assert sequence.tokens[sequence.loss_mask].tolist() == sampled
        text = tokenizer.decode(sequence.tokens.tolist())
        if turns[0].startswith("<tool_call>") and sample.reward.value == 1:
            called[sample.tag] += 1
            assert text.count(turns[0]) == 1
            assert f"{turns[0]}<|tool|>" in text
    assert min(called.values()) > 0


def test_example_oracle_writes_what_the_template_renders(make_data: Any, tmp_path: Path) -> None:
    """SFT rows have the tools and calls as text; an episode renders them from schemas and calls."""
    import asyncio
    import random

    from roll_core.runtime.run.tokenizer import load_tokenizer
    from roll_environments.math_with_python import TOOL

    make_data.write_tokenizer(tmp_path)
    tokenizer, rng = load_tokenizer(str(tmp_path)), random.Random(0)
    for _ in range(20):
        system, *messages = asyncio.run(make_data.conversation(rng))
        assert system["content"] == "tools: python"
        calls = [{**each} for each in messages]
        for each in calls:
            if each["content"].startswith("<tool_call>"):
                function = json.loads(each["content"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
                each |= {"content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        written = tokenizer.apply_chat_template([system, *messages], tokenize=False)
        assert written == tokenizer.apply_chat_template(calls, tools=[TOOL], tokenize=False)


@pytest.mark.parametrize(("name", "run_name"), [("sft", "tools-sft"), ("grpo", "tools-grpo")])
def test_the_configs_of_the_example_are_accepted(name: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    assert load(EXAMPLE / f"{name}.yaml", [], load_registry()).config.exp_name == run_name


TEMPLATE = Path(roll_pipeline_agentic.__file__).parent / "starters" / "agentic" / "chat_template.jinja"


def test_a_created_tokenizer_describes_tools_by_a_template(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        {"environment": "math_with_python"},
        tokenizer={"kind": "byte", "chat_template": str(TEMPLATE)},
        prompt_length=700,
        response_length=200,
        **{"actor_train.data_args.template": "native"},
    )
    assert metrics(result)["env/env/turns/mean"] >= 1
    sample = json.loads(result.run_dir.samples.read_text(encoding="utf-8").splitlines()[0])
    assert '"name": "python"' in sample["prompt"]
    assert sample["prompt"].endswith("<|im_start|>assistant\n")


def test_check_refuses_tools_that_the_template_cannot_describe(tmp_path: Path) -> None:
    environment = {"environment": "math_with_python"}
    with raises_error("ROLL-C018", key="actor_train.data_args.template"):
        run(tmp_path, environment)
    with raises_error("ROLL-C018", key="tokenizer"):
        run(tmp_path, environment, **{"actor_train.data_args.template": "native"})
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer = {"kind": "byte", "chat_template": str(tmp_path / "own.jinja")}
    with raises_error("ROLL-C018", key="tokenizer"):
        run(tmp_path, environment, tokenizer=tokenizer, **{"actor_train.data_args.template": "native"})
    (tmp_path / "own.jinja").write_text("{{ tools }}<|tool_call_start|>")
    with raises_error("ROLL-C018", "tool_format", key="tokenizer"):
        run(tmp_path, environment, tokenizer=tokenizer, **{"actor_train.data_args.template": "native"})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with raises_error("ROLL-C018", key="pretrain"):
        run(tmp_path, environment, tokenizer=None, pretrain=str(model), **{"actor_train.data_args.template": "native"})
