"""Preference and reward-model losses give OpenRLHF's numbers and gradients: `./run test-engines openrlhf-preference`.

The version is 0.8.11, the last one with KTO's losses. Where ours differ by design, the test has the exact relation.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from roll_pipeline_preference.losses import PAIR_LOSSES, PreferenceParams, Responses, bradley_terry, kto

pytestmark = [
    pytest.mark.engine("openrlhf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of its functions that are compiled
]

PAIRS = 7


@pytest.fixture(scope="module")
def theirs():
    """OpenRLHF's losses without the `__init__` of their package, which imports deepspeed and flash-attn."""
    spec = importlib.util.find_spec("openrlhf")
    (root,) = spec.submodule_search_locations
    package = sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")
    package.__path__ = [f"{root}/models"]
    return import_module("openrlhf.models.loss")


class Batch:
    """Logprobs of chosen and rejected responses of ragged lengths, under the policy (leaves) and the reference."""

    def __init__(self, seed):
        rng = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, 20, (2, PAIRS), generator=rng)
        self.policy, self.reference = (-torch.rand(2, PAIRS, generator=rng) * self.lengths for _ in range(2))
        self.policy.requires_grad_()

    def responses(self):
        """Ours: chosen and rejected responses."""
        rows = zip(self.policy, self.reference, self.lengths, strict=True)
        return [Responses(logps_P=own, ratios_P=own - other, lengths_P=length) for own, other, length in rows]

    def gradient(self, loss):
        (found,) = torch.autograd.grad(loss, self.policy, retain_graph=True)
        return found


@pytest.fixture(params=range(3))
def batch(request):
    return Batch(request.param)


def same(batch, mine, other):
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch.gradient(mine), batch.gradient(other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "smoothing", "ipo"), [("sigmoid", 0.0, False), ("sigmoid", 0.2, False), ("ipo_sum", 0.0, True)]
)
def test_dpo_cdpo_and_ipo_are_openrlhfs(theirs, batch, name, smoothing, ipo):
    objective = theirs.DPOLoss(beta=0.3, label_smoothing=smoothing, ipo=ipo)
    loss, chosen_rewards, rejected_rewards = objective(*batch.policy, *batch.reference)
    params = PreferenceParams(beta=0.3, label_smoothing=smoothing)
    chosen, rejected = batch.responses()
    same(batch, PAIR_LOSSES[name](chosen, rejected, params).mean(), loss)
    torch.testing.assert_close(0.3 * chosen.ratios_P.detach(), chosen_rewards)
    torch.testing.assert_close(0.3 * rejected.ratios_P.detach(), rejected_rewards)


@pytest.mark.parametrize("shift", [-3.0, 0.7])
def test_kto_is_openrlhfs(theirs, batch, monkeypatch, shift):
    """With the KL of mismatched responses; below 0 it counts as 0."""
    monkeypatch.setattr(theirs.dist, "all_reduce", lambda *_, **__: None)
    objective = theirs.KTOLoss(0.3, 1.5, 0.8, world_size=1, device=torch.device("cpu"))
    mismatched = torch.tensor([-2.0, -4.0, -5.0])
    loss, _, _, kl = objective(
        batch.policy[0], batch.policy[1], mismatched, batch.reference[0], batch.reference[1], mismatched - shift
    )
    assert kl.item() == pytest.approx(max(shift, 0.0), abs=1e-6)
    params = PreferenceParams(beta=0.3, desirable_weight=1.5, undesirable_weight=0.8)
    ratios_S = (batch.policy - batch.reference).flatten()
    same(batch, kto(ratios_S, torch.arange(2 * PAIRS) < PAIRS, max(shift, 0.0), params).mean(), loss)


def test_kto_of_pairs_takes_the_kl_from_other_responses(theirs, batch):
    """Values are equal with that KL; its gradient there also flows through the KL."""
    loss, *_ = theirs.VanillaKTOLoss(beta=0.3)(*batch.policy, *batch.reference)
    params = PreferenceParams(beta=0.3)
    means = [max(0.0, each.ratios_P.mean().item()) for each in batch.responses()]
    found = [
        kto(each.ratios_P, torch.full((PAIRS,), at == 0), means[1 - at], params)
        for at, each in enumerate(batch.responses())
    ]
    assert torch.cat(found).mean().item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("margin", [False, True])
def test_the_loss_of_reward_models_is_openrlhfs(theirs, batch, margin):
    margins = torch.linspace(0, 2, PAIRS)
    mine = bradley_terry(*batch.policy, margins if margin else 0.0, 0.0).mean()
    same(batch, mine, theirs.PairWiseLoss()(*batch.policy, margins if margin else None))
    if not margin:
        same(batch, mine, theirs.LogExpLoss()(*batch.policy))
