"""Preference losses give TRL's numbers and gradients on the same ragged batch: `./run test-engines trl`."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll_core.algorithms.losses import CrossEntropy, Objective
from roll_core.data.pack import pack
from roll_core.spec.train import TokenOutputs
from roll_core.types import TrainSequence
from roll_pipeline_preference.encode import CHOSEN, DESIRABLE
from roll_pipeline_preference.losses import PreferenceParams
from roll_pipeline_preference.terms import PreferenceTerm

pytestmark = pytest.mark.engine("trl")

LENGTHS = (5, 3, 8, 8, 2, 6)
"""Tokens of responses: chosen and rejected in turn; each prompt has two tokens."""
PARAMS = PreferenceParams(beta=0.3, label_smoothing=0.1)
COUNT = len(LENGTHS)


@pytest.fixture(scope="module")
def numbers():
    rng = np.random.default_rng(0)
    return [(-rng.random(n).astype(np.float32) - 0.01, -rng.random(n).astype(np.float32)) for n in LENGTHS]


def ours(term, numbers, *, labels=None, sft=0.0):
    """Loss, metrics, and the gradient of each response's logprobs."""
    flat = [torch.tensor(own, requires_grad=True) for own, _ in numbers]
    sequences = []
    for at, (_, reference) in enumerate(numbers):
        mask = np.arange(LENGTHS[at] + 2) > 1
        last = np.zeros(len(mask), dtype=np.float32)
        desirable = at % 2 == 0 if labels is None else labels[at]
        streams = {CHOSEN: mask.astype(np.float32) if desirable else last.copy()}
        last[-1] = 1
        streams |= {DESIRABLE: last} if labels is not None and desirable else {}
        number = at // 2 if labels is None else at
        sequences.append(
            TrainSequence(
                id=str(at),
                tokens=np.zeros(len(mask), dtype=np.int64),
                loss_mask=mask,
                group=number,
                unit=number,
                streams=streams,
                ref_logprobs=np.concatenate([np.zeros(2, np.float32), reference]),
            )
        )
    (micro,) = pack(sequences)
    logprobs = torch.cat([torch.cat([torch.zeros(2), own]) for own in flat])
    objective = Objective(terms={"preference": term, "sft": CrossEntropy(stream=CHOSEN)}, coefs={"sft": sft})
    found = objective(TokenOutputs(logprobs_T=logprobs), micro)
    found.loss.backward()
    return found.loss.item(), {k: float(v) for k, v in found.metrics.items()}, [own.grad for own in flat]


def padded(values, order):
    """`[N, L - 1]` for the tokens after the first of each sequence, in TRL's order of rows."""
    rows = torch.zeros(len(order), max(LENGTHS) + 1)
    for row, at in enumerate(order):
        rows[row, 1 : 1 + LENGTHS[at]] = values[at]
    return rows


class Accelerator:
    """What a trainer's metrics need of one process."""

    device = torch.device("cpu")

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def unwrap_model(self, model):
        return model


def trl_model(logprobs):
    def model(**inputs):
        nothing = torch.zeros_like(logprobs)
        return SimpleNamespace(
            log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), log_sum_sq_probs=nothing
        )

    return model


def trainer(**given):
    return SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        beta=PARAMS.beta,
        label_smoothing=PARAMS.label_smoothing,
        **given,
    )


def theirs_dpo(numbers, losses, weights, **given):
    from trl import DPOTrainer

    order = [*range(0, COUNT, 2), *range(1, COUNT, 2)]
    flat = [torch.tensor(own, requires_grad=True) for own, _ in numbers]
    mask = torch.zeros(COUNT, max(LENGTHS) + 2, dtype=torch.int64)
    for row, at in enumerate(order):
        mask[row, 2 : 2 + LENGTHS[at]] = 1
    reference = [torch.tensor(sum(ref.tolist())) for _, ref in numbers]
    self = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.5,
        loss_types=losses,
        loss_weights=weights,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05),
    )
    vars(self).update(given)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": torch.stack(reference[::2]),
        "ref_rejected_logps": torch.stack(reference[1::2]),
    }
    loss = DPOTrainer._compute_loss(self, trl_model(padded(flat, order)), inputs, False)
    loss.backward()
    return loss.item(), {k: v[0] for k, v in self._metrics["train"].items()}, [own.grad for own in flat]


def same(mine, others):
    assert mine[0] == pytest.approx(others[0], rel=1e-5, abs=1e-6)
    for one, other in zip(mine[2], others[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        if f"rewards/{name}" in mine[1]:
            assert mine[1][f"rewards/{name}"] == pytest.approx(others[1][f"rewards/{name}"], rel=1e-4, abs=1e-6)


DPO = (
    "sigmoid",
    "sigmoid_norm",
    "robust",
    "ipo",
    "hinge",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)


@pytest.mark.parametrize("name", DPO)
def test_a_loss_of_the_dpo_trainer(name, numbers):
    # TRL ignores label_smoothing for these two
    params = PreferenceParams(beta=0.3, label_smoothing=0.0 if name in ("sigmoid", "sigmoid_norm") else 0.1)
    mine = ours(PreferenceTerm(losses={name: 1.0}, params=params), numbers)
    same(mine, theirs_dpo(numbers, [name], [1.0]))


@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_a_divergence(kind, numbers):
    params = PreferenceParams(beta=0.3, f_divergence_type=kind)
    mine = ours(PreferenceTerm(losses={"sigmoid": 1.0}, params=params), numbers)
    same(mine, theirs_dpo(numbers, ["sigmoid"], [1.0], f_divergence_type=kind))


def test_a_weighted_list_with_likelihood(numbers):
    params = PreferenceParams(beta=0.3)
    mine = ours(PreferenceTerm(losses={"sigmoid": 0.8, "bco_pair": 0.2}, params=params), numbers, sft=1.5)
    same(mine, theirs_dpo(numbers, ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.5]))


@pytest.mark.parametrize("name", ["kto", "apo_zero_unpaired"])
def test_a_loss_of_the_kto_trainer(name, numbers):
    from trl import KTOTrainer

    labels = [True, False, True, True, False, False]
    kl, params = 0.4, PreferenceParams(beta=0.3, desirable_weight=1.5)
    mine = ours(PreferenceTerm(losses={name: 1.0}, params=params, kl=kl), numbers, labels=labels)
    flat = [torch.tensor(own, requires_grad=True) for own, _ in numbers]
    mask = torch.zeros(COUNT, max(LENGTHS) + 2, dtype=torch.int64)
    for row in range(COUNT):
        mask[row, 2 : 2 + LENGTHS[row]] = 1
    self = trainer(
        precompute_ref_logps=True,
        calculate_KL=name == "kto",
        loss_type=name,
        desirable_weight=1.5,
        undesirable_weight=1.0,
    )
    self._compute_kl_logps = lambda model, batch: torch.full((COUNT,), kl)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": torch.tensor(labels),
        "ref_logps": torch.tensor([sum(ref.tolist()) for _, ref in numbers]),
        "ref_KL_logps": torch.zeros(COUNT),
    }
    loss = KTOTrainer._compute_loss(self, trl_model(padded(flat, range(COUNT))), inputs, False)
    loss.backward()
    metrics = {k: v[0] for k, v in self._metrics["train"].items()}
    same(mine, (loss.item(), metrics, [own.grad for own in flat]))
    assert metrics["kl"] == pytest.approx(kl if name == "kto" else 0.0)


def sums(numbers, *, mean):
    """Chosen and rejected logprobs of responses, and the tensors behind them."""
    flat = [torch.tensor(own, requires_grad=True) for own, _ in numbers]
    found = torch.stack([own.mean() if mean else own.sum() for own in flat])
    return found[::2], found[1::2], flat


@pytest.mark.parametrize("name", ["simpo", "cpo"])
def test_a_loss_of_the_cpo_trainer(name, numbers):
    from trl.experimental.cpo import CPOTrainer

    chosen, rejected, flat = sums(numbers, mean=name == "simpo")
    self = trainer(alpha=0.0, loss_type="sigmoid" if name == "cpo" else "simpo", simpo_gamma=0.5)
    losses, *_ = CPOTrainer.cpo_loss(self, chosen, rejected)
    losses.mean().backward()
    mine = ours(PreferenceTerm(losses={name: 1.0}, params=PARAMS, reference=False), numbers)
    same((mine[0], {}, mine[2]), (losses.mean().item(), {}, [own.grad for own in flat]))


def test_the_loss_of_the_orpo_trainer(numbers):
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected, flat = sums(numbers, mean=True)
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer(), chosen, rejected)
    loss = -losses.mean()  # the trainer subtracts it
    loss.backward()
    mine = ours(PreferenceTerm(losses={"orpo": 1.0}, params=PARAMS, reference=False), numbers)
    same((mine[0], {}, mine[2]), (loss.item(), {}, [own.grad for own in flat]))
