"""Runs whose prompts a sampler chooses: resume, and a sampler in the working directory."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_testing.errors import raises_error


@pytest.fixture
def curriculum(local_runs):
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]*class Hardest.*?)```", page, flags=re.DOTALL)
    (local_runs.folder / "curriculumsampler.py").write_text(code, encoding="utf-8")

    def config(**keys):
        filtered = {"type": "std_filter", "filter_args": {"std_threshold": 0.0}}
        reward = {"reward": "function", "function": "rollrewards:share_of_digits", "query_filter_config": filtered}
        return local_runs.rlvr(max_steps=4, save_steps=2, rewards={"digits": reward}, **keys)

    return config


def prompts(result):
    rows = map(json.loads, result.run_dir.samples.read_text(encoding="utf-8").splitlines())
    return [(row["step"], row["group"]) for row in rows if row["split"] == "train"]


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt_sampler": "pass_rate", "prompt_sampler_options": {"low": 0.5, "revisit": 0.3}},
        {"prompt_sampler": "curriculumsampler:Hardest", "prompt_sampler_options": {"penalty": 0.5}},
    ],
)
def test_resumed_sampler_continues_with_the_same_prompts(local_runs, curriculum, keys):
    whole = local_runs.ok(curriculum(exp_name="whole", **keys))
    checkpoint = str(whole.run_dir.checkpoints / "step-2")
    resumed = local_runs.ok(curriculum(exp_name="resumed", resume_from_checkpoint=checkpoint, **keys))
    assert prompts(resumed) == prompts(whole)
    one, other = (load_file(run.run_dir.export / "model.safetensors") for run in (whole, resumed))
    assert all((one[name] == other[name]).all() for name in one)


def test_groups_ahead_of_a_checkpoint_keep_their_prompts(local_runs, curriculum):
    engine = local_runs.rlvr()["actor_infer"] | {"device_mapping": [1]}
    keys = {"prompt_sampler": "pass_rate", "async_generation_ratio": 1, "actor_infer": engine}
    config = curriculum(exp_name="whole", **keys)
    config["rewards"]["digits"].pop("query_filter_config")
    whole = local_runs.ok(config)
    checkpoint = str(whole.run_dir.checkpoints / "step-2")
    resumed = local_runs.ok(config | {"exp_name": "resumed", "resume_from_checkpoint": checkpoint})
    first, second = ([group for step, group in prompts(run) if step == 3] for run in (whole, resumed))
    assert second == first != []
    assert len(set(prompts(resumed))) == len({group for _, group in prompts(resumed)})  # no id in two steps


def test_replay_of_a_run_with_a_sampler(local_runs, curriculum):
    keys = {"prompt_sampler": "pass_rate"}
    first = local_runs.ok(curriculum(exp_name="first", record_rollouts=True, **keys))
    replayed = local_runs.ok(curriculum(exp_name="replayed", replay_rollouts=str(first.run_dir.path), **keys))
    assert prompts(replayed) == prompts(first)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"prompt_sampler": "pass_rat"}, "prompt_sampler"),
        ({"prompt_sampler": "curriculumsampler:Missing"}, "prompt_sampler"),
        ({"prompt_sampler": "curriculumsampler:PromptSampler.start"}, "prompt_sampler"),
        ({"prompt_sampler_options": {"low": 0.5}}, "prompt_sampler_options"),
        ({"prompt_sampler": "pass_rate", "prompt_sampler_options": {"low": 1.0}}, "prompt_sampler_options"),
        (
            {"prompt_sampler": "curriculumsampler:Hardest", "prompt_sampler_options": {"penalti": 1}},
            "prompt_sampler_options.penalti",
        ),
    ],
)
def test_mistakes_of_samplers_are_located(local_runs, curriculum, keys, key):
    with raises_error(ConfigError) as raised:
        load(curriculum(**keys), [], local_runs.registry)
    assert [problem.key for problem in raised.value.problems] == [key]


def test_a_schedule_changes_the_domains_of_batches(local_runs, curriculum):
    config = curriculum(exp_name="mixed", num_return_sequences_in_group=2)
    data = config["actor_train"]["data_args"]
    data["columns"] = {"tag": "{{ 'low' if prompt < '5' else 'high' }}"}
    data["domain_interleave_schedule"] = {0: {"low": 1}, 3: {"high": 1}}
    config["rewards"]["digits"].pop("query_filter_config")
    result = local_runs.ok(config)
    rows = map(json.loads, result.run_dir.samples.read_text(encoding="utf-8").splitlines())
    tags = {(row["step"], row["group"]): row["tag"] for row in rows}
    shares = [sum(tag == "low" for (at, _), tag in tags.items() if at == step) for step in range(1, 5)]
    assert shares == [4, 3, 1, 0]  # of 4 prompts: 4, 2⅔, 1⅓, 0
    data["domain_interleave_probs"] = {"low": 1}
    with raises_error(ConfigError, "domain_interleave_schedule"):
        load(config, [], local_runs.registry)
