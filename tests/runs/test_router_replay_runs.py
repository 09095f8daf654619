"""GRPO on a mixture of experts whose trainer repeats what the engine's routers chose."""

from roll_core.errors import DataError
from roll_testing.errors import mentions

MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
R3 = {"router_replay": {"mode": "R3"}}


def mixture(runs, **given):
    """The engine rounds to bf16, the trainer does not."""
    guards = {"logprob_probe": {"every": 1, "threshold": 1.0}, "logprob_gap": "off"}
    config = runs.rlvr(max_steps=2, ppo_epochs=2, seed=4, response_length=24, guards=guards, **given)
    config["actor_train"]["model_args"] |= {"random_init": MIXTURE, "disable_gradient_checkpointing": False}
    config["actor_infer"]["model_args"] = {"dtype": "bf16"}
    return config


def test_replay_brings_the_trainer_to_the_engines_logprobs(runs):
    reference = {"strategy_args": {"strategy_name": "hf_infer"}, "model_args": {"dtype": "fp32"}, "device_mapping": [0]}
    config = mixture(runs, use_kl_loss=True, reference=reference)
    replayed = runs.metrics(runs.ok(config | R3))
    plain = runs.metrics(runs.ok(config | {"exp_name": "plain"}))
    # In the first step both have the same rollouts of the same weights.
    assert replayed[0]["score/mean"] == plain[0]["score/mean"]
    for name in ("actor/logprob_gap", "weight_sync/logprob_probe"):
        assert 0 < replayed[0][name] < 0.7 * plain[0][name]
    assert all(0 < line["actor/routing_disagreement"] < 0.5 for line in replayed)
    assert not any("actor/routing_disagreement" in line for line in plain)


def test_recorded_rollouts_bring_their_experts(local_runs):
    config = mixture(local_runs)
    recorded = local_runs.ok(config | R3 | {"record_rollouts": True})
    again = {"exp_name": "again", "replay_rollouts": str(recorded.run_dir.path)}
    losses = [
        [line["actor/loss"] for line in local_runs.metrics(each)]
        for each in (recorded, local_runs.ok(config | R3 | again), local_runs.ok(config | again))
    ]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]  # without R3 they are not looked at
    without = local_runs.ok(config | {"exp_name": "without", "record_rollouts": True})
    failed = local_runs.run(config | R3 | again | {"replay_rollouts": str(without.run_dir.path)})
    assert isinstance(failed.error, DataError)
    assert mentions(str(failed.error), "experts")
