"""Losses, advantages, KL estimates and corrections give verl's numbers and gradients: `./run test-engines verl`.

Where ours differ by design, the test has the exact relation.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from ragged import Ragged, assert_same

from roll_core.algorithms import advantages
from roll_core.algorithms.aggregate import Aggregation, aggregate
from roll_core.algorithms.correction import importance_weights, inside, normalise_weights
from roll_core.algorithms.correction_options import CorrectionFilterConfig, ImportanceWeightConfig
from roll_core.algorithms.kl import KLController, approx_kl
from roll_core.algorithms.losses import KLTerm, Objective, ValueObjective
from roll_core.algorithms.normalise import whiten
from roll_core.spec.train import TokenOutputs

pytestmark = pytest.mark.engine("verl")

SEEDS = range(5)
MODES = get_args(Aggregation)


@pytest.fixture(scope="module")
def verl():
    from verl.trainer.ppo import core_algos

    return core_algos


@pytest.fixture(params=SEEDS)
def ragged(request):
    return Ragged.of(request.param)


def actor(ragged, **given):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_scale_factor=ragged.mask.shape[1],
        policy_loss=PolicyLossConfig(**given.pop("policy_loss", {})),
        **given,
    )
    config.global_batch_info["loss_scale_factor"] = ragged.mask.shape[1]
    return config


def theirs(verl, ragged, name, *, aggregation="token-mean", weights=None, old="old", **given):
    """verl's policy loss on the padded batch, and its gradient."""

    def loss(logprobs):
        return verl.get_policy_loss_fn(name)(
            old_log_prob=ragged.fields[old],
            log_prob=logprobs,
            advantages=ragged.advantages,
            response_mask=ragged.mask.float(),
            loss_agg_mode=aggregation,
            config=actor(ragged, **given),
            rollout_is_weights=weights,
        )[0]

    return ragged.theirs(loss)


# -- policy losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_ppo_with_dual_clip_is_verls_vanilla(verl, ragged, mode):
    ours = ragged.loss("ppo", aggregation=mode, pg_clip_low=0.1, pg_clip_high=0.3, dual_clip=1.5)
    assert_same(
        ours,
        theirs(
            verl,
            ragged,
            "vanilla",
            aggregation=mode,
            clip_ratio_low=0.1,
            clip_ratio_high=0.3,
            clip_ratio_c=1.5,
        ),
    )


def test_log_ratios_are_clamped_as_in_verl(verl):
    ragged = Ragged.of(0, spread=15.0)
    assert ((ragged.logprobs - ragged.old).abs()[ragged.mask] > 20).any()
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    assert_same(ragged.loss("ppo", dual_clip=3.0), theirs(verl, ragged, "vanilla", **clips))


@pytest.mark.parametrize("mode", MODES)
def test_gspo_token_is_verls_gspo(verl, ragged, mode):
    ours = ragged.loss("gspo_token", aggregation=mode, options={"clip_low": 0.1, "clip_high": 0.3})
    assert_same(ours, theirs(verl, ragged, "gspo", aggregation=mode, clip_ratio_low=0.1, clip_ratio_high=0.3))


def test_gspo_is_verls_gspo_where_a_row_has_one_advantage(verl, ragged):
    rows = ragged.with_row_advantages()
    ours = rows.loss("gspo", aggregation="seq-mean-token-mean", options={"clip_low": 0.1, "clip_high": 0.3})
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    assert_same(ours, theirs(verl, rows, "gspo", aggregation="seq-mean-token-mean", **clips))


def test_sapo_is_verls(verl, ragged):
    """verl aggregates by `seq-mean-token-mean` whatever the config says."""
    ours = ragged.loss("sapo", aggregation="seq-mean-token-mean", options={"tau_pos": 1.2, "tau_neg": 1.5})
    assert_same(ours, theirs(verl, ragged, "sapo", aggregation="token-mean", tau_pos=1.2, tau_neg=1.5))


def test_cispo_with_relative_bounds_is_verls(verl, ragged):
    ours = ragged.loss("cispo", options={"bounds": "relative", "clip_low": 0.1, "clip_high": 0.3})
    assert_same(ours, theirs(verl, ragged, "cispo", clip_ratio_low=0.1, clip_ratio_high=0.3))


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_is_verls_on_the_engines_logprobs(verl, ragged, kind):
    options = {"divergence": kind, "delta_low": 0.05, "delta_high": 0.08, "ratio_high": 1.5}
    given = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.5}
    assert_same(ragged.loss("dppo", options=options), theirs(verl, ragged, f"dppo_{kind}", old="engine", **given))


def test_dro_is_verls(verl, ragged):
    assert_same(ragged.loss("dro", options={"beta": 0.3}), theirs(verl, ragged, "dro", policy_loss={"dro_beta": 0.3}))


def test_gpg_is_verls(verl, ragged):
    assert_same(ragged.loss("vanilla"), theirs(verl, ragged, "gpg"))


def test_gmpo_is_verls_geo_mean(verl, ragged):
    """verl takes the mean over the microbatch's rows, rows without a masked token included."""
    rows = ragged.with_row_advantages()
    ours = rows.loss("gmpo", aggregation="seq-mean-token-mean", options={"clip_low": 0.2, "clip_high": 0.3})
    assert_same(ours, theirs(verl, rows, "geo_mean", clip_ratio_low=0.2, clip_ratio_high=0.3))


def centred(seed):
    """One row whose advantages have mean 0: verl's means over the microbatch are then those of the row."""
    ragged = Ragged.of(seed, rows=1, group=1, longest=24)
    values = ragged.advantages - ragged.advantages[ragged.mask].mean()
    return replace(ragged, fields=ragged.fields | {"advantages": values})


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_equals_verl_when_all_candidates_are_chosen(verl, seed):
    """verl subtracts the microbatch's means and chooses a share of all tokens at random."""
    row = centred(seed)
    ours = row.loss("clip_cov", options={"cov_low": 0.1, "cov_high": 2.0, "probability": 1.0})
    given = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}
    assert_same(ours, theirs(verl, row, "clip_cov", policy_loss=given))


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov_is_verls_if_the_threshold_selects_its_share(verl, seed):
    row = centred(seed)
    masked = row.logprobs[row.mask]
    covariances = (row.advantages[row.mask] * (masked - masked.mean())).sort(descending=True).values
    count = int(0.25 * len(covariances))
    threshold = float(covariances[count - 1 : count + 1].mean())
    ours = row.loss("kl_cov", options={"cov_threshold": threshold, "kl_coef": 0.7})
    given = {"kl_cov_ratio": 0.25, "ppo_kl_coef": 0.7}
    assert_same(ours, theirs(verl, row, "kl_cov", policy_loss=given))


def weights_of(ragged):
    return importance_weights(
        ImportanceWeightConfig(upper_bound=1.5),
        ragged.flat(ragged.old),
        ragged.flat(ragged.engine),
        ragged.rollouts["mask_T"],
        ragged.rollouts["segments_T"],
    )


@pytest.mark.parametrize(
    ("mine", "name", "options", "given"),
    [
        ("ppo", "vanilla", {}, {}),
        ("gspo_token", "gspo", {"clip_low": 0.2, "clip_high": 0.2}, {}),
        ("cispo", "cispo", {"bounds": "relative", "clip_low": 0.2, "clip_high": 0.2}, {}),
        ("vanilla", "gpg", {}, {}),
    ],
)
def test_a_weight_on_the_advantage_is_verls_weight_on_the_loss(verl, ragged, mine, name, options, given):
    """verl multiplies the loss, with the penalties of `dro` and `kl_cov`; ours the advantage, without them."""
    weights = weights_of(ragged)
    weighted = replace(ragged, fields=ragged.fields | {"advantages": ragged.advantages * ragged.padded(weights)})
    ours = weighted.loss(mine, options=options, dual_clip=3.0 if name == "vanilla" else None)
    assert_same(ours, theirs(verl, ragged, name, weights=ragged.padded(weights), **given))


@pytest.mark.parametrize("bound", [1.2, 3.0])
def test_cispo_with_absolute_bounds_equals_verl_bypass_mode(verl, ragged, bound):
    """There the old logprobs are the engine's, and a truncated weight multiplies the logprob."""
    engine = replace(ragged, fields=ragged.fields | {"old": ragged.engine})
    ours = engine.loss("cispo", options={"clip_high": bound})
    weights = ragged.mask * (ragged.logprobs - ragged.engine).exp().clamp(max=bound)
    found = ragged.theirs(
        lambda logprobs: verl.compute_policy_loss_reinforce(
            rollout_log_prob=ragged.engine,
            log_prob=logprobs,
            advantages=ragged.advantages,
            response_mask=ragged.mask.float(),
            loss_agg_mode="token-mean",
            config=actor(ragged),
            rollout_is_weights=weights,
        )[0]
    )
    assert_same(ours, found)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_is_verls(verl, ragged, mode):
    """verl's constant is by default the padded length, ours the maximum response length."""
    length = ragged.mask.shape[1]
    found = verl.agg_loss(ragged.values, ragged.mask.float(), mode, loss_scale_factor=length)
    assert_same(aggregate(ragged.flat(ragged.values), ragged.micro, mode), found)


# -- critic and KL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_value_loss_is_verls(verl, ragged, mode):
    values = (ragged.values + 0.5 * ragged.advantages).clone().requires_grad_()
    loss, _ = verl.compute_value_loss(
        vpreds=values,
        returns=ragged.returns,
        values=ragged.values,
        response_mask=ragged.mask.float(),
        cliprange_value=0.3,
        loss_agg_mode=mode,
        loss_scale_factor=ragged.mask.shape[1],
    )
    loss.backward()
    mine = ragged.flat(values.detach()).requires_grad_()
    found = ValueObjective(value_clip=0.3, aggregation=mode)(TokenOutputs(values_T=mine), ragged.micro)
    found.loss.backward()
    assert_same(
        (found.loss.item(), ragged.padded(mine.grad)), (loss.item(), torch.where(ragged.mask, values.grad, 0.0))
    )


@pytest.mark.parametrize(("kind", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")])
def test_kl_estimates_are_verls(verl, kind, name):
    ragged = Ragged.of(0, rows=30, longest=30, spread=12.0)
    reference = ragged.logprobs + 8 * (ragged.ref - ragged.logprobs)

    def both(estimate):
        return ragged.theirs(lambda logprobs: estimate(logprobs)[ragged.mask].mean())

    assert_same(
        both(lambda logprobs: approx_kl(logprobs, reference, kind)),
        both(lambda logprobs: verl.kl_penalty(logprobs, reference, name)),
    )


def test_unbiased_kl_gradient_equals_verl_k3_plus_on_policy(verl, ragged):
    """verl takes the gradient of k2, without a ratio: equal while the policy is the old one and k3 is not clamped."""
    near = ragged.logprobs + 0.5 * (ragged.ref - ragged.logprobs)
    on_policy = replace(ragged, fields=ragged.fields | {"old": ragged.logprobs, "ref": near})
    term = Objective(terms={"kl": KLTerm(kind="k3", unbiased=True, aggregation="token-mean")})
    found = ragged.theirs(
        lambda logprobs: verl.agg_loss(verl.kl_penalty(logprobs, near, "k3+"), ragged.mask.float(), "token-mean")
    )
    assert_same(on_policy.objective(term), found)


def test_the_adaptive_coefficient_is_verls(verl):
    ours, other = KLController(0.2, 6.0, 100), verl.AdaptiveKLController(0.2, 6.0, 100)
    for kl in (1.0, 5.9, 6.1, 60.0, 0.0):
        ours.update(kl, 16)
        other.update(kl, 16)
        assert ours.coef == pytest.approx(other.value)


# -- advantages --------------------------------------------------------------------------------------------------------


def matrix(ragged, values):
    """verl's advantages on the mask."""
    return torch.where(ragged.mask, values, 0.0)


def index(ragged):
    return np.array([str(each) for each in ragged.groups], dtype=object)


def outcome(verl, ragged, name, rewards=None, **given):
    """An estimator of verl that compares the responses of a prompt."""
    function = verl.get_adv_estimator_fn(name)
    rewards = ragged.last.clone() if rewards is None else rewards
    return matrix(ragged, function(rewards, ragged.mask.float(), index=index(ragged), **given)[0])


def whitened(ragged, values):
    return ragged.padded(whiten(ragged.flat(values), ragged.rollouts["mask_T"]))


def test_group_estimators_are_verls(verl, ragged):
    assert_same(ragged.estimated(advantages.grpo), outcome(verl, ragged, "grpo"))
    assert_same(ragged.estimated(advantages.grpo), outcome(verl, ragged, "grpo_vectorized"))
    assert_same(ragged.estimated(advantages.rloo), outcome(verl, ragged, "rloo"))
    assert_same(ragged.estimated(advantages.rloo), outcome(verl, ragged, "rloo_vectorized"))
    assert_same(ragged.estimated(advantages.opo), outcome(verl, ragged, "opo"))
    baseline = outcome(verl, ragged, "reinforce_plus_plus_baseline")
    assert_same(ragged.estimated(advantages.reinforce_plus_plus_baseline), baseline)


def test_rewards_minus_group_mean_equal_verl_grpo_without_std(verl, ragged):
    from roll_core.algorithms.normalise import RewardNormaliser

    scores = RewardNormaliser("group", None)(ragged.scores, torch.tensor(ragged.groups))
    ours = ragged.estimated(advantages.reinforce, scores=scores)
    assert_same(ours, outcome(verl, ragged, "grpo", norm_adv_by_std_in_grpo=False))
    # verl's gpg multiplies them by responses / responses with a reward other than 0.
    rewards = ragged.last.clone()
    rewards[0] = 0.0
    zero_first = scores_with(ragged, 0, 0.0)
    centred = RewardNormaliser("group", None)(zero_first, torch.tensor(ragged.groups))
    factor = len(ragged.lengths) / (len(ragged.lengths) - 1)
    assert_same(factor * ragged.estimated(advantages.reinforce, scores=centred), outcome(verl, ragged, "gpg", rewards))


def scores_with(ragged, row, value):
    scores = ragged.scores.clone()
    scores[row] = value
    return scores


def test_a_group_of_one_has_no_advantage_and_in_verl_its_reward(verl):
    ragged = Ragged.of(1, rows=3, group=1)
    for name in ("grpo", "opo"):
        assert not ragged.estimated(getattr(advantages, name)).any()
        scale = 1 / (1 + 1e-6) if name == "grpo" else 1
        assert_same(outcome(verl, ragged, name), scale * matrix(ragged, ragged.scores[:, None]))


def test_pass_at_k_of_whole_groups_is_verls(verl, ragged):
    ours = ragged.estimated(advantages.pass_at_k, options={"k": 3, "baseline": "leave_one_out"})
    plain = outcome(verl, ragged, "grpo_passk", config={"norm_adv_by_std_in_grpo": False})
    assert_same(ours, plain)


def test_gdpo_is_verls_with_its_second_step_over_tokens(verl, ragged):
    """verl whitens over the batch's tokens; ours normalises over responses."""
    parts = {"a": ragged.scores, "b": ragged.scores.roll(1)}
    ours = ragged.estimated(
        advantages.gdpo, components_S=parts, options={"weights": {"a": 1.0, "b": 0.5}, "batch_norm": False}
    )
    tokens = ragged.mask.shape[1]
    found = outcome(
        verl,
        ragged,
        "gdpo",
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={name: each.numpy() for name, each in parts.items()},
        batch={
            "prompts": torch.zeros(len(ragged.lengths), 1),
            "attention_mask": torch.ones(len(ragged.lengths), 1 + tokens, dtype=torch.int64),
        },
    )
    assert_same(whitened(ragged, ours), found)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_with_the_kl_in_the_reward_is_verls(verl, ragged, gamma):
    rewards = ragged.last - 0.3 * ragged.mask * ragged.values
    function = verl.get_adv_estimator_fn("reinforce_plus_plus")
    found, _ = function(rewards, ragged.mask.float(), config=SimpleNamespace(gamma=gamma))
    ours = ragged.estimated(advantages.reinforce_plus_plus, kl_T=ragged.flat(ragged.values), kl_coef=0.3, gamma=gamma)
    assert_same(ours, matrix(ragged, found))


def test_remax_with_the_kl_in_the_reward_is_verls(verl, ragged):
    baselines = ragged.scores.roll(2)
    rewards = ragged.last - 0.3 * ragged.mask * ragged.values
    found, _ = verl.get_adv_estimator_fn("remax")(rewards, baselines, ragged.mask.float())
    ours = ragged.estimated(advantages.remax, baselines_S=baselines, kl_T=ragged.flat(ragged.values), kl_coef=0.3)
    assert_same(ours, matrix(ragged, found))


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.97, 0.9)])
def test_gae_is_verls(verl, ragged, gamma, lambd):
    function = verl.get_adv_estimator_fn("gae")
    found, returns = function(ragged.last, ragged.values, ragged.mask.float(), gamma, lambd)
    from roll_core.spec.algorithms import AdvantageInput

    batch = AdvantageInput(
        scores_S=ragged.scores, values_T=ragged.flat(ragged.values), gamma=gamma, lambd=lambd, **ragged.rollouts
    )
    ours = advantages.gae(batch)
    assert_same(whitened(ragged, ragged.padded(ours.advantages_T)), matrix(ragged, found))
    assert_same(ragged.padded(ours.returns_T), matrix(ragged, returns))


def test_the_kl_before_or_after_the_groups_statistics(verl, ragged):
    """GRPO: verl subtracts the KL first, so it is part of the mean and deviation. Ours subtracts it afterwards."""
    kl = ragged.mask * ragged.values
    before = outcome(verl, ragged, "grpo", ragged.last - 0.3 * kl)
    totals = ragged.scores - 0.3 * kl.sum(-1)
    assert_same(ragged.estimated(advantages.grpo, scores=totals), before)
    to_go = (0.3 * kl).flip(-1).cumsum(-1).flip(-1) * ragged.mask
    after = ragged.estimated(advantages.grpo, kl_T=ragged.flat(ragged.values), kl_coef=0.3)
    assert_same(after, outcome(verl, ragged, "grpo") - to_go)


# -- corrections -------------------------------------------------------------------------------------------------------


def correction_inputs(ragged):
    rollouts = ragged.rollouts
    return ragged.flat(ragged.old), ragged.flat(ragged.engine), rollouts["mask_T"], rollouts["segments_T"]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("threshold", [1.5, "0.7_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_verls(verl, ragged, level, threshold, normalised):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    found, _ = compute_rollout_correction_weights(
        ragged.old - ragged.engine, ragged.mask.float(), level, threshold, normalised
    )
    inputs = correction_inputs(ragged)
    bounds = {"lower_bound": 0.7, "outside": "mask"} if isinstance(threshold, str) else {}
    ours = importance_weights(ImportanceWeightConfig(weight_type=level, upper_bound=1.5, **bounds), *inputs)
    if normalised:
        ours = normalise_weights(ours, *inputs[2:], level)
    assert_same(ragged.padded(ours), matrix(ragged, found))


@pytest.mark.parametrize(
    ("option", "threshold", "band"),
    [
        # verl's k1 is the logarithm of engine / trainer, ours bounds trainer / engine: reciprocal bounds.
        ("token_k1", "0.5_1.25", CorrectionFilterConfig(agg_type="token", ratio_low=0.8, ratio_high=2.0)),
        ("seq_mean_k1", "0.8_1.25", CorrectionFilterConfig(agg_type="geometric", ratio_low=0.8, ratio_high=1.25)),
        ("seq_sum_k1", "0.5_1.25", CorrectionFilterConfig(agg_type="sequence", ratio_low=0.8, ratio_high=2.0)),
        ("token_k2", "0.1", CorrectionFilterConfig(agg_type="token", ratio_enabled=False, k2_max=0.1)),
        ("seq_mean_k2", "0.1", CorrectionFilterConfig(agg_type="geometric", ratio_enabled=False, k2_max=0.1)),
        ("seq_sum_k2", "0.4", CorrectionFilterConfig(agg_type="sequence", ratio_enabled=False, k2_max=0.4)),
        ("seq_max_k2", "0.3", CorrectionFilterConfig(agg_type="max", ratio_enabled=False, k2_max=0.3)),
        ("token_k3", "0.1", CorrectionFilterConfig(agg_type="token", ratio_enabled=False, k3_max=0.1)),
        ("seq_mean_k3", "0.1", CorrectionFilterConfig(agg_type="geometric", ratio_enabled=False, k3_max=0.1)),
        ("seq_sum_k3", "0.4", CorrectionFilterConfig(agg_type="sequence", ratio_enabled=False, k3_max=0.4)),
        ("seq_max_k3", "0.3", CorrectionFilterConfig(agg_type="max", ratio_enabled=False, k3_max=0.3)),
    ],
)
def test_rejection_is_verls(verl, option, threshold, band):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    ragged = Ragged.of(3, rows=30, longest=8)
    found, _ = compute_rollout_rejection_mask(ragged.old - ragged.engine, ragged.mask.float(), option, threshold)
    ours = ragged.padded(inside(band, *correction_inputs(ragged)))
    assert torch.equal(ours, found.bool())
    assert 0 < ours.sum() < ragged.mask.sum()
