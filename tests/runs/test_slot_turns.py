"""Whole runs of roles that share slots: who moves what away before whose turn, and that nothing else changes."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.types import GenerateRequest, SamplingParams
from roll_testing.errors import mentions, raises_error

PLUGIN = Path(__file__).parent / "recording.py"
ALL = "grads+optimizer+weights"


@pytest.fixture
def site(install):
    """The recording strategies, installed."""
    return install(PLUGIN)


def recorded(runs, **given):
    """A config of the rlvr pipeline with a reference, all on slot 0."""
    runs.registry = load_registry()
    strategy_config = {"journal": str(runs.folder / "journal.txt")}
    reference = {
        "strategy_args": {"strategy_name": "recording_infer", "strategy_config": strategy_config},
        "model_args": {"dtype": "fp32"},
        "device_mapping": [0],
    }
    config = runs.rlvr(**{"max_steps": 2, "use_kl_loss": True, "reference": reference} | given)
    config["actor_train"]["strategy_args"] = reference["strategy_args"] | {"strategy_name": "recording_train"}
    config["actor_infer"]["strategy_args"] = reference["strategy_args"] | {"strategy_name": "recording_engine"}
    # The probe would score and generate between publish and rollout.
    return config | {"guards": {"logprob_probe": "off"}, "platform": "board"}


def journal(runs):
    """What was asked, in order, each line once where it was said several times in a row."""
    lines = (runs.folder / "journal.txt").read_text(encoding="utf-8").splitlines()
    return [line for line, _ in itertools.groupby(lines)]


def moves(runs):
    return [line for line in journal(runs) if any(word in line for word in ("loads ", "sleeps", "wakes"))]


def test_colocated_roles_take_turns(site, runs):
    result = runs.ok(recorded(runs))
    # In one process the engine works with the trainer's own weights, elsewhere with a copy.
    shared = runs.executor == "local"
    step = [
        "actor_infer wakes",
        "actor_infer is updated",
        *([] if shared else ["actor_train offloads weights"]),
        "actor_infer generates",
        "actor_infer sleeps",
        *([] if shared else ["actor_train onloads weights"]),
        "actor_train scores",
        "actor_train offloads weights",
        "reference onloads weights",
        "reference scores",
        "reference offloads weights",
        f"actor_train onloads {ALL}",
        "actor_train trains",
    ]
    # An export and the update that takes it begin side by side.
    assert [line for line in journal(runs) if line != "actor_train exports"] == [
        f"actor_train offloads {ALL}",  # while the engine starts
        "actor_infer sleeps",  # while the reference starts
        "reference offloads weights",
        "actor_train onloads weights",
        *step,
        "actor_train offloads grads+optimizer",
        *step,
        "actor_train exports a model",
    ]
    times = runs.metrics(result)[-1]
    assert times["time/offload"] > 0
    assert times["time/onload"] > 0


def test_roles_that_share_some_slots_take_turns_as_wholes(site, ray_runs):
    """The trainer's two ranks make room for an engine that sits beside one of them; the reference has its own slot."""
    config = recorded(ray_runs, max_steps=1)
    config["actor_train"]["device_mapping"] = [0, 1]
    config["actor_infer"]["device_mapping"] = [1]
    config["reference"]["device_mapping"] = [2]
    ray_runs.ok(config)
    assert moves(ray_runs) == [
        f"actor_train offloads {ALL}",  # while the engine starts
        "actor_train onloads weights",
        "actor_train offloads weights",
        "actor_infer sleeps",
        f"actor_train onloads {ALL}",  # a batch is one step of two ranks, before which the policy is not scored
    ]


def test_nothing_moves_where_the_slots_are_others(site, local_runs):
    config = recorded(local_runs)
    config["actor_infer"]["device_mapping"] = [1]
    config["reference"]["device_mapping"] = [2]
    result = local_runs.ok(config)
    assert moves(local_runs) == []
    assert "time/offload" not in local_runs.metrics(result)[-1]


def test_nothing_moves_where_it_is_switched_off(site, local_runs):
    local_runs.ok(recorded(local_runs, is_offload_states=False))
    assert moves(local_runs) == []


def test_offload_is_configurable_by_role(site, local_runs):
    config = recorded(local_runs, is_offload_states=False)
    config["reference"]["is_offload_states"] = True
    local_runs.ok(config)
    assert set(moves(local_runs)) == {"reference offloads weights", "reference onloads weights"}


def test_without_device_memory_only_engines_release_memory(site, local_runs):
    local_runs.ok(recorded(local_runs) | {"platform": "cpu"})
    assert set(moves(local_runs)) == {"actor_infer sleeps", "actor_infer wakes"}


def test_role_without_offload_is_not_offloaded(site, local_runs):
    config = recorded(local_runs)
    config["actor_train"]["strategy_args"]["strategy_name"] = "still_train"
    local_runs.ok(config)
    assert not [line for line in moves(local_runs) if line.startswith("actor_train")]
    config["actor_train"]["is_offload_states"] = True
    with raises_error(ConfigError, "still_train"):
        local_runs.run(config)


@pytest.mark.parametrize("settings", [{}, {"eval_steps": 1}])
def test_taking_turns_changes_no_number(site, local_runs, settings):
    held_out = {"data_args": {"file_name": str(local_runs.folder / "val.jsonl"), "max_samples": 8}}
    config = recorded(local_runs, validation=held_out, **settings)
    taking = local_runs.timeless(local_runs.ok(config))
    staying = local_runs.timeless(local_runs.ok(config, "is_offload_states=false"))
    drop = ("weight_sync/",)  # an engine that slept is updated again for the version that it had

    def comparable(lines):
        return [{name: value for name, value in line.items() if not name.startswith(drop)} for line in lines]

    assert comparable(taking) == comparable(staying)


def test_a_resumed_run_that_takes_turns_continues_exactly(site, local_runs):
    whole = local_runs.ok(recorded(local_runs, save_steps=1))
    after_one = whole.run_dir.checkpoints / "step-1"
    resumed = local_runs.ok(recorded(local_runs, resume_from_checkpoint=str(after_one)))
    assert [line["step"] for line in local_runs.timeless(resumed)] == [1, 2]
    assert local_runs.timeless(resumed) == local_runs.timeless(whole)
    assert "actor_train loads" in journal(local_runs)


def test_error_during_a_slot_turn_ends_the_run_with_its_cause(site, local_runs):
    config = recorded(local_runs, rewards={"digits": {"reward": "function", "function": "rollrewards:broken"}})
    result = local_runs.run(config)
    assert result.outcome == "failed"
    assert mentions(str(result.error), "judge")


def test_sigterm_saves_while_other_roles_use_the_slots(site, local_runs, monkeypatch):
    from roll_core.pipelines.stages import ScorePolicy

    score = ScorePolicy.__call__

    async def told_to_end(self, run, experience):
        found = await score(self, run, experience)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(ScorePolicy, "__call__", told_to_end)
    result = local_runs.run(recorded(local_runs, max_steps=5, save_steps=100))
    assert result.steps_done == 1
    assert mentions(str(result.error), "step 1")
    assert journal(local_runs)[-1] == "actor_train saves"


def test_abandoned_requests_end_before_the_engine_sleeps(site, local_runs, monkeypatch):
    """As after an evaluation that was called off: its answers are still being drawn."""
    from roll_core.runtime.run.roles import GroupInferRole

    offload, left = GroupInferRole.offload, []

    async def leave_some_behind(self, parts):
        params = SamplingParams(max_new_tokens=64, ignore_eos=True)
        extra = [
            GenerateRequest(id=f"left/{len(left)}/{n}", prompt_ids=np.array([1, 2, 3]), params=params) for n in range(4)
        ]
        await WorkerCall(self.group, "submit").all(extra)
        left.append(extra)
        await offload(self, parts)

    monkeypatch.setattr(GroupInferRole, "offload", leave_some_behind)
    result = local_runs.ok(recorded(local_runs))
    assert result.steps_done == 2
    assert journal(local_runs).count("actor_infer sleeps") == len(left) == 3


def test_reward_model_is_loaded_together_with_the_engine(site, local_runs):
    """Both stay for the rollout; neither is there while the others work."""
    config = recorded(local_runs, max_steps=1)
    reward = dict(config["reference"], reward="model")
    reward["model_args"] = {"dtype": "fp32", "random_init": config["actor_train"]["model_args"]["random_init"]}
    local_runs.ok(config | {"rewards": {"style": reward}})
    lines = journal(local_runs)
    begin, end = lines.index("actor_infer generates"), len(lines) - lines[::-1].index("actor_infer sleeps")
    during = [line for line in lines[begin:end] if "actor_train" not in line]
    assert during == [
        "actor_infer generates",
        "rewards.style scores",
        "actor_infer sleeps",
    ]
    assert "rewards.style onloads weights" in lines[:begin]
    assert "rewards.style offloads weights" in lines[end - 1 :]
