"""Runs that train on what another run generated, without an engine: every number is the same."""

import pytest
import torch
from safetensors.torch import load_file

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_testing.errors import mentions, raises_error

STD_FILTER = {"type": "std_filter", "filter_args": {"std_threshold": 0.45}}
CORRECTION = {"is_weight": {"enabled": True, "upper_bound": 1.05}, "filters": [{"enabled": True, "ratio_low": 0.9}]}


def recipes(runs, name):
    if name == "sync":
        judge = {"reward": "function", "function": "rollrewards:share_of_digits", "query_filter_config": STD_FILTER}
        return runs.rlvr(ppo_epochs=2, rewards={"digits": judge})
    config = runs.rlvr(num_gpus_per_node=2, async_generation_ratio=1.0, max_steps=4, train_infer_correction=CORRECTION)
    config["actor_infer"]["device_mapping"] = [1]
    return config | ({"adv_estimator": "remax"} if name == "remax" else {})


def replaying(config, recorded, **given):
    return config | {"exp_name": "replay", "replay_rollouts": str(recorded.run_dir.path)} | given


def trained(runs, result):
    """Metrics, less those of an engine that is not there."""
    return [
        {name: value for name, value in line.items() if not name.startswith("weight_sync/")}
        for line in runs.timeless(result)
    ]


def assert_equal(runs, one, other):
    assert trained(runs, one) == trained(runs, other)
    ours = load_file(one.run_dir.export / "model.safetensors")
    theirs = load_file(other.run_dir.export / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def refuse_engines(monkeypatch):
    from roll_infer_hf.engine import HFInferStrategy
    from roll_rewards.function import FunctionReward

    async def refuse(self, *given):
        raise AssertionError("an engine was started")

    def refuse_judge(self):
        raise AssertionError("a judge was started")

    monkeypatch.setattr(HFInferStrategy, "start", refuse)
    monkeypatch.setattr(FunctionReward, "start", refuse_judge)


@pytest.mark.parametrize("name", ["sync", "async", "remax"])
def test_replay_has_equal_losses_bit_for_bit_without_engine(runs, monkeypatch, name):
    config = recipes(runs, name)
    recorded = runs.ok(config | {"record_rollouts": True})
    refuse_engines(monkeypatch)
    replayed = runs.ok(replaying(config, recorded))
    assert_equal(runs, recorded, replayed)
    assert not (replayed.run_dir.path / "rollouts").exists()
    assert all(line["actor/grad_norm"] > 0 for line in runs.metrics(replayed))
    if name != "sync":
        assert max(line["rollout/staleness/max"] for line in runs.metrics(replayed)) == 1
    assert all(("baseline/score/mean" in line) == (name == "remax") for line in runs.metrics(replayed))


def test_a_resumed_run_records_on_and_a_replay_can_be_resumed(local_runs):
    config = local_runs.rlvr(max_steps=4)
    local_runs.ok(config | {"record_rollouts": True, "save_steps": 2}, "max_steps=2")
    recorded = local_runs.ok(config | {"record_rollouts": True, "resume_from_checkpoint": True})
    assert sorted(path.name for path in (recorded.run_dir.path / "rollouts").iterdir()) == [
        f"step-{step}.jsonl" for step in (1, 2, 3, 4)
    ]
    whole = local_runs.ok(replaying(config, recorded, save_steps=2))
    rest = local_runs.ok(replaying(config, recorded, resume_from_checkpoint=str(whole.run_dir.checkpoints / "step-2")))
    assert_equal(local_runs, whole, rest)
    checkpoint = str(whole.run_dir.checkpoints / "step-2")
    generating = local_runs.run(config | {"exp_name": "on", "resume_from_checkpoint": checkpoint})
    assert mentions(str(generating.error), "replayed")


def test_replay_may_change_the_loss_but_not_prompts_or_versions(local_runs):
    """That is what it is for: the same answers, another algorithm."""
    config = local_runs.rlvr(max_steps=2)
    recorded = local_runs.ok(config | {"record_rollouts": True})
    replayed = local_runs.ok(replaying(config, recorded, pg_clip=0.01, guards={"logprob_gap": "off"}))
    names = ("score/mean", "response_length/mean", "reward/failures")
    for one, other in zip(local_runs.metrics(recorded), local_runs.metrics(replayed), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
    longer = local_runs.run(replaying(config, recorded, ppo_epochs=2))
    assert "step 2" in str(longer.error)
    assert mentions(str(longer.error), "2", "4")
    assert longer.steps_done == 1
    elsewhere = local_runs.run(replaying(config, recorded, seed=4))
    assert mentions(str(elsewhere.error), "tokenizer", "seed")
    assert elsewhere.error.exit_code == 2


def test_invalid_replays_are_refused_by_check(local_runs):
    config = local_runs.rlvr(max_steps=2)
    recorded = local_runs.ok(config | {"record_rollouts": True})
    validation = {"data_args": {"file_name": str(local_runs.folder / "val.jsonl")}}
    for given, facts in [
        ({"max_steps": 3}, ("1–2", "step 3")),
        ({"num_return_sequences_in_group": 2}, ("num_return_sequences_in_group 4", "2")),
        ({"record_rollouts": True}, ("record_rollouts", "replay_rollouts")),
        ({"validation": validation, "eval_steps": 1}, ("validation", "eval_steps")),
        ({"replay_rollouts": str(local_runs.folder)}, (local_runs.folder,)),
    ]:
        with raises_error(ConfigError, *facts):
            load(replaying(config, recorded, **given), [], local_runs.registry, FileCheck())
    by_link = replaying(config, recorded) | {"exp_name": "rlvr", "replay_rollouts": "output/rlvr/latest"}
    assert_equal(local_runs, recorded, local_runs.ok(by_link))
