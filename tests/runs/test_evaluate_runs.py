"""Runs of `pipeline: evaluate`: the numbers of a validation, resume, small and broken data."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import yaml

from roll_core.cli.main import main
from roll_core.config import load
from roll_core.errors import CheckpointError, CheckpointMismatchError, ConfigError, DataError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.run.loop import execute
from roll_testing.errors import raises_error
from roll_testing.runs import TINY
from roll_tools.evaluation import evaluations, score_differences

REWARD = '''
import math

from roll_core.types import Reward


def counted(prompt, response, **row):
    """1 for a first digit that is in the prompt; notes each call."""
    with open(__file__ + ".calls", "a") as calls:
        calls.write(prompt + "\\n")
    return Reward(value=float(response[:1] in prompt[:3]), detail={"answer": response[:1]})


def equal(prompt, response, **row):
    return 0.5


def broken(prompt, response, **row):
    return math.nan
'''


@pytest.fixture
def evaluation(local_runs):
    """Makes the config of an evaluation of a model with random weights."""
    (local_runs.folder / "evaluaterewards.py").write_text(REWARD, encoding="utf-8")

    def config(**keys):
        rewards = {"digits": {"reward": "function", "function": "evaluaterewards:counted"}}
        return local_runs.base("evaluate") | {
            "eval_steps": 1, "save_steps": 1, "val_batch_size": 8, "rewards": rewards,
            "actor_infer": {"model_args": {"dtype": "fp32", "random_init": TINY},
                            "strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]},
            "validation": {"data_args": {"file_name": str(local_runs.folder / "val.jsonl")},
                           "generating_args": {"num_return_sequences": 4}},
        } | keys  # fmt: skip

    return config


def scores(line):
    return {name: value for name, value in line.items() if name.startswith("val/")}


def calls(runs):
    path = runs.folder / "evaluaterewards.py.calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


class EndsInStep3:
    def roll_step_finished(self, run, step, metrics):
        if step == 3:
            raise RuntimeError("killed")


def test_numbers_equal_those_of_a_validation(local_runs, evaluation):
    config = evaluation()
    shared = {key: config[key] for key in ("validation", "rewards", "val_batch_size")}
    trained = local_runs.ok(local_runs.rlvr(max_steps=1, eval_steps=1, **shared))
    before, after = local_runs.metrics(trained)
    first = local_runs.metrics(local_runs.ok(config))
    assert len(first) == 4  # 32 prompts in batches of 8
    assert scores(first[-1]) == scores(before)
    config["actor_infer"]["model_args"].pop("random_init")
    exported = config | {"pretrain": str(trained.run_dir.export), "tokenizer": None}
    result = local_runs.ok(exported)
    assert scores(local_runs.metrics(result)[-1]) == scores(after)
    pairs = score_differences({"validation": trained.run_dir, "evaluation": result.run_dir})
    assert {cell for _, cells in pairs.rows for cell in cells} == {"+0 [+0, +0] of 32 prompts"}


def test_resumed_evaluation_equals_an_uninterrupted_one(local_runs, evaluation):
    whole = local_runs.ok(evaluation(exp_name="whole"))
    num_whole = len(calls(local_runs))
    assert num_whole == 32 * 4
    loaded = load(evaluation(exp_name="half"), [], local_runs.registry)
    killed = execute(loaded, local_runs.registry, callbacks=[EndsInStep3()])
    assert isinstance(killed.error, RuntimeError)
    with killed.run_dir.scores.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 4, "responses": [{"prompt"')  # killed while it wrote the next step
    resumed = local_runs.ok(evaluation(exp_name="half", resume_from_checkpoint=True))
    assert scores(local_runs.metrics(resumed)[-1]) == scores(local_runs.metrics(whole)[-1])
    assert local_runs.timeless(resumed) == local_runs.timeless(whole)
    # Only the batch of step 3 is generated and scored twice, and recorded once.
    assert len(calls(local_runs)) == num_whole + 5 * 8 * 4
    assert len(read_lines(resumed.run_dir.samples)) == num_whole
    assert resumed.run_dir.scores.read_bytes() == whole.run_dir.scores.read_bytes()
    assert [row["step"] for row in read_lines(whole.run_dir.scores)] == [1, 2, 3, 4]


def test_checkpoints_do_not_grow_with_the_scores(local_runs, evaluation):
    result = local_runs.ok(evaluation(max_ckpt_to_keep=0))
    states = [path / "state.json" for path in result.run_dir.checkpoints.glob("step-*")]
    sizes = [path.stat().st_size for path in states]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 10


@pytest.mark.parametrize("lost", ["file", "step"])
def test_resume_without_the_scores_is_a_located_error(lost, local_runs, evaluation):
    result = local_runs.ok(evaluation(max_steps=3))
    lines = result.run_dir.scores.read_text(encoding="utf-8").splitlines(keepends=True)
    result.run_dir.scores.write_text("".join([] if lost == "file" else lines[1:]), encoding="utf-8")
    with raises_error(CheckpointError, "scores.jsonl"):
        local_runs.ok(evaluation(resume_from_checkpoint=True))


def test_resume_refuses_scores_of_other_settings(local_runs, evaluation):
    local_runs.ok(evaluation(max_steps=1))
    with raises_error(CheckpointMismatchError, "seed"):
        local_runs.ok(evaluation(seed=4, resume_from_checkpoint=True))


def test_samples_have_every_response(local_runs, evaluation):
    result = local_runs.ok(evaluation())
    rows = [json.loads(line) for line in result.run_dir.samples.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 32 * 4


def test_intervals_of_equal_scores_and_of_one_row(local_runs, evaluation):
    rewards = {"digits": {"reward": "function", "function": "evaluaterewards:equal"}}
    (line,) = local_runs.metrics(local_runs.ok(evaluation(rewards=rewards, val_batch_size=32)))
    assert [line[f"val/score/{name}"] for name in ("mean", "ci_low", "ci_high")] == [0.5, 0.5, 0.5]
    assert (line["val/pass@4"], line["val/best@4"]) == (0, 0.5)
    config = evaluation()
    config["validation"]["data_args"]["max_samples"] = 1
    (line,) = local_runs.metrics(local_runs.ok(config))
    assert line["val/num_samples"] == 4
    assert "val/score/ci_low" not in line


def test_empty_file_and_nan_rewards_are_located_errors(local_runs, evaluation):
    config = evaluation()
    (local_runs.folder / "empty.jsonl").write_text("", encoding="utf-8")
    config["validation"]["data_args"] = {"file_name": str(local_runs.folder / "empty.jsonl")}
    with raises_error(DataError, "empty.jsonl"):
        local_runs.ok(config)
    rewards = {"digits": {"reward": "function", "function": "evaluaterewards:broken"}}
    result = local_runs.run(evaluation(rewards=rewards))
    assert "evaluaterewards:broken" in str(result.error)


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"rewards": {}}, "rewards"), ({"validation": {"data_args": {}}}, "file_name"), ({"eval_steps": 0}, "eval_steps")],
)
def test_incomplete_configs_are_refused(local_runs, evaluation, changed, key):
    with raises_error(ConfigError, key):
        load(evaluation(**changed), [], local_runs.registry)


def test_sampling_parameters_of_rollouts_are_refused(local_runs, evaluation):
    config = evaluation()
    config["actor_infer"]["generating_args"] = {"temperature": 0.5}
    with raises_error(ConfigError, "validation.generating_args"):
        load(config, [], local_runs.registry)


def test_command_compares_a_run_its_checkpoint_and_a_directory(local_runs, evaluation):
    shared = {key: evaluation()[key] for key in ("validation", "rewards")}
    config = local_runs.rlvr(max_steps=2, save_steps=1, portable_checkpoints=True, **shared)
    trained = local_runs.ok(config).run_dir
    path = local_runs.folder / "rlvr.yaml"  # the config of the training run itself
    first = trained.checkpoints / "step-1"
    models = [str(trained.path), str(first), str(trained.export)]
    assert main(["eval", *models, str(path), "val_batch_size=16", "-o", "page.html"]) == 0
    output = local_runs.folder / "output"
    experiments = [output / f"rlvr-eval-{name}/001" for name in ("rlvr-001", "checkpoints-step-1", "001-export")]
    of_run, of_checkpoint, of_export = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for run in experiments
    )
    assert len(of_run) == 2  # 32 prompts in batches of 16
    assert scores(of_run[-1]) == scores(of_export[-1]) != scores(of_checkpoint[-1])
    page = (local_runs.folder / "page.html").read_text(encoding="utf-8")
    assert "rlvr-eval-001-export/001 − rlvr-eval-rlvr-001/001" in page
    assert "+0 [+0, +0] of 32 prompts" in page
    report = (experiments[0] / "report.html").read_text(encoding="utf-8")
    assert 'id="scores"' in report


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["a/001/export", "b/001/export"], ["a-001-export", "b-001-export"]),
        (["Qwen/Qwen3-8B", "a/001"], ["Qwen-Qwen3-8B", "a-001"]),
        (["a/001", "a/001"], ["a-001", "a-001"]),
    ],
)
def test_experiments_of_several_models_have_names_apart(models, names, local_runs, evaluation):
    path = local_runs.folder / "evaluate.yaml"
    path.write_text(yaml.safe_dump(evaluation(exp_name="x")), encoding="utf-8")
    found = evaluations(models, path, (), load_registry(), files=False)
    assert [each.config.exp_name for each in found] == [f"x-{name}" for name in names]


@pytest.mark.parametrize("words", [["model"], ["one.yaml", "two.yaml", "model"], ["one.yaml"]])
def test_command_needs_models_and_one_config(words, local_runs):
    for name in ("one.yaml", "two.yaml"):
        (local_runs.folder / name).write_text("pipeline: evaluate\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["eval", *words])
    assert ended.value.code == 2


def test_command_reports_a_missing_model(local_runs, evaluation, capfd):
    path = local_runs.folder / "evaluate.yaml"
    path.write_text(yaml.safe_dump(evaluation()), encoding="utf-8")
    assert main(["eval", "./output/nothing", str(path)]) == 2
    assert "output/nothing" in capfd.readouterr().err


def test_command_refuses_pipelines_without_an_evaluation(local_runs, capfd):
    path = local_runs.folder / "preference.yaml"
    path.write_text(yaml.safe_dump(local_runs.preference("reward_model")), encoding="utf-8")
    assert main(["eval", str(local_runs.folder), str(path), "--no-files"]) == 2
    assert "pipeline reward_model trains reward_train" in capfd.readouterr().err
    assert not (local_runs.folder / "output").exists()


def test_filter_writes_rows_in_the_window_of_pass_rates(local_runs, evaluation, capfd):
    evaluation()  # writes the rewards
    config = local_runs.rlvr(num_return_sequences_in_group=8)
    config["rewards"] = {"digits": {"reward": "function", "function": "evaluaterewards:counted"}}
    config["actor_train"]["data_args"]["columns"] = {"ground_truth": "{{ ground_truth }}!"}
    path = local_runs.folder / "rlvr.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    exported = str(local_runs.ok(local_runs.rlvr(max_steps=1, exp_name="model")).run_dir.export)
    words = ["filter", exported, str(path), "val_batch_size=64"]
    assert main([*words, "-o", "all.jsonl", "--all"]) == 0
    assert main([*words, "-o", "some.jsonl"]) == 0
    originals = read_lines(local_runs.folder / "train.jsonl")
    everything, some = (read_lines(local_runs.folder / f"{name}.jsonl") for name in ("all", "some"))
    assert [{**row, "pass_rate": rate} for row, rate in zip(originals, rates_of(everything), strict=True)] == everything
    recorded = read_lines(local_runs.folder / "output" / "rlvr-filter" / "001" / "samples.jsonl")
    rewards = {row["group"]: [r["reward"] for r in recorded if r["group"] == row["group"]] for row in recorded}
    assert rates_of(everything) == [sum(rewards[str(row["id"])]) / 8 for row in originals]
    assert some == [row for row in everything if 0 < row["pass_rate"] < 1]
    assert f"{len(some)} of 64 rows" in capfd.readouterr().out
    few = ["actor_train.data_args.max_samples=3", "num_return_sequences_in_group=2", "exp_name=few"]
    assert main([*words, *few, "-o", "few.parquet", "--all"]) == 0
    assert [row["id"] for row in pq.read_table("few.parquet").to_pylist()] == [row["id"] for row in originals[:3]]
    assert len(read_lines(local_runs.folder / "output" / "few" / "001" / "samples.jsonl")) == 6
    # The file is the data of a run, by its measured difficulty.
    config["actor_train"]["data_args"]["file_name"] = "all.jsonl"
    curriculum = config | {"prompt_sampler": "pass_rate", "prompt_sampler_options": {"low": 0.2, "revisit": 0.0}}
    result = local_runs.ok(curriculum | {"exp_name": "curriculum", "max_steps": 2})
    chosen = {row["group"].split("/")[0] for row in read_lines(result.run_dir.samples)}
    assert chosen <= {str(row["id"]) for row in everything if 0.2 < row["pass_rate"] < 1}


def test_filter_writes_nothing_without_a_row_in_the_window(local_runs, evaluation, capfd):
    path = local_runs.folder / "evaluate.yaml"
    model = evaluation()
    model["actor_infer"]["model_args"].pop("random_init")
    path.write_text(yaml.safe_dump(model), encoding="utf-8")
    exported = str(local_runs.ok(local_runs.rlvr(max_steps=1, exp_name="model")).run_dir.export)
    assert main(["filter", exported, str(path), "-o", "some.jsonl", "--low", "2", "--high", "3"]) == 2
    assert "32 rows" in capfd.readouterr().err
    assert not (local_runs.folder / "some.jsonl").exists()
    for words in (["-o", "evaluate.yaml"], ["-o", "some.jsonl", "--low", "1"]):
        with pytest.raises(SystemExit) as ended:
            main(["filter", exported, str(path), *words])
        assert ended.value.code == 2


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rates_of(rows):
    return [row["pass_rate"] for row in rows]
