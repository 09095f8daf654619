"""Whole runs whose rollouts are more than batch after batch: dynamic sampling, surplus, asynchronous training."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from roll_core.errors import NonFiniteError
from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.runtime.run.roles import GroupInferRole
from roll_infer_hf.core import EngineCore
from roll_infer_hf.engine import HFInferStrategy
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import mentions, raises_error

STD_FILTER = {"type": "std_filter", "filter_args": {"std_threshold": 0.45}}


def judges(**given):
    return {"digits": {"reward": "function", "function": "rollrewards:share_of_digits", **given}}


def asynchronous(runs, ratio=1.0, **given):
    config = runs.rlvr(**({"num_gpus_per_node": 2, "async_generation_ratio": ratio} | given))
    config["actor_infer"]["device_mapping"] = [1]
    return config


def saved(result, step):
    state = json.loads((result.run_dir.checkpoints / f"step-{step}" / "state.json").read_text(encoding="utf-8"))
    return state["pipeline_state"]["rollouts"]


def trained_prompts(runs, result):
    """Ids of the groups of which `samples.jsonl` has samples, by step."""
    found = {}
    for line in result.run_dir.samples.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["split"] == "train":
            found.setdefault(row["step"], []).append(row["group"])
    return found


def trained_tokens(result):
    """What `samples.jsonl` says that was trained on."""
    rows = [json.loads(line) for line in result.run_dir.samples.read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["group"], row["response"]) for row in rows if row["split"] == "train"]


def same_model(one, other):
    ours = load_file(one.run_dir.export / "model.safetensors")
    theirs = load_file(other.run_dir.export / "model.safetensors")
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_dropped_groups_are_replaced_and_resume_bit_for_bit(runs):
    recipe = {"rewards": judges(query_filter_config=STD_FILTER), "max_steps": 4}
    whole = runs.ok(runs.rlvr(exp_name="whole", save_steps=2, **recipe))
    lines = runs.metrics(whole)
    assert sum(line["rollout/left_out_groups"] for line in lines) > 0
    assert all(line["groups/mixed_share"] == 1 for line in lines)
    checkpoint = whole.run_dir.checkpoints / "step-2"
    assert saved(whole, 2)[""]["kept"] == []
    assert saved(whole, 2)[""]["next"] > 8  # 2 × 4 prompts, and those that were left out
    second = runs.ok(runs.rlvr(exp_name="resumed", resume_from_checkpoint=str(checkpoint), **recipe))
    assert runs.timeless(second)[2:] == runs.timeless(whole)[2:]
    assert same_model(whole, second)


def test_filter_that_drops_everything_warns_and_run_continues(local_runs):
    rewards = {"digits": {"reward": "function", "function": "rollrewards:constant", "query_filter_config": STD_FILTER}}
    result = local_runs.ok(local_runs.rlvr(max_steps=2, rewards=rewards, dynamic_sampling_max_tries=2))
    record = json.loads(result.run_dir.record.read_text(encoding="utf-8"))
    assert record["guards"]["counts"] == {"all_groups_filtered": 2}
    assert result.steps_done == 2


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_generation_overlaps_training_within_the_staleness_bound(runs, ratio):
    result = runs.ok(
        asynchronous(
            runs,
            ratio,
            max_steps=5,
            eval_steps=2,
            validation={"data_args": {"file_name": str(runs.folder / "val.jsonl")}},
            guards={"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": 1e-3}},
        )
    )
    lines = [line for line in runs.metrics(result) if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    bound = -(-ratio // 1)
    assert lines[0]["rollout/staleness/max"] == 0
    assert max(line["rollout/staleness/max"] for line in lines) == bound
    assert all(line["rollout/surplus_groups"] == 4 * ratio for line in lines)
    if ratio >= 1:
        assert lines[-1]["rollout/staleness/mean"] >= 1
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    # Weights that an evaluation has brought are not brought again.
    published = [line for line in lines if "weight_sync/version" in line]
    assert [line["weight_sync/version"] for line in published] == [4, 8, 10]
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in published)
    # Older weights than the trainer's: their logprobs differ, and that trips no guard.
    assert max(line["actor/logprob_lag"] for line in lines if "actor/logprob_lag" in line) > 1e-3
    seen = trained_prompts(runs, result)
    assert len({group for groups in seen.values() for group in groups}) > 5


def test_responses_resumed_under_new_weights_trip_no_guard(local_runs, monkeypatch):
    """An engine that halts with answers half drawn until weights come, under which it draws the rest."""
    step, train = EngineCore.step, HFTrainStrategy.optimizer_step
    published, patience = 2, time.monotonic() + 120  # the weights of the first step
    groups, under_way = set(), threading.Event()

    def training(strategy):
        under_way.wait(120)  # or the next batch, too, would begin under those weights
        return train(strategy)

    def halting(core):
        # What older weights began is trained on first: an engine that held it back would wait for ever.
        drawn = [output.versions for each in core.progress() for output in each.outputs]
        begun = any(len(each) >= 2 for each in drawn) and all((each == published).all() for each in drawn)
        if core.version == published and begun and time.monotonic() < patience:
            time.sleep(0.001)
            return []
        found = step(core)
        groups.update(each.id for each in core.progress() if any(len(output.versions) for output in each.outputs))
        if len([each for each in groups if each.startswith("train/")]) == 8:
            under_way.set()
        return found

    monkeypatch.setattr(EngineCore, "step", halting)
    monkeypatch.setattr(HFTrainStrategy, "optimizer_step", training)
    guards = {"logprob_gap": {"action": "error", "threshold": 1e-3}, "logprob_probe": "off"}
    lines = local_runs.metrics(local_runs.ok(asynchronous(local_runs, 1.0, max_steps=4, guards=guards)))
    assert any(line["rollout/mixed_version_share"] > 0 for line in lines)


def test_an_asynchronous_run_resumes_with_the_groups_that_it_had(local_runs):
    first = local_runs.ok(asynchronous(local_runs, 1.0, exp_name="one", max_steps=3, save_steps=3))
    state = saved(first, 3)[""]
    assert state["next"] == 16
    assert [entry["position"] for entry in state["kept"]] == [12, 13, 14, 15]
    checkpoint = str(first.run_dir.checkpoints / "step-3")
    config = asynchronous(local_runs, 1.0, exp_name="two", max_steps=5, resume_from_checkpoint=checkpoint)
    second = local_runs.ok(config)
    lines = local_runs.metrics(second)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["rollout/staleness/max"] <= 1


def test_surplus_prompts_keep_partial_responses_for_next_batch(local_runs):
    recipe = {"is_use_additional_prompts": True, "max_additional_running_prompts": 4, "max_steps": 4, "save_steps": 1}
    whole = local_runs.ok(local_runs.rlvr(**recipe))
    lines = local_runs.metrics(whole)
    assert all(line["rollout/surplus_groups"] == 4 for line in lines)
    assert max(line["rollout/staleness/max"] for line in lines) == 1
    kept = saved(whole, 1)[""]["kept"]
    assert [entry["position"] for entry in kept] == [4, 5, 6, 7]
    assert all(entry["group"] is not None or "calls" in entry for entry in kept)
    checkpoint = str(whole.run_dir.checkpoints / "step-1")
    second = local_runs.ok(local_runs.rlvr(exp_name="second", resume_from_checkpoint=checkpoint, **recipe))
    assert [line["step"] for line in local_runs.metrics(second)] == [1, 2, 3, 4]


def test_corrections_reach_the_loss(local_runs):
    correction = {
        "is_weight": {"enabled": True, "weight_type": "token", "upper_bound": 1.05},
        "filters": [{"enabled": True, "agg_type": "token", "ratio_low": 0.9, "ratio_high": 1.1}],
    }
    lines = local_runs.metrics(
        local_runs.ok(asynchronous(local_runs, 1.0, max_steps=4, train_infer_correction=correction))
    )
    assert lines[0]["correction/weight/mean"] == pytest.approx(1.0, abs=1e-4)
    assert lines[0]["correction/kept_share"] == 1.0
    assert min(line["correction/kept_share"] for line in lines) < 1.0
    assert max(line["correction/bounded_share"] for line in lines) > 0


@pytest.mark.parametrize(("router", "computed"), [("least_loaded", 2), ("prompt_affinity", 1)])
def test_separate_sibling_requests_share_the_prompt_if_colocated(local_runs, router, computed):
    """Four groups of four answers on two replicas; a prompt has four tokens and is computed on each that is asked."""
    config = local_runs.rlvr(
        max_steps=1,
        max_running_requests=16,
        router_args={"router_name": router},
        guards={"logprob_probe": "off"},
    )
    config["actor_infer"] |= {"device_mapping": [0, 1]}
    (line,) = local_runs.metrics(local_runs.ok(config))
    assert line["engine/actor_infer/prompt_tokens"] == 4 * 4 * computed
    assert line["engine/actor_infer/shared_prompt_tokens"] == 4 * 4 * (4 - computed)


@pytest.mark.parametrize(("seeded", "repeats"), [("auto", True), (False, False)])
def test_seeded_runs_repeat_and_unseeded_samples_differ(local_runs, seeded, repeats):
    """All groups are of one row, asked at the same place in line of two replicas."""
    (row, *_) = (local_runs.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    (local_runs.folder / "one.jsonl").write_text(row, encoding="utf-8")
    config = local_runs.rlvr(max_steps=1, seeded_rollouts=seeded, guards={"logprob_probe": "off"})
    config["actor_train"]["data_args"] = {"file_name": str(local_runs.folder / "one.jsonl")}
    config["actor_infer"] |= {"device_mapping": [0, 1]}
    config |= {"validation": {"data_args": {"file_name": str(local_runs.folder / "val.jsonl")}}, "eval_steps": 1}

    def drawn(split):
        lines = (result.run_dir.path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        found = {}
        for line in map(json.loads, lines):
            if line["split"] == split and line["step"] <= 1:
                found.setdefault((line["step"], line["group"]), []).append(line["response"])
        return found

    runs, held_out = [], []
    for _ in range(2):
        result = local_runs.ok(config)
        runs.append(drawn("train"))
        held_out.append({key: texts for key, texts in drawn("val").items() if key[0] == 0})
    first, second = runs[0].values()
    assert len(set(first)) > 1
    assert first != second
    assert (runs[0] == runs[1]) == repeats
    assert held_out[0] == held_out[1] != {}


def test_an_engine_without_seeds_gets_none(local_runs, monkeypatch):
    """Neither from the probe, nor from rollouts and validation."""
    seeds, generate, init = [], HFInferStrategy.generate, GroupInferRole.__init__

    def recorded(self, request):
        seeds.append((request.id.split()[0], request.params.seed))
        return generate(self, request)

    def without_seeds(self, *arguments, **given):
        init(self, *arguments, **given)
        self.capabilities = replace(self.capabilities, seeds=False, free_seeds=False)

    monkeypatch.setattr(HFInferStrategy, "generate", recorded)
    monkeypatch.setattr(GroupInferRole, "__init__", without_seeds)
    held_out = {"data_args": {"file_name": str(local_runs.folder / "val.jsonl")}}
    local_runs.ok(local_runs.rlvr(max_steps=1, eval_steps=1, validation=held_out))
    assert {seed for _, seed in seeds} == {None}
    assert "probe" in {of for of, _ in seeds}


def test_failed_background_worker_ends_the_run_with_its_error(local_runs, monkeypatch):
    step = EngineCore.step

    def broken(self):
        if self.version >= 2:
            raise NonFiniteError("the engine is out")
        return step(self)

    monkeypatch.setattr(EngineCore, "step", broken)
    result = local_runs.run(asynchronous(local_runs, 1.0, max_steps=6))
    assert result.outcome == "failed"
    assert mentions(str(result.error), "engine")


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"async_generation_ratio": 1}, ("actor_train", "slot 0")),
        ({"async_generation_ratio": 0.1}, ("async_generation_ratio", "0.1", "rollout_batch_size", "4", "0.4")),
        (
            {"async_generation_ratio": 1, "is_use_additional_prompts": True},
            ("is_use_additional_prompts",),
        ),
        ({"take_first_ready": True}, ("0",)),
        (
            {"take_first_ready": True, "is_use_additional_prompts": True, "max_additional_running_prompts": 4},
            ("1",),
        ),
        (
            {
                "force_disable_old_logprobs_recompute": True,
                "train_infer_correction": {"is_weight": {"enabled": True}},
            },
            (),
        ),
    ],
)
def test_invalid_combinations_are_refused_before_the_start(local_runs, given, facts):
    from roll_core.errors import ConfigError

    with raises_error(ConfigError, *facts):
        local_runs.run(local_runs.rlvr(**given))


def test_killed_replica_is_replaced_and_no_response_is_lost(ray_runs, monkeypatch):
    """Its answers are drawn to their end by the other one, and from the next weights on there are two again."""
    runs, step = ray_runs, RLVRPipeline.step

    async def step_with_an_accident(self, run):
        if run.step == 3:
            os.kill(run.infer_role("actor_infer").group.members[1].pid, signal.SIGKILL)
        await step(self, run)

    monkeypatch.setattr(RLVRPipeline, "step", step_with_an_accident)
    config = asynchronous(runs, 1.0, max_steps=8, num_gpus_per_node=4, response_length=48)
    config["actor_infer"]["device_mapping"] = [1, 2]
    result = runs.ok(config)
    lines = runs.metrics(result)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["rollout/lost_replicas"] == 1
    assert all(line["tokens/generated"] > 0 for line in lines)
    assert max(line["rollout/staleness/max"] for line in lines) <= 1
    log = result.run_dir.log.read_text(encoding="utf-8")
    assert "actor_infer rank 1" in log
    assert re.search(r"actor_infer rank 1: .*\(pid \d+\)", log)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow(ci=True)), 2])
def test_run_continues_after_all_replicas_are_killed(ray_runs, monkeypatch, replicas):
    """They are killed while they draw, and brought back with the weights that they had."""
    runs, step = ray_runs, RLVRPipeline.step

    def config(name):
        made = runs.rlvr(exp_name=name, max_steps=4, num_gpus_per_node=replicas, response_length=40)
        made["actor_infer"]["device_mapping"] = list(range(replicas))
        return made

    whole = runs.ok(config("whole"))

    async def kill_while_they_draw(run):
        engine = run.infer_role("actor_infer")
        while engine.queue.num_running < 4 * 4:
            await asyncio.sleep(0)
        for member in engine.group.members:
            os.kill(member.pid, signal.SIGKILL)

    async def step_with_an_accident(self, run):
        if run.step != 2:
            await step(self, run)
            return
        await asyncio.gather(step(self, run), kill_while_they_draw(run))

    monkeypatch.setattr(RLVRPipeline, "step", step_with_an_accident)
    result = runs.ok(config("killed"))
    assert runs.metrics(result)[-1]["rollout/lost_replicas"] == replicas
    assert trained_tokens(result) == trained_tokens(whole)
    log = result.run_dir.log.read_text(encoding="utf-8")
    assert re.search(r"actor_infer rank 0: .*\(pid \d+\)", log)
    assert json.loads(result.run_dir.record.read_text(encoding="utf-8"))["guards"]["counts"] == {}


def test_engine_killed_between_batches_is_restarted_for_the_next(ray_runs, monkeypatch):
    """Ahead of training its requests wait for the next publish; an evaluation finds it whole."""
    runs, step = ray_runs, RLVRPipeline.step

    async def step_with_an_accident(self, run):
        await step(self, run)
        if run.step in (1, 4):
            os.kill(run.infer_role("actor_infer").group.members[0].pid, signal.SIGKILL)

    monkeypatch.setattr(RLVRPipeline, "step", step_with_an_accident)
    config = asynchronous(runs, 1.0, max_steps=6, eval_steps=5, response_length=40)
    config["validation"] = {"data_args": {"file_name": str(runs.folder / "val.jsonl")}}
    before, *lines = runs.metrics(runs.ok(config))
    assert [before["step"], *(line["step"] for line in lines)] == list(range(7))
    assert lines[-1]["rollout/lost_replicas"] == 2
    assert all(line["tokens/generated"] > 0 for line in lines)
    assert max(line["rollout/staleness/max"] for line in lines) <= 1
    assert "val/score/mean" in lines[4]
