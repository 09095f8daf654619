"""Whole runs that train adapters: engines get merged weights, or the adapters that they ask for; and the policy without
its adapters is the reference."""

import json

import pytest
import torch
from safetensors.torch import load_file

from roll_core.cli.main import main
from roll_core.errors import WeightsUnchangedError
from roll_modeling import strategy

LORA = {"lora_target": "all-linear", "lora_rank": 4}
REFERENCE = {"strategy_args": {"strategy_name": "hf_infer"}, "model_args": {"dtype": "fp32"}, "device_mapping": [0]}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
WIDTHS = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 64) + (64 + 32)
"""Sum of the sizes of inputs and outputs: q, k, v, o, gate, up, down."""
ADAPTER_BYTES = 4 * LORA["lora_rank"] * WIDTHS
EVERY_STEP = {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": 1e-4}}


def with_lora(config, **more):
    config["actor_train"]["model_args"] |= LORA | more
    return config


@pytest.fixture
def count_models(monkeypatch):
    """Models that train strategies of this process have loaded."""
    loaded = []

    def load_model(spec, **where):
        loaded.append(spec)
        return hf_train_load(spec, **where)

    hf_train_load = strategy.load_model
    monkeypatch.setattr(strategy, "load_model", load_model)
    return loaded


def test_a_policy_with_adapters_learns_and_the_engine_follows(runs):
    config = with_lora(runs.rlvr(max_steps=4, guards=EVERY_STEP, **KL))
    result = runs.ok(config)
    lines = runs.metrics(result)
    assert [line["weight_sync/version"] for line in lines] == [0, 2, 4, 6]
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    # The first update begins at the reference; later ones have left it.
    assert lines[0]["actor/kl_loss"] < lines[-1]["actor/kl_loss"]
    assert lines[-1]["actor/kl_loss"] > 1e-5


def test_adapter_engine_receives_only_the_adapter(runs):
    config = with_lora(runs.rlvr(guards=EVERY_STEP))
    config["actor_infer"]["strategy_args"]["strategy_config"] = {"enable_lora": True}
    lines = runs.metrics(runs.ok(config))
    assert [line["weight_sync/version"] for line in lines] == [0, 2, 4]
    assert [line["weight_sync/copied_bytes"] for line in lines] == [
        0 if runs.executor == "local" else ADAPTER_BYTES
    ] * 3
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)


def test_ranks_that_share_a_policy_send_only_the_adapter(ray_runs):
    config = with_lora(ray_runs.rlvr(max_steps=2, guards=EVERY_STEP))
    config["actor_train"] |= {"strategy_args": {"strategy_name": "fsdp2_train"}, "device_mapping": [0, 1]}
    config["actor_infer"]["strategy_args"]["strategy_config"] = {"enable_lora": True}
    lines = ray_runs.metrics(ray_runs.ok(config))
    assert [line["weight_sync/copied_bytes"] for line in lines] == [ADAPTER_BYTES] * 2
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)
    assert lines[-1]["actor/grad_norm"] > 0


@pytest.mark.parametrize("penalty", [KL, {"add_token_level_kl": True, "adv_estimator": "reinforce"}], ids=str)
def test_policy_without_adapters_equals_a_reference_bit_for_bit(local_runs, count_models, penalty):
    runs = local_runs
    own = runs.ok(with_lora(runs.rlvr(exp_name="own", **penalty)))
    assert len(count_models) == 1
    role = runs.ok(with_lora(runs.rlvr(exp_name="role", reference=REFERENCE, **penalty)))
    assert len(count_models) == 3
    assert runs.timeless(own) == runs.timeless(role)


def test_resumed_adapter_run_equals_uninterrupted_bit_for_bit(runs):
    def config(**more):
        return with_lora(runs.rlvr(max_steps=4, **KL, **more), additional_target="lm_head")

    whole = runs.ok(config(exp_name="whole", save_steps=2))
    checkpoint = whole.run_dir.checkpoints / "step-2"
    second = runs.ok(config(exp_name="resumed", resume_from_checkpoint=str(checkpoint)))
    assert runs.timeless(second)[2:] == runs.timeless(whole)[2:]
    one, other = (load_file(each.run_dir.export / "model.safetensors") for each in (whole, second))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    saved = load_file(checkpoint / "actor_train" / "rank-0" / "weights.safetensors")
    assert "lm_head.modules_to_save.default.weight" in saved
    assert not any("base_layer" in name or "embed_tokens" in name for name in saved)


def test_a_base_model_in_4_bits_learns_and_resumes_bit_for_bit(local_runs, tmp_path):
    runs = local_runs

    def config(**more):
        return with_lora(runs.rlvr(guards=EVERY_STEP, portable_checkpoints=True, **KL, **more), load_in_4bit=True)

    whole = runs.ok(config(exp_name="whole", save_steps=1, max_steps=2))
    lines = runs.metrics(whole)
    # The engine computes with merged weights, the trainer with the quantized base model and the adapters.
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)
    assert lines[-1]["actor/grad_norm"] > 0
    checkpoint = whole.run_dir.checkpoints / "step-1"
    second = runs.ok(config(exp_name="resumed", resume_from_checkpoint=str(checkpoint), max_steps=2))
    assert runs.timeless(second)[1:] == runs.timeless(whole)[1:]
    out = tmp_path / "merged"
    assert main(["checkpoint", "merge", str(whole.run_dir.checkpoints / "step-2"), str(out)]) == 0
    one, *others = (
        load_file(each / "model.safetensors") for each in (whole.run_dir.export, second.run_dir.export, out)
    )
    assert all(one.keys() == other.keys() for other in others)
    assert all(torch.equal(one[name], other[name]) for other in others for name in one)
    assert all(each.dtype == torch.float32 for each in one.values())


def test_steps_that_change_no_merged_weight_are_found(local_runs):
    config = with_lora(local_runs.rlvr())
    config["actor_train"]["training_args"]["learning_rate"] = 0.0
    result = local_runs.run(config)
    assert isinstance(result.error, WeightsUnchangedError)


def test_a_bf16_policy_with_adapters_publishes_and_agrees(local_runs):
    config = with_lora(local_runs.rlvr(guards={"logprob_probe": {"every": 1}}, **KL), dtype="bf16")
    config["actor_infer"]["model_args"]["dtype"] = "bf16"
    lines = local_runs.metrics(local_runs.ok(config))
    assert all(line["weight_sync/logprob_probe"] < 0.05 for line in lines)


def test_a_critic_with_adapters_learns_values(local_runs):
    critic = {
        "strategy_args": {"strategy_name": "hf_train"},
        "model_args": local_runs.model() | LORA,
        "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8},
        "device_mapping": [0],
    }
    config = with_lora(local_runs.rlvr(adv_estimator="gae", critic=critic, max_steps=6, save_steps=6))
    result = local_runs.ok(config)
    lines = local_runs.metrics(result)
    assert lines[-1]["critic/loss"] < lines[0]["critic/loss"]
    saved = load_file(result.run_dir.checkpoints / "step-6" / "critic" / "rank-0" / "weights.safetensors")
    assert "score.modules_to_save.default.weight" in saved


def test_adapters_on_two_ranks_train_as_on_one(ray_runs):
    config = with_lora(ray_runs.rlvr(num_gpus_per_node=4, **KL))
    config["actor_train"]["device_mapping"] = [0, 1]
    config["actor_train"]["training_args"]["per_device_train_batch_size"] = 4
    lines = ray_runs.metrics(ray_runs.ok(config))
    alone = ray_runs.metrics(ray_runs.ok(with_lora(ray_runs.rlvr(executor="local", **KL))))
    assert lines[0]["actor/grad_norm"] == pytest.approx(alone[0]["actor/grad_norm"], rel=1e-3)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)


def test_sft_exports_only_its_adapters(local_runs):
    from peft import AutoPeftModelForCausalLM

    runs = local_runs
    base = runs.ok(runs.sft(exp_name="base", max_steps=1))
    config = runs.sft(exp_name="adapters", pretrain=str(base.run_dir.export), tokenizer=None)
    config["sft_train"]["model_args"] = runs.model() | LORA | {"lora_export": "adapter"}
    result = runs.ok(config)
    names = {each.name for each in result.run_dir.export.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        model = AutoPeftModelForCausalLM.from_pretrained(result.run_dir.export)
    assert sum(each.numel() for name, each in model.named_parameters() if "lora_B" in name and each.any()) > 0
    assert json.loads((result.run_dir.export / "adapter_config.json").read_text())["r"] == 4
