"""Policy losses give the numbers and gradients of TRL's GRPO and RLOO trainers: `./run test-engines trl`.

Where ours differ by design, the test has the exact relation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ragged import Ragged, assert_same

from roll_core.algorithms.correction import off_policy_mask
from roll_core.algorithms.entropy import top_entropy
from roll_core.algorithms.losses import policy_objective
from roll_core.spec.train import TokenOutputs

pytestmark = pytest.mark.engine("trl")

SEEDS = range(5)


class Accelerator:
    """One process of a trainer."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction="sum"):
        return value

    def pad_across_processes(self, value, **given):
        return value


@pytest.fixture(params=SEEDS)
def ragged(request):
    return Ragged.of(request.param).with_row_advantages()


def self_of(ragged, logprobs, entropy=None, **given):
    """What a trainer's loss reads of the trainer."""
    from trl import GRPOTrainer

    zeros = torch.zeros_like(logprobs)
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    args |= {name: given.pop(name) for name in list(given) if name in args}
    self = SimpleNamespace(
        args=SimpleNamespace(**args),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        loss_type="dapo",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=ragged.mask.shape[1],
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=0.0,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    vars(self).update(given)
    self.get_high_entropy_mask = lambda *each: GRPOTrainer.get_high_entropy_mask(self, *each)
    self._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, zeros if entropy is None else entropy, None)
    return self


def trl(ragged, entropy=None, *, ratio=None, **given):
    """The loss of `GRPOTrainer` on the padded batch, and its gradient."""
    from trl import GRPOTrainer

    ids = torch.zeros(ragged.mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": ragged.mask.long(),
        "advantages": ragged.scores,
        "old_per_token_logps": ragged.old,
        "ref_per_token_logps": ragged.ref,
        "sampling_per_token_logps": ragged.engine,
        "num_items_in_batch": ragged.mask.sum(),
    }
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
        given |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
    return ragged.theirs(
        lambda logprobs: GRPOTrainer._compute_loss(self_of(ragged, logprobs, entropy, **given), None, inputs)
    )


AGGREGATION = {"dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean"} | {
    "dr_grpo": "seq-mean-token-sum-norm"
}


@pytest.mark.parametrize("loss_type", AGGREGATION)
def test_ppo_is_trls_grpo(ragged, loss_type):
    ours = ragged.loss("ppo", aggregation=AGGREGATION[loss_type], pg_clip_low=0.1, pg_clip_high=0.3)
    assert_same(ours, trl(ragged, loss_type=loss_type, epsilon_low=0.1, epsilon_high=0.3))


def test_dual_clip_is_trls_delta_above_the_upper_clip(ragged):
    """`delta` bounds the ratio of both signs; that of positive advantages is clipped below it already."""
    assert_same(ragged.loss("ppo", dual_clip=1.5), trl(ragged, delta=1.5))


def test_gspo_is_trls_sequence_level(ragged):
    ours = ragged.loss("gspo", aggregation="seq-mean-token-mean", options={"clip_low": 0.1, "clip_high": 0.3})
    given = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.3}
    assert_same(ours, trl(ragged, **given))


def test_luspo_is_trls(ragged):
    ours = ragged.loss("luspo", aggregation="seq-mean-token-mean", options={"clip_low": 0.1, "clip_high": 0.3})
    given = {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.3}
    assert_same(ours, trl(ragged, **given))


def test_cispo_without_a_lower_bound_is_trls(ragged):
    assert_same(ragged.loss("cispo", options={"clip_high": 1.3}), trl(ragged, loss_type="cispo", epsilon_high=1.3))


def test_sapo_is_trls(ragged):
    ours = ragged.loss("sapo", aggregation="seq-mean-token-mean")
    assert_same(ours, trl(ragged, loss_type="sapo"))


def test_vespo_is_trls(ragged):
    assert_same(ragged.loss("vespo"), trl(ragged, loss_type="vespo"))


def test_weights_are_trls(ragged):
    """TRL's correction multiplies the loss, ours the advantage."""
    weights = ragged.mask * (ragged.old - ragged.engine).exp().clamp(max=1.3)
    weighted = replace(ragged, fields=ragged.fields | {"advantages": ragged.advantages * weights})
    assert_same(weighted.loss("ppo"), trl(ragged, ratio=weights))


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_kl_is_trls(ragged, unbiased):
    objective = policy_objective(
        aggregation="token-mean", kl_coef=0.3, kl_unbiased=unbiased, entropy_metric=False, k3_clamp=1e9
    )
    assert_same(ragged.objective(objective), trl(ragged, beta=0.3, use_bias_correction_kl=unbiased))


def test_off_policy_mask_equals_trl_on_the_first_step(ragged):
    """TRL compares the engine with the policy of each step, ours with the policy at the start of the update."""
    first = replace(ragged, fields=ragged.fields | {"old": ragged.logprobs})
    rollouts = first.rollouts
    dropped = off_policy_mask(
        first.flat(first.advantages), first.flat(first.old), first.flat(first.engine), *list(rollouts.values())[:2], 0.1
    )
    kept = torch.where(first.padded(dropped), 0.0, first.advantages)
    masked = replace(first, fields=first.fields | {"advantages": kept})
    theirs = trl(first, off_policy_mask_threshold=0.1)
    assert_same(masked.loss("ppo")[1], theirs[1])


@pytest.mark.parametrize("quantile", [0.2, 0.5, 1.0])
def test_the_tokens_of_high_entropy_are_trls(ragged, quantile):
    """TRL interpolates the threshold, which may select one token less than the share rounded up."""
    entropy = ragged.values.abs()
    count = int(ragged.mask.sum())
    if (quantile * count) % 1 and (quantile * count) % 1 < quantile:
        pytest.skip("the threshold is between two tokens")
    top = ragged.padded(top_entropy(ragged.flat(entropy), ragged.rollouts["mask_T"], quantile))
    masked = replace(ragged, fields=ragged.fields | {"advantages": ragged.advantages * top})
    assert_same(masked.loss("ppo"), trl(ragged, entropy, top_entropy_quantile=quantile))


def test_the_entropy_bonus_is_trls(ragged):
    entropy = ragged.values.abs()
    objective = policy_objective(aggregation="token-mean", entropy_coef=0.3)
    logprobs = ragged.flat(ragged.logprobs).requires_grad_()
    ours = objective(TokenOutputs(logprobs_T=logprobs, entropy_T=ragged.flat(entropy)), ragged.micro)
    found, _ = trl(ragged, entropy, _entropy_bonus_enabled=True, entropy_coef=0.3)
    assert ours.loss.item() == pytest.approx(found, rel=1e-5)


def test_rloo_first_step_equals_ppo_summed_over_tokens(ragged):
    from trl import RLOOTrainer

    first = replace(ragged, fields=ragged.fields | {"old": ragged.logprobs})
    ids = torch.zeros(first.mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": first.mask.long(),
        "advantages": first.scores,
        "old_logps": (first.logprobs * first.mask).sum(-1),
    }
    theirs = first.theirs(lambda logprobs: RLOOTrainer._compute_loss(self_of(first, logprobs), None, inputs))
    assert_same(first.loss("ppo", aggregation="seq-mean-token-sum")[1], theirs[1])
