"""Whole runs of the rlvr pipeline, on both executors."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from roll_core.pipelines.rlvr import RLVRPipeline
from roll_core.runtime.rollout import scoring
from roll_core.runtime.run import roles
from roll_testing.errors import mentions
from roll_tools.saved_record import read_memory

REFERENCE = {"strategy_args": {"strategy_name": "hf_infer"}, "model_args": {"dtype": "fp32"}, "device_mapping": [0]}
CRITIC = {
    "strategy_args": {"strategy_name": "hf_train"},
    "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
    "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8},
    "device_mapping": [0],
}
RECIPES = {
    "grpo with KL loss and entropy": {"use_kl_loss": True, "reference": REFERENCE, "entropy_loss_coef": 0.01},
    "ppo": {"adv_estimator": "gae", "critic": CRITIC, "value_clip": 0.2, "ppo_epochs": 2, "whiten_advantages": True},
    "reinforce++": {
        "adv_estimator": "reinforce",
        "add_token_level_kl": True,
        "reference": REFERENCE,
        "whiten_advantages": True,
        "target_kl": 0.1,
        "loss_agg_mode": "token-mean",
    },
    "dr. grpo": {
        "adv_estimator": "reinforce",
        "norm_mean_type": "group",
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "pg_variant": "vanilla",
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(runs, recipe):
    config = runs.rlvr(max_steps=2, **RECIPES[recipe])
    if "reference" in config:
        config["actor_train"]["training_args"]["per_device_train_batch_size"] = 16  # one optimizer step per batch
    result = runs.ok(config)
    lines = runs.metrics(result)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert line["actor/logprob_gap"] < 1e-4
        assert line["tokens/generated"] > 0
    if "reference" in RECIPES[recipe]:
        # Before the first update the policy is its own reference, so there is no distance between them.
        first = lines[0].get("kl/mean", lines[0].get("actor/kl_loss"))
        assert first == pytest.approx(0.0, abs=1e-4)
    if "critic" in RECIPES[recipe]:
        assert lines[0]["critic/loss"] > 0
    # Two optimizer steps a batch by a loss without a ratio: the config's warning is in the log.
    warned = re.search(r":\d+:\d+: ROLL-C050 pg_variant: ", result.run_dir.log.read_text(encoding="utf-8"))
    assert bool(warned) == (recipe == "dr. grpo")


ESTIMATORS = {
    "grpo leave-one-out": {"adv_estimator": "grpo", "adv_options": {"leave_one_out": True}},
    "rloo": {"adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum"},
    "clip-higher with dual clip": {"pg_clip_high": 0.28, "dual_clip": 3.0, "ppo_epochs": 2},
    "reinforce++": {"adv_estimator": "reinforce++"},
    "reinforce++_baseline": {"adv_estimator": "reinforce++_baseline", "min_group_size": 2},
    "opo": {"adv_estimator": "opo", "soft_overlong_penalty": {"l_cache": 3}},
    "max_rl": {"adv_estimator": "max_rl"},
    "pass_at_k": {"adv_estimator": "pass_at_k", "adv_options": {"k": 2}},
    "gdpo": {
        "adv_estimator": "gdpo",
        "adv_options": {"weights": {"digits": 1.0, "odd": 0.5}},
        "rewards": {"digits": {"reward": "function", "function": "rollrewards:components"}},
    },
    "remax": {"adv_estimator": "remax"},
    "gae with a lambda of the critic": {"adv_estimator": "gae", "critic": CRITIC, "critic_lambd": 1.0, "lambd": 0.9},
    "icepop with a sequence mask": {
        "train_infer_correction": {
            "is_weight": {"enabled": True, "outside": "mask", "lower_bound": 0.5, "upper_bound": 5.0},
            "off_policy_mask_threshold": 0.1,
        }
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ESTIMATORS)
def test_every_estimator_trains(local_runs, recipe):
    lines = local_runs.metrics(local_runs.ok(local_runs.rlvr(max_steps=2, **ESTIMATORS[recipe])))
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    for line in lines:
        assert ("reward/digits/odd/mean" in line) == (recipe == "gdpo")
        assert ("correction/zero_share" in line) == (recipe == "icepop with a sequence mask")


def test_engine_and_trainer_agree_on_the_probe(runs):
    lines = runs.metrics(runs.ok(runs.rlvr(guards={"logprob_probe": {"every": 1}})))
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)
    assert [line["weight_sync/version"] for line in lines] == [0, 2, 4]
    if runs.executor == "local":
        assert all(line["weight_sync/copied_bytes"] == 0 for line in lines)


def test_engines_report_their_work_in_every_step(runs, monkeypatch):
    """The run itself counts the tokens of its samples."""
    monkeypatch.setattr(roles, "METRICS_S", 300.0)  # what is late is left out
    config = runs.rlvr(max_steps=2, eval_steps=0, guards={"logprob_probe": "off"})
    lines = runs.metrics(runs.ok(config))
    assert len(lines) == 2
    for line in lines:
        engine = {name.removeprefix("engine/actor_infer/"): value for name, value in line.items() if "engine/" in name}
        assert engine["generated_tokens"] == line["tokens/generated"]
        assert 1 <= engine["running/mean"] <= engine["running/max"] <= 16
        assert engine["decode_seconds"] > 0


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(runs):
    """With rows of two tags, whose groups the optimizer steps shuffle."""
    rows = [json.loads(line) for line in (runs.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    tagged = "".join(json.dumps(row | {"tag": "ab"[i % 2]}) + "\n" for i, row in enumerate(rows))
    (runs.folder / "train.jsonl").write_text(tagged, encoding="utf-8")
    recipe = RECIPES["ppo"] | {"norm_mean_type": "running", "norm_std_type": "running"}
    whole = runs.ok(runs.rlvr(exp_name="whole", max_steps=4, **recipe))
    first = runs.ok(runs.rlvr(exp_name="halves", max_steps=4, save_steps=2, **recipe))
    checkpoint = str(first.run_dir.checkpoints / "step-2")
    second = runs.ok(runs.rlvr(exp_name="halves", max_steps=4, resume_from_checkpoint=checkpoint, **recipe))
    assert runs.timeless(second)[2:] == runs.timeless(whole)[2:]
    one = load_file(whole.run_dir.export / "model.safetensors")
    other = load_file(second.run_dir.export / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads(second.run_dir.record.read_text(encoding="utf-8"))["resumed_step"] == 2


def test_a_failure_of_the_judge_is_not_a_zero(runs):
    judges = {"digits": {"reward": "function", "function": "rollrewards:sometimes", "max_retries": 0}}
    result = runs.ok(runs.rlvr(rewards=judges, guards={"reward_failures": {"threshold": 1.0}}))
    for line in runs.metrics(result):
        assert line["reward/failures"] > 0
        assert line["score/min"] % 2 == 0


def test_a_judge_that_always_fails_ends_the_run(runs):
    judges = {"digits": {"reward": "function", "function": "rollrewards:broken"}}
    result = runs.run(runs.rlvr(rewards=judges))
    assert "guard reward_failures" in str(result.error)
    assert mentions(str(result.error), "judge")


def test_retried_rewards_leave_the_run_unchanged(local_runs, monkeypatch):
    monkeypatch.setattr(scoring, "RETRY_S", 0.0)
    flaky = {"digits": {"reward": "function", "function": "rollrewards:flaky"}}
    result = local_runs.ok(local_runs.rlvr(max_steps=2, rewards=flaky))
    lines = local_runs.metrics(result)
    # 16 answers a step, two retries for each that was not given before.
    assert 0 < lines[0]["reward/retries"] <= 32
    assert all(line["reward/failures"] == 0 for line in lines)
    steady = local_runs.metrics(local_runs.ok(local_runs.rlvr(max_steps=2)))
    assert [line["score/mean"] for line in lines] == [line["score/mean"] for line in steady]
    assert [line["actor/grad_norm"] for line in lines] == [line["actor/grad_norm"] for line in steady]
    once = {"digits": flaky["digits"] | {"max_retries": 1}}
    excluded = local_runs.run(local_runs.rlvr(max_steps=1, seed=4, rewards=once))
    assert "guard reward_failures" in str(excluded.error)


def test_broken_judge_is_detected_if_filters_drop_all_groups(local_runs):
    judges = {
        "digits": {
            "reward": "function",
            "function": "rollrewards:broken",
            "max_retries": 0,
            "query_filter_config": {"type": "std_filter"},
        }
    }
    result = local_runs.run(local_runs.rlvr(rewards=judges, dynamic_sampling_max_tries=2))
    # 2 × 4 prompts with 4 answers each.
    assert mentions(str(result.error), "32")


def test_dead_judge_is_replaced_and_its_samples_rescored(ray_runs):
    """Its function ends the worker itself, once. The other worker scores no more until the replacement has loaded."""
    killer = (
        "import os, pathlib, signal, time\n"
        "folder = pathlib.Path(__file__).parent\n"
        "if (folder / 'killed').exists():\n"
        "    (folder / 'replaced').touch()\n"
        "def once(prompt, response, **row):\n"
        "    try:\n"
        "        (folder / 'killed').touch(exist_ok=False)\n"
        "    except FileExistsError:\n"
        "        while not (folder / 'replaced').exists():\n"
        "            time.sleep(0.05)\n"
        "        return float(len(response))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (ray_runs.folder / "killer.py").write_text(killer, encoding="utf-8")
    judge = {"reward": "function", "function": "killer:once", "isolation": "none", "world_size": 2, "timeout_s": 600}
    result = ray_runs.ok(ray_runs.rlvr(rewards={"digits": judge}))
    lines = ray_runs.metrics(result)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["reward/retries"] >= 4  # at least the group whose judge died
    assert all(line["reward/failures"] == 0 for line in lines)
    log = result.run_dir.log.read_text(encoding="utf-8")
    assert re.search(r"rewards.digits rank \d: .*\(pid \d+\)", log)


def test_steps_without_reward_signal_complete_and_warn_once(runs):
    judges = {"digits": {"reward": "function", "function": "rollrewards:constant"}}
    result = runs.ok(runs.rlvr(rewards=judges))
    guards = json.loads(result.run_dir.record.read_text(encoding="utf-8"))["guards"]
    assert guards["counts"] == {"all_groups_filtered": 3}
    (event,) = guards["events"]
    assert (event["since"], event["step"]) == (0, 2)
    assert "steps 1–3: all 4 " in event["message"]
    assert runs.screen.getvalue().count("guard all_groups_filtered") == 1
    lines = runs.metrics(result)
    assert [line["actor/grad_norm"] for line in lines] == [0.0] * 3
    assert [line["weight_sync/version"] for line in lines] == [0, 2, 4]


def test_a_run_resumes_from_a_step_without_reward_signal(local_runs):
    recipe = {"rewards": {"digits": {"reward": "function", "function": "rollrewards:constant"}}, "max_steps": 3}
    whole = local_runs.ok(local_runs.rlvr(exp_name="whole", save_steps=1, **recipe))
    checkpoint = str(whole.run_dir.checkpoints / "step-1")
    resumed = local_runs.ok(local_runs.rlvr(exp_name="resumed", resume_from_checkpoint=checkpoint, **recipe))
    assert local_runs.timeless(resumed)[1:] == local_runs.timeless(whole)[1:]


def test_a_gradient_that_explodes_is_named(runs):
    config = runs.rlvr(max_grad_norm=0, max_steps=6)
    config["actor_train"]["training_args"]["learning_rate"] = 1e30
    result = runs.run(config)
    assert result.outcome == "failed"
    assert type(result.error).__name__ in {"NonFiniteError", "GuardTrippedError"}


def test_disaggregated_roles_on_several_workers(ray_runs):
    runs = ray_runs
    config = runs.rlvr(num_gpus_per_node=4)
    config["actor_train"]["device_mapping"] = "list(range(0,2))"
    config["actor_train"]["training_args"]["per_device_train_batch_size"] = 4
    config["actor_infer"]["device_mapping"] = "list(range(2,4))"
    result = runs.ok(config)
    lines = runs.metrics(result)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)
    # One worker of each computes the same, but for the rounding.
    alone = runs.metrics(runs.ok(runs.rlvr(executor="local")))
    assert lines[0]["actor/grad_norm"] == pytest.approx(alone[0]["actor/grad_norm"], rel=1e-3)


@pytest.mark.slow(ci=True)
def test_both_executors_give_the_same_numbers(ray_runs):
    ray = ray_runs.ok(ray_runs.rlvr())
    record = json.loads(ray.run_dir.record.read_text(encoding="utf-8"))
    assert record["executor"] == "ray"
    assert record["weight_transports"] == {"actor_train -> actor_infer": "shm"}
    assert sorted(row["roles"] for row in record["memory"]) == [["actor_infer"], ["actor_train"]]
    local = ray_runs.ok(ray_runs.rlvr(executor="local"))
    (row,) = read_memory(local.run_dir)
    assert row["roles"] == ["actor_train", "actor_infer"]
    assert all(each["measured_bytes"] > 0 and each["predicted_bytes"] > 0 for each in (row, *read_memory(ray.run_dir)))
    for here, there in zip(ray_runs.timeless(local), ray_runs.timeless(ray), strict=True):
        for name in ("score/mean", "actor/loss", "actor/grad_norm", "response_length/mean"):
            assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name


def test_engine_gets_weights_of_a_role_again_after_another(local_runs, monkeypatch):
    published = []

    async def step(pipeline, run):
        for source in ("actor_train", "reference", "actor_train", "actor_train"):
            await run.publish_weights(source, "actor_infer")
            published.append("weight_sync/version" in run.take_metrics())

    monkeypatch.setattr(RLVRPipeline, "step", step)
    reference = REFERENCE | {"strategy_args": {"strategy_name": "hf_train"}}
    local_runs.ok(local_runs.rlvr(max_steps=1, use_kl_loss=True, reference=reference))
    assert published == [True, True, True, False]


def test_a_model_of_few_positions_learns(local_runs):
    model = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 14}
    config = local_runs.rlvr(max_steps=1, guards={"logprob_probe": {"every": 1}})
    config["actor_train"]["model_args"]["random_init"] = model
    (line,) = local_runs.metrics(local_runs.ok(config))
    assert line["weight_sync/logprob_probe"] < 1e-4
