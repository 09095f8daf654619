"""Losses, advantages and KL estimates give OpenRLHF's numbers and gradients: `./run test-engines openrlhf`.

Where ours differ by design, the test has the exact relation.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import replace
from importlib import import_module
from types import ModuleType, SimpleNamespace

import pytest
import torch
from ragged import Ragged, assert_same

from roll_core.algorithms import advantages
from roll_core.algorithms.correction import importance_weights, inside
from roll_core.algorithms.correction_options import CorrectionFilterConfig, ImportanceWeightConfig
from roll_core.algorithms.kl import KLController, approx_kl
from roll_core.algorithms.losses import CrossEntropy, KLTerm, Objective, ValueObjective
from roll_core.algorithms.normalise import RewardNormaliser
from roll_core.algorithms.rewards import soft_overlong_penalty
from roll_core.spec.algorithms import AdvantageInput
from roll_core.spec.train import TokenOutputs

pytestmark = pytest.mark.engine("openrlhf")

SEEDS = range(5)
PACKAGES = ("models", "utils", "trainer", "trainer.ppo_utils", "trainer.ray")
UNUSED = {
    "deepspeed": (),
    "openrlhf.utils.utils": ("zero_pad_sequences",),
    "openrlhf.trainer.ray.launcher": ("RayActorGroup",),
}
"""Modules that need a GPU or an engine, with the names that are imported from them but not called here."""


@pytest.fixture(scope="module")
def openrlhf():
    """OpenRLHF's modules without the `__init__` of their packages, which import deepspeed and flash-attn."""
    spec = importlib.util.find_spec("openrlhf")
    (root,) = spec.submodule_search_locations
    for name in PACKAGES:
        package = sys.modules[f"openrlhf.{name}"] = ModuleType(f"openrlhf.{name}")
        package.__path__ = [f"{root}/{name.replace('.', '/')}"]
    for name, attributes in UNUSED.items():
        module = sys.modules[name] = ModuleType(name)
        for attribute in attributes:
            setattr(module, attribute, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, by a function that is compiled
        return SimpleNamespace(
            loss=import_module("openrlhf.models.loss"),
            utils=import_module("openrlhf.models.utils"),
            maker=import_module("openrlhf.trainer.ppo_utils.experience_maker"),
            lengths=import_module("openrlhf.trainer.ppo_utils.length_penalty"),
            kl=import_module("openrlhf.trainer.ppo_utils.kl_controller"),
        )


@pytest.fixture(params=SEEDS)
def ragged(request):
    return Ragged.of(request.param)


def policy(openrlhf, ragged, **given):
    """OpenRLHF's policy loss on the padded batch, and its gradient."""
    objective = openrlhf.loss.PolicyLoss(**given)
    return ragged.theirs(
        lambda logprobs: objective(
            logprobs, ragged.old, ragged.advantages, ragged.mask.float(), rollout_log_probs=ragged.engine
        )[0]
    )


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "by_token"), [("token-mean", True), ("seq-mean-token-mean", False)])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_is_openrlhfs(openrlhf, ragged, mode, by_token, dual):
    ours = ragged.loss("ppo", aggregation=mode, pg_clip_low=0.1, pg_clip_high=0.3, dual_clip=dual)
    given = {"clip_eps_low": 0.1, "clip_eps_high": 0.3, "dual_clip": dual, "token_level_loss": by_token}
    assert_same(ours, policy(openrlhf, ragged, **given))


def test_gspo_is_openrlhfs(openrlhf, ragged):
    ours = ragged.loss("gspo", aggregation="seq-mean-token-mean", options={"clip_low": 0.1, "clip_high": 0.3})
    given = {"clip_eps_low": 0.1, "clip_eps_high": 0.3, "policy_loss_type": "gspo"}
    assert_same(ours, policy(openrlhf, ragged, **given))


def inputs(ragged):
    rollouts = ragged.rollouts
    return ragged.flat(ragged.old), ragged.flat(ragged.engine), rollouts["mask_T"], rollouts["segments_T"]


@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_weights_of_tokens_are_openrlhfs(openrlhf, ragged, mode):
    """`clip` is TIS with a lower bound, `mask` is IcePop."""
    outside = "truncate" if mode == "clip" else "mask"
    config = ImportanceWeightConfig(lower_bound=0.7, upper_bound=1.4, outside=outside)
    weights = importance_weights(config, *inputs(ragged))
    weighted = replace(ragged, fields=ragged.fields | {"advantages": ragged.advantages * ragged.padded(weights)})
    given = {"is_correction_level": "token", "is_correction_mode": mode, "is_correction_threshold": [0.7, 1.4]}
    assert_same(weighted.loss("ppo"), policy(openrlhf, ragged, **given))


def test_the_mask_of_sequences_is_openrlhfs(openrlhf, ragged):
    """It keeps sequences by the mean log-ratio, and weighs tokens by their own ratio; ours has one level for both."""
    kept = inside(CorrectionFilterConfig(agg_type="geometric", ratio_low=0.9, ratio_high=1.1), *inputs(ragged))
    weights = kept * importance_weights(ImportanceWeightConfig(upper_bound=1e9), *inputs(ragged))
    weighted = replace(ragged, fields=ragged.fields | {"advantages": ragged.advantages * ragged.padded(weights)})
    given = {"is_correction_level": "seq", "is_correction_mode": "mask", "is_correction_threshold": [0.9, 1.1]}
    assert_same(weighted.loss("ppo")[0], policy(openrlhf, ragged, **given)[0])


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(("mode", "by_token"), [("token-mean", True), ("seq-mean-token-mean", False)])
def test_the_value_loss_is_openrlhfs(openrlhf, ragged, mode, by_token, clip):
    values = (ragged.values + 0.5 * ragged.advantages).clone().requires_grad_()
    objective = openrlhf.loss.ValueLoss(clip, token_level_loss=by_token)
    loss = objective(values, ragged.values, ragged.returns, ragged.mask.float())
    loss.backward()
    mine = ragged.flat(values.detach()).requires_grad_()
    found = ValueObjective(value_clip=clip, aggregation=mode)(TokenOutputs(values_T=mine), ragged.micro)
    found.loss.backward()
    theirs = (loss.item(), torch.where(ragged.mask, values.grad, 0.0))
    assert_same((found.loss.item(), ragged.padded(mine.grad)), theirs)


@pytest.mark.parametrize(("mode", "by_token"), [("token-mean", True), ("seq-mean-token-mean", False)])
def test_the_likelihood_is_openrlhfs(openrlhf, ragged, mode, by_token):
    objective = openrlhf.loss.SFTLoss(token_level_loss=by_token)
    found = ragged.theirs(lambda logprobs: objective(logprobs, ragged.mask.float()))
    assert_same(ragged.objective(Objective(terms={"nll": CrossEntropy(aggregation=mode)})), found)


# -- KL ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_are_openrlhfs_within_its_clamp(openrlhf, ragged, kind):
    """OpenRLHF clamps each estimate to ± 10; ours only k3, whose log-ratio may be larger."""

    def both(estimate):
        return ragged.theirs(lambda logprobs: estimate(logprobs)[ragged.mask].mean())

    assert (ragged.logprobs - ragged.ref).abs()[ragged.mask].max() < 4
    assert_same(
        both(lambda logprobs: approx_kl(logprobs, ragged.ref, kind)),
        both(lambda logprobs: openrlhf.utils.compute_approx_kl(logprobs, ragged.ref, kl_estimator=kind)),
    )


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_gradient_equals_openrlhf_near_the_reference(openrlhf, ragged, kind):
    """OpenRLHF's gradient is `w d` with a detached ratio `w`. Ours differentiates `w` times the estimate.

    For k3 that is the same. For k1 it is `w (d + 1)`; the expected value of `w` times the score is 0.
    """
    near = ragged.logprobs + 0.5 * (ragged.ref - ragged.logprobs)
    close = replace(ragged, fields=ragged.fields | {"ref": near})
    term = Objective(terms={"kl": KLTerm(kind=kind, unbiased=True, aggregation="token-mean")})
    found = ragged.theirs(
        lambda logprobs: openrlhf.utils.compute_approx_kl(logprobs, near, ragged.old, kind, unbiased_gradient=True)[
            ragged.mask
        ].mean()
    )
    score = ragged.mask * (ragged.logprobs - ragged.old).exp() / ragged.mask.sum()
    extra = score if kind == "k1" else 0.0
    assert_same(close.objective(term)[1], found[1] + extra)


def test_the_adaptive_coefficient_is_openrlhfs(openrlhf):
    ours, other = KLController(0.2, 6.0, 100), openrlhf.kl.AdaptiveKLController(0.2, 6.0, 100)
    for kl in (1.0, 5.9, 6.1, 60.0, 0.0):
        ours.update(kl, 16)
        other.update(kl, 16)
        assert ours.coef == pytest.approx(other.value)


# -- advantages --------------------------------------------------------------------------------------------------------


def estimated(openrlhf, ragged, name, *, kl_coef=0.0, gamma=1.0, lambd=1.0, values=None):
    """Advantages and returns of OpenRLHF on the mask."""
    settings = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=3),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=name, no_std_norm=False, gamma=gamma, lambd=lambd)),
        reward=SimpleNamespace(clip_range=None),
        data=SimpleNamespace(),
    )
    maker = openrlhf.maker.RemoteExperienceMaker
    self = SimpleNamespace(
        strategy=SimpleNamespace(args=settings), kl_ctl=SimpleNamespace(value=kl_coef), advantage_estimator=name
    )
    self.get_advantages_and_returns = lambda *given: maker.get_advantages_and_returns(self, *given)
    self.get_cumulative_returns = lambda *given: maker.get_cumulative_returns(self, *given)
    experience = SimpleNamespace(
        index=list(range(len(ragged.lengths))),
        rewards=ragged.scores.clone(),
        action_mask=ragged.mask,
        kl=ragged.mask * ragged.advantages,
        values=values,
        info={},
    )
    maker.compute_advantages_and_returns(self, [experience])
    return tuple(torch.where(ragged.mask, each, 0.0) for each in (experience.advantages, experience.returns))


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(("name", "ours"), [("group_norm", advantages.grpo), ("rloo", None), ("dr_grpo", None)])
def test_group_estimators_are_openrlhfs(openrlhf, ragged, name, ours, kl_coef):
    """It adds 1e-9 to the deviation. Its `rloo` subtracts the KL after the baseline, ours before."""
    kl = {"kl_T": ragged.flat(ragged.advantages), "kl_coef": kl_coef}
    groups = torch.tensor(ragged.groups)
    if name == "group_norm":
        found = ragged.estimated(ours, norm_epsilon=1e-9, **kl)
    elif name == "dr_grpo":
        found = ragged.estimated(
            advantages.reinforce, scores=RewardNormaliser("group", None)(ragged.scores, groups), **kl
        )
    else:
        leave_one_out = 1.5 * RewardNormaliser("group", None)(ragged.scores, groups)
        found = ragged.estimated(advantages.reinforce, scores=leave_one_out, **kl)
        if not kl_coef:
            assert_same(found, ragged.estimated(advantages.rloo))
    assert_same(found, estimated(openrlhf, ragged, name, kl_coef=kl_coef)[0])


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline"])
def test_whitening_with_biased_deviation_equals_openrlhf(openrlhf, ragged, name):
    ours = advantages.reinforce_plus_plus if name == "reinforce" else advantages.reinforce_plus_plus_baseline
    found = ragged.estimated(ours, kl_T=ragged.flat(ragged.advantages), kl_coef=0.3)
    count = int(ragged.mask.sum())
    bias = (count / (count - 1)) ** 0.5
    assert_same(found * bias, estimated(openrlhf, ragged, name, kl_coef=0.3)[0])


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.97, 0.9)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae_is_openrlhfs_without_environment_tokens(openrlhf, seed, gamma, lambd):
    """OpenRLHF takes an environment's token as a step of value 0; ours skips it."""
    dense = Ragged.of(seed)
    for row, length in enumerate(dense.lengths):
        dense.mask[row, :length] = True
    found, returns = estimated(openrlhf, dense, "gae", gamma=gamma, lambd=lambd, values=dense.values.clone())
    batch = AdvantageInput(
        scores_S=dense.scores, values_T=dense.flat(dense.values), gamma=gamma, lambd=lambd, **dense.rollouts
    )
    ours = advantages.gae(batch)
    masked = dense.padded(ours.advantages_T)[dense.mask].double()
    expected = torch.zeros(dense.mask.shape, dtype=torch.float64)
    expected[dense.mask] = (masked - masked.mean()) / masked.std(correction=0)
    assert_same(expected, found)
    assert_same(dense.padded(ours.returns_T), returns)


def test_the_overlong_penalty_is_openrlhfs(openrlhf):
    lengths = torch.arange(1, 30)
    experience = SimpleNamespace(response_length=lengths, rewards=torch.zeros(len(lengths)))
    openrlhf.lengths.apply_overlong_penalty([experience], 24, 8, 0.7)
    ours = soft_overlong_penalty(lengths, max_length=24, cache_length=8, factor=0.7)
    assert_same(ours, experience.rewards)
