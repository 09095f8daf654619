"""Whole runs of the pipeline agentic."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import yaml
from transformers import AutoTokenizer

from roll_core.api.files import FileCheck
from roll_core.cli.main import main
from roll_core.config import load
from roll_core.data.templates import chat_template_of, control_tokens
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError, DataError
from roll_core.spec.config import TokenizerConfig
from roll_pipeline_agentic.config import EvaluateEpisodesConfig

if TYPE_CHECKING:
    from conftest import AgenticRuns

    from roll_core.runtime.run.loop import RunResult


def test_a_run_trains_and_reports_episodes(runs: AgenticRuns) -> None:
    manager = {"group_size": 2, "generating_args": {"temperature": 0.0}}
    result = runs.ok(runs.config(eval_steps=2, val_batch_size=4, val_env_manager=manager))
    *_, last = lines = [line for line in runs.metrics(result) if line["step"]]
    assert len(lines) == 2
    assert last["actor/grad_norm"] > 0
    assert last["rollout/forks"] == 0
    assert 1 <= last["env/guess/turns/mean"] <= last["env/guess/turns/max"] <= 3
    assert last["env/guess/score/mean"] == pytest.approx(last["score/mean"])
    assert 0 <= last["env/guess/valid"] <= 1
    for line in lines:  # a solved episode has the reward 1, the others report no success
        assert line["env/guess/success"] == pytest.approx(line["score/mean"])
    assert last["tokens/generated"] <= 8 * 3 * 3
    assert {"val/score/mean", "val/env/guess/turns/mean"} <= runs.metrics(result)[0].keys()
    sample = next(each for each in runs.samples(result) if each["split"] == "train")
    assert set(sample["turns"][0]) == {"context", "response", "reward", "finish", "versions"}
    assert sample["turns"][0]["context"] == "Guess a number from 1 to 9."
    transcript = "".join(turn["context"] + turn["response"] for turn in sample["turns"])
    assert transcript == sample["prompt"] + sample["response"]


def test_environments_have_their_share_limits_and_evaluation(runs: AgenticRuns) -> None:
    """Of 4 groups, `num_groups_partition` 3 to 1 gives 3 to one tag. An evaluation has its own tags and group size."""
    guess = {"environment": "guess_number", "env_config": {"high": 9}}
    given = {
        "custom_envs": {
            "short": {**guess, "max_steps": 1, "max_tokens_per_step": 1},
            "long": {**guess, "env_config": {"high": 10**6}},
            "held_out": {**guess, "max_steps": 2},
            "rare": {**guess, "max_steps": 1},
        },
        "train_env_manager": {
            "group_size": 2, "num_env_groups": 8, "tags": ["short", "long"], "num_groups_partition": [6, 2],
        },
        "val_env_manager": {
            "group_size": 1, "num_env_groups": 10, "tags": ["held_out", "rare"], "num_groups_partition": [9, 1],
        },
        "val_batch_size": 3,
        "eval_steps": 2,
    }  # fmt: skip
    result = runs.ok(runs.config(**given))
    lines = [line for line in runs.metrics(result) if line["step"]]
    for line in lines:
        assert (line["env/short/turns/max"], line["env/short/tokens_per_turn/mean"]) == (1, 1)
        assert (line["env/long/turns/mean"], line["env/long/truncated_share"]) == (3, 1)
    samples = runs.samples(result)
    found = Counter((each["split"], each["step"], each["tag"]) for each in samples)
    expected = {("train", step, tag): number for step in (1, 2) for tag, number in (("short", 6), ("long", 2))}
    assert {key: number for key, number in found.items() if key[0] == "train"} == expected
    # Of 3 groups the share of `rare` is 0.3; an evaluation has one.
    evaluated = Counter(key for key in found.elements() if key[0] == "val" and key[1] == 2)
    assert evaluated == {("val", 2, "held_out"): 3, ("val", 2, "rare"): 1}
    groups = Counter(each["group"] for each in samples if each["split"] == "train")
    assert set(groups.values()) == {2}
    assert {"val/env/held_out/turns/max"} <= runs.metrics(result)[0].keys()
    assert max(line.get("val/env/held_out/turns/max", 0) for line in runs.metrics(result)) <= 2


@pytest.mark.parametrize(
    ("estimator", "options"),
    [("gigpo", {}), ("step_reinforce", {"method": "mean_std", "grouping": "state"}), ("agentic_reinforce", {})],
)
def test_turns_are_credited(runs: AgenticRuns, estimator: str, options: dict[str, str]) -> None:
    environment = {"environment": "guess_number", "env_config": {"high": 9, "step_penalty": 0.1}}
    given = {"adv_estimator": estimator, "adv_options": options, "custom_envs": {"guess": environment}}
    for line in runs.metrics(runs.ok(runs.config(**given))):
        assert line["actor/grad_norm"] > 0
        assert line["advantage/max"] > line["advantage/min"]


def test_turn_gae_has_a_critic(runs: AgenticRuns) -> None:
    config = runs.config(adv_estimator="turn_gae")
    config["critic"] = {**config["actor_train"], "data_args": {}}
    for line in runs.metrics(runs.ok(config)):
        assert line["critic/grad_norm"] > 0


def test_a_run_with_masks_a_penalty_and_echo(runs: AgenticRuns) -> None:
    entry = {"environment": "guess_number", "env_config": {"high": 9}, "response_mask": {"turns": "last"}}
    manager = {"group_size": 4, "format_penalty": -0.5}
    given = {"custom_envs": {"guess": entry}, "train_env_manager": manager}
    first = {}
    for coef in (0.0, 0.5):
        result = runs.ok(runs.config(exp_name=f"echo-{coef:g}", echo_coef=coef, **given))
        first[coef] = line = runs.metrics(result)[0]
        assert line["env/guess/trained_share"] < 1
        assert line["reward/guess/format_penalty/mean"] < 0
        assert any("trained" in turn for sample in runs.samples(result) for turn in sample["turns"])
    # A model with random weights: about the cross-entropy of the uniform distribution, log(50).
    assert 3 < first[0.5]["actor/echo_nll"] < 5
    assert "actor/echo_nll" not in first[0.0]
    assert first[0.5]["actor/policy_loss"] == pytest.approx(first[0.0]["actor/policy_loss"])
    expected = first[0.0]["actor/loss"] + 0.5 * first[0.5]["actor/echo_nll"]
    assert first[0.5]["actor/loss"] == pytest.approx(expected, rel=1e-5)


ENVIRONMENT = '''
from roll_core.spec.environment import Environment, Opening, Turn


class Parity(Environment):
    """Blocking code, run in processes."""

    def __init__(self, digits: int = 1):
        self.digits = digits

    def reset(self, task, seed):
        self.number = seed % 10 ** self.digits
        return Opening(messages=[{"role": "user", "content": f"even or odd? {self.number}"}])

    def step(self, reply):
        return Turn(reward=float(len(reply.text)), done=True)
'''


@pytest.fixture
def own(runs: AgenticRuns, monkeypatch: pytest.MonkeyPatch) -> AgenticRuns:
    (runs.folder / "my_parity_env.py").write_text(ENVIRONMENT, encoding="utf-8")
    monkeypatch.chdir(runs.folder)
    return runs


def test_an_environment_of_the_user_is_a_file(own: AgenticRuns) -> None:
    entry = {"environment": "my_parity_env:Parity", "env_config": {"digits": 2}, "concurrency": 2}
    result = own.ok(own.config(custom_envs={"parity": entry}, max_steps=1))
    (line,) = own.metrics(result)
    assert line["env/parity/turns/mean"] == 1
    assert line["score/max"] <= 3


@pytest.mark.parametrize("source", ["made", "model"])
def test_a_named_template_is_made_and_exported(own: AgenticRuns, source: str) -> None:
    given = own.config(max_steps=1)
    if source == "model":
        control = control_tokens("chatml")
        built = TokenizerConfig.model_validate(given["tokenizer"])
        make_tokenizer(built, (), own.folder / "model", control_tokens=control)
        given |= {"tokenizer": None, "pretrain": str(own.folder / "model")}
    given["tokenizer"] = given["tokenizer"] and {"kind": "byte"}
    given["actor_train"]["data_args"] = {"template": "chatml"}
    exported = AutoTokenizer.from_pretrained(own.ok(given | {"prompt_length": 256}).run_dir.export)
    assert exported.chat_template == chat_template_of("chatml", exported)
    assert exported.convert_tokens_to_ids("<|im_end|>") > 1


def test_template_without_conversations_fails_before_the_start(
    own: AgenticRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = own.config(custom_envs={"parity": {"environment": "my_parity_env:Parity"}})
    tokenizer = make_tokenizer(TokenizerConfig.model_validate(config["tokenizer"]), (), own.folder / "tokenizer")
    tokenizer.chat_template = "{{ raise_exception('not for chats') }}"
    tokenizer.save_pretrained(own.folder / "tokenizer")
    config |= {"tokenizer": None, "pretrain": str(own.folder / "tokenizer")}
    config["actor_train"]["data_args"] = {"template": "native"}
    monkeypatch.setattr("roll_core.runtime.run.loop.start_roles", None)  # which a call would show
    result = own.run(config)
    assert isinstance(result.error, DataError)
    assert result.error.exit_code == 2
    assert "custom_envs.parity" in str(result.error)


TASKS = """
from roll_core.spec.environment import Environment, Opening, Turn


class Questions(Environment):
    def reset(self, task, seed):
        self.answer = task["answer"]
        return Opening(messages=[{"role": "user", "content": task["question"]}])

    def step(self, reply):
        return Turn(reward=float(self.answer in reply.text) + len(reply.text), done=True)
"""


def test_rows_of_the_data_are_tasks(own: AgenticRuns) -> None:
    (own.folder / "my_questions_env.py").write_text(TASKS, encoding="utf-8")
    rows = [{"id": f"q{i}", "question": f"double of {i}?", "answer": str(2 * i)} for i in range(3)]
    (own.folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    entry = {
        "environment": "my_questions_env:Questions",
        "isolation": "thread",
        "data_args": {"file_name": "tasks.jsonl"},
    }
    config = own.config(custom_envs={"questions": entry}, max_steps=3, record_rollouts=True)
    result = own.ok(config, "val_env_manager={}", "eval_steps=3", "val_batch_size=4")
    trained = [json.loads(group)["id"] for groups in trained_groups(own, result).values() for group in groups]
    # Each pass over the rows has each of them once.
    assert sorted(trained) == sorted(f"questions/q{i}/{epoch}" for i in range(3) for epoch in range(2))
    held_out = [each["group"] for each in own.samples(result) if each["split"] == "val"]
    assert held_out[:4] == ["val/questions/q0/0", "val/questions/q1/0", "val/questions/q2/0", "val/questions/q0/1"]


def test_missing_rows_of_an_environment_are_located_by_check(own: AgenticRuns) -> None:
    rows = own.folder / "rows.jsonl"
    rows.write_text('{"question": "1"}\n')
    entry = {"environment": "my_parity_env:Parity", "data_args": {"file_name": str(rows)}}
    entry["val_data_args"] = {"file_name": str(own.folder / "none.jsonl")}
    path = own.folder / "run.yaml"
    path.write_text(yaml.safe_dump(own.config(custom_envs={"parity": entry})))
    with pytest.raises(ConfigError) as error:
        load(path, [], own.registry, FileCheck())
    found = [(problem.key, problem.code) for problem in error.value.problems]
    assert found == [("custom_envs.parity.val_data_args.file_name", "ROLL-D001")]


def test_options_of_the_users_environment_are_checked(own: AgenticRuns) -> None:
    entry = {"environment": "my_parity_env:Parity", "env_config": {"digits": "two", "size": 3}}
    with pytest.raises(ConfigError) as error:
        own.run(own.config(custom_envs={"parity": entry}))
    keys = {problem.key: problem.code for problem in error.value.problems}
    assert keys == {
        "custom_envs.parity.env_config.digits": "ROLL-C013",
        "custom_envs.parity.env_config.size": "ROLL-C010",
    }


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"rewards": {"x": {"reward": "math_rule"}}}, "rewards"),
        ({"num_return_sequences_in_group": 4}, "num_return_sequences_in_group"),
        ({"rollout_batch_size": 6}, "rollout_batch_size"),
        ({"train_env_manager": {"group_size": 3}}, "rollout_batch_size"),
        ({"train_env_manager": {"group_size": 4, "tags": ["other"]}}, "train_env_manager.tags"),
        ({"train_env_manager": {"group_size": 1}}, "train_env_manager.group_size"),
        ({"custom_envs": {"guess": {"environment": "gues_number"}}}, "custom_envs.guess.environment"),
        (
            {"custom_envs": {"guess": {"env_type": "guess_number", "env_config": {"hight": 3}}}},
            "custom_envs.guess.env_config.hight",
        ),
        (
            {"custom_envs": {"guess": {"environment": "guess_number", "env_config": {"high": 0}}}},
            "custom_envs.guess.env_config.high",
        ),
        (
            {"custom_envs": {"guess": {"environment": "guess_number", "response_mask": {"pattern": "(a"}}}},
            "custom_envs.guess.response_mask.pattern",
        ),
        (
            {"custom_envs": {"guess": {"environment": "guess_number", "response_mask": {"parts": "tools"}}}},
            "custom_envs.guess.response_mask.parts",
        ),
        (
            {"custom_envs": {"guess": {"environment": "guess_number", "response_mask": {"parts": []}}}},
            "custom_envs.guess.response_mask.parts",
        ),
        ({"train_env_manager": {"group_size": 4, "format_penalty": 0.1}}, "train_env_manager.format_penalty"),
        ({"echo_coef": -1.0}, "echo_coef"),
        ({"train_env_manager": {"group_size": 4, "tags": ["guess", "guess"]}}, "train_env_manager.tags"),
        (
            {"train_env_manager": {"group_size": 4, "num_env_groups": 8, "num_groups_partition": [7]}},
            "train_env_manager.num_groups_partition",
        ),
        (
            {"train_env_manager": {"group_size": 4, "num_env_groups": 8, "num_groups_partition": [6, 2]}},
            "train_env_manager.num_groups_partition",
        ),
    ],
)
def test_mistakes_are_located(runs: AgenticRuns, given: dict[str, object], key: str) -> None:
    """At the key, or for a rule about several keys at the line of the first one."""
    with pytest.raises(ConfigError) as error:
        runs.run(runs.config(**given))
    (problem,) = error.value.problems
    line = (runs.folder / "agentic.yaml").read_text(encoding="utf-8").splitlines()[int(problem.where.split(":")[1]) - 1]
    assert line.strip().startswith(f"{key.rpartition('.')[2]}:")


def trained_groups(runs: AgenticRuns, result: RunResult) -> dict[int, list[str]]:
    """Ids of the groups that each step trained on, and their tokens."""
    found = {}
    for file in sorted((result.run_dir.path / "rollouts").glob("step-*.jsonl")):
        _, *groups = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[int(file.stem.removeprefix("step-"))] = [json.dumps(group, sort_keys=True) for group in groups]
    return found


def test_a_resumed_run_continues_its_episodes(runs: AgenticRuns) -> None:
    """A checkpoint after each step has episodes in flight: the resumed run trains on the same ones, each once."""
    given = {
        "is_use_additional_prompts": True,
        "max_additional_running_prompts": 2,
        "max_steps": 4,
        "save_steps": 2,
        "record_rollouts": True,
    }
    whole = runs.ok(runs.config(exp_name="whole", **given))
    saved = json.loads((whole.run_dir.checkpoints / "step-2" / "state.json").read_text(encoding="utf-8"))
    kept = saved["pipeline_state"]["rollouts"]["guess"]["kept"]
    assert len(kept) == 2
    resumed = runs.ok(
        runs.config(exp_name="resumed", resume_from_checkpoint=str(whole.run_dir.checkpoints / "step-2"), **given)
    )
    before, after = trained_groups(runs, whole), trained_groups(runs, resumed)
    ids = [json.loads(group)["id"] for step in sorted(after) for group in after[step]]
    assert ids == [f"guess/{position}" for position in range(8)]
    assert before == after
    assert "rollout/restarted_groups" not in runs.metrics(resumed)[-1]


def test_recorded_episodes_are_replayed(runs: AgenticRuns) -> None:
    recorded = runs.ok(runs.config(exp_name="recorded", record_rollouts=True, adv_estimator="gigpo"))
    replayed = runs.config(exp_name="replayed", replay_rollouts=str(recorded.run_dir.path), adv_estimator="gigpo")
    first, second = (runs.metrics(result)[-1] for result in (recorded, runs.ok(replayed)))
    for name in ("actor/grad_norm", "score/mean", "env/guess/turns/mean", "env/guess/valid"):
        assert first[name] == pytest.approx(second[name])


def test_evaluation_equals_the_validation_of_a_run(runs: AgenticRuns) -> None:
    manager = {"group_size": 2, "num_env_groups": 1, "generating_args": {"temperature": 1.0}}
    config = runs.config(max_steps=1, eval_steps=1, val_batch_size=6, val_env_manager=manager)
    trained = runs.ok(config)
    before, after = (scores(line) for line in runs.metrics(trained))
    shared = {key: value for key, value in config.items() if key in EvaluateEpisodesConfig.model_fields}
    shared |= {"pipeline": "evaluate_agentic", "exp_name": "evaluated", "save_steps": 1, "eval_steps": 1}
    model = {"random_init": config["actor_train"]["model_args"]["random_init"]}
    engine = {"data_args": {"template": "plain"}, "model_args": {"dtype": "fp32", **model}}
    alone = shared | {"max_steps": None, "actor_infer": config["actor_infer"] | engine}
    *_, last = lines = runs.metrics(runs.ok(alone))
    assert len(lines) == 3  # 3 groups, one after the other
    assert scores(last) == before
    assert 1 <= last["env/guess/turns/mean"] <= 3
    # With the config of the run, which names no template: the export has it.
    assert main(["eval", str(trained.run_dir.export), str(runs.folder / "agentic.yaml")]) == 0
    page = runs.folder / "output/agentic-eval/001/metrics.jsonl"
    exported = json.loads(page.read_text(encoding="utf-8").splitlines()[-1])
    assert scores(exported) == after


def scores(line: dict[str, float]) -> dict[str, float]:
    """Metrics of an evaluation without those of episodes."""
    return {name: value for name, value in line.items() if re.match("val/(?!env|rollout)", name)}
