"""Whole runs with each policy loss, and with losses and estimators of the user."""

import math

import pytest

from roll_core.builtin.plugin import roll_policy_losses

NAMES = {record.target: record.name for record in reversed(list(roll_policy_losses()))}.values()
NEEDS = {"raft_plus_plus": {"adv_estimator": "reinforce"}, "clip_cov": {"pg_options": {"probability": 1.0}}}

MINE = """
import torch

def clipped(logprobs_T, micro, params, *, clip: float = 0.2):
    old_T = logprobs_T.detach() if micro.old_logprobs_T is None else micro.old_logprobs_T
    ratio_T = torch.where(micro.loss_mask_T, logprobs_T - old_T, 0.0).exp()
    advantages_T = torch.where(micro.loss_mask_T, micro.advantages_T, 0.0)
    loss_T = -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(1 - clip, 1 + clip) * advantages_T)
    return loss_T, {"my_clip": torch.full_like(ratio_T, clip)}
"""
MY_ADVANTAGES = """
import torch
from roll_core.spec.algorithms import AdvantageOutput

def scaled(batch, scale=1.0):
    return AdvantageOutput(advantages_T=scale * batch.scores_S[batch.segments_T] * batch.mask_T)
"""


@pytest.mark.slow
def test_every_policy_loss_trains(local_runs):
    """Two optimizer steps on the same rollouts each."""
    recorded = local_runs.ok(local_runs.rlvr(max_steps=1, record_rollouts=True))
    replay = {"max_steps": 1, "replay_rollouts": str(recorded.run_dir.path)}
    losses = {}
    for name in NAMES:
        result = local_runs.ok(local_runs.rlvr(exp_name=name, pg_variant=name, **replay, **NEEDS.get(name, {})))
        (line,) = local_runs.metrics(result)
        assert line["actor/grad_norm"] > 0, name
        assert math.isfinite(line["actor/approx_kl"]), name
        losses[name] = line["actor/loss"]
    assert len(set(losses.values())) > 10


def test_user_loss_and_estimator_train_in_every_worker(runs):
    (runs.folder / "my_losses.py").write_text(MINE, encoding="utf-8")
    (runs.folder / "my_advantages.py").write_text(MY_ADVANTAGES, encoding="utf-8")
    ours = {"pg_variant": "my_losses:clipped", "pg_options": {"clip": 0.1}, "adv_estimator": "my_advantages:scaled"}
    line, *_ = runs.metrics(runs.ok(runs.rlvr(max_steps=1, adv_options={"scale": 2.0}, **ours)))
    assert line["actor/my_clip"] == pytest.approx(0.1)
    assert line["advantage/max"] == pytest.approx(2 * line["score/max"])
    assert line["actor/grad_norm"] > 0


def test_terms_of_the_objective_train_and_resume(local_runs):
    """Top-entropy tokens, positive examples, an unbiased KL and an entropy bonus that follows a target."""
    recipe = {
        "max_steps": 4,
        "top_entropy_quantile": 0.5,
        "positive_nll_coef": 0.1,
        "positive_nll_threshold": 1.0,
        "use_kl_loss": True,
        "kl_loss_unbiased": True,
        "reference": {
            "strategy_args": {"strategy_name": "hf_infer"},
            "model_args": {"dtype": "fp32"},
            "device_mapping": [0],
        },
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.01,
    }
    whole = local_runs.ok(local_runs.rlvr(exp_name="whole", save_steps=2, **recipe))
    lines = local_runs.metrics(whole)
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert any(line["actor/positive_nll"] > 0 for line in lines)
    # The entropy of 13 characters is below the target.
    assert [line["actor/entropy_coef"] for line in lines] == pytest.approx([0, 0.01, 0.02, 0.03])
    checkpoint = str(whole.run_dir.checkpoints / "step-2")
    rest = local_runs.ok(local_runs.rlvr(exp_name="rest", resume_from_checkpoint=checkpoint, **recipe))
    assert local_runs.timeless(rest)[2:] == local_runs.timeless(whole)[2:]
