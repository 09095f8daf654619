"""The forward KL has the gradient of OpenRLHF's distillation loss: `./run test-engines openrlhf-preference`."""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from roll_pipeline_distill.divergences import divergence

pytestmark = [
    pytest.mark.engine("openrlhf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of its functions that are compiled
]


@pytest.mark.parametrize("seed", range(3))
def test_forward_kl_is_cross_entropy_minus_teacher_entropy(seed):
    (root,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    package = sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")
    package.__path__ = [f"{root}/models"]
    rng = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(9, 13, generator=rng) * 2 for _ in range(2))
    student.requires_grad_()
    labels = torch.tensor([-100, 1, 2, -100, 3, 4, 5, -100, 6])
    theirs = import_module("openrlhf.models.loss").KDLoss()(student, teacher, labels)
    kept = labels != -100
    logp, logq = teacher.log_softmax(-1)[kept], student.log_softmax(-1)[kept]
    entropy = -(logp.exp() * logp).sum(-1).mean()
    ours = divergence(logp, logq, "forward_kl").mean()
    torch.testing.assert_close(ours, theirs - entropy, rtol=1e-5, atol=1e-6)
    found, expected = (torch.autograd.grad(each, student, retain_graph=True)[0] for each in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
