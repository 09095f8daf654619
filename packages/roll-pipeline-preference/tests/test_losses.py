"""Preference losses: hand-worked numbers, a slow implementation over tokens, and independence of the split."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.losses import CrossEntropy, Objective
from roll_core.data.pack import count_totals, pack
from roll_core.errors import DataError
from roll_core.spec.train import TokenOutputs
from roll_core.types import TrainSequence
from roll_pipeline_preference import config
from roll_pipeline_preference.encode import CHOSEN, DESIRABLE, MARGIN
from roll_pipeline_preference.losses import (
    LABELLED_LOSSES,
    PAIR_LOSSES,
    PreferenceParams,
    Responses,
    bradley_terry,
    kto,
)
from roll_pipeline_preference.terms import BradleyTerryTerm, PreferenceTerm


def responses(logp, ratio, length):
    return Responses(
        logps_P=torch.tensor([logp]),
        ratios_P=torch.tensor([ratio]),
        lengths_P=torch.tensor([length], dtype=torch.int64),
    )


# -- by hand -----------------------------------------------------------------------------------------------------------

LN3 = math.log(3)
BY_HAND = {
    # beta = 1/2, r_w = ln 3, r_l = -ln 3: x = ln 3, sigmoid(x) = 3/4.
    # n_w = 2, n_l = 4, logp_w = -2 ln 2, logp_l = -4 ln 4
    "sigmoid": -math.log(3 / 4),
    "sigmoid_norm": math.log(1 + math.exp(-0.5 * (LN3 / 2 + LN3 / 4))),
    "robust": -math.log(3 / 4),
    "ipo": (LN3 * 3 / 4 - 1) ** 2,
    "ipo_sum": (2 * LN3 - 1) ** 2,
    "hinge": 0.0,  # 1 - ln 3 < 0
    "nca_pair": -math.log(1 / (1 + 3**-0.5)) - 0.5 * math.log(1 / (1 + 3**0.5)) - 0.5 * math.log(1 / (1 + 3**-0.5)),
    "bco_pair": -2 * math.log(1 / (1 + 3**-0.5)),
    "sppo_hard": 2 * (LN3 - 1) ** 2,
    "apo_zero": 2 / (1 + 3**0.5),
    "apo_down": 1 / (1 + 3**-0.5) + 1 / 4,
    # SimPO: per token -ln 2 and -ln 4: beta times their difference is ln 2 / 2; gamma = ln 2 / 2 cancels it
    "simpo": math.log(2),
    # CPO: (-2 ln 2 + 8 ln 2) / 2 = 3 ln 2: sigmoid = 8/9
    "cpo": math.log(9 / 8),
    # ORPO: odds 1 and 1/3: log odds ratio ln 3: -beta ln 3/4
    "orpo": -0.5 * math.log(3 / 4),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loss_by_hand(name):
    chosen, rejected = responses(-2 * math.log(2), LN3, 2), responses(-4 * math.log(4), -LN3, 4)
    params = PreferenceParams(beta=0.5, simpo_gamma=math.log(2) / 2)
    assert PAIR_LOSSES[name](chosen, rejected, params).item() == pytest.approx(BY_HAND[name], abs=1e-6)


def test_label_smoothing_by_hand():
    # x = ln 3, e = 1/4: -3/4 ln(3/4) - 1/4 ln(1/4) = H(1/4), which is also the minimum over x
    chosen, rejected = responses(0.0, LN3, 1), responses(0.0, 0.0, 1)
    params = PreferenceParams(beta=1.0, label_smoothing=0.25)
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert PAIR_LOSSES["sigmoid"](chosen, rejected, params).item() == pytest.approx(entropy, abs=1e-6)
    robust = (-0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / 0.5
    assert PAIR_LOSSES["robust"](chosen, rejected, params).item() == pytest.approx(robust, abs=1e-6)
    # EXO: the policy's (3/4, 1/4) equals its target
    assert PAIR_LOSSES["exo_pair"](chosen, rejected, params).item() == pytest.approx(0, abs=1e-6)


def test_f_divergences_by_hand():
    # u = 3: log u; 1 - 1/u; log(2u / (u + 1)); (u^(a - 1) - 1) / (a - 1) for a = 2 and 1/2
    chosen, rejected = responses(0.0, LN3, 1), responses(0.0, 0.0, 1)
    expected = {"reverse_kl": LN3, "forward_kl": 2 / 3, "js_divergence": math.log(1.5), "alpha_divergence": 2.0}
    for kind, delta in expected.items():
        params = PreferenceParams(beta=1.0, f_divergence_type=kind, f_alpha_divergence_coef=2.0)
        found = PAIR_LOSSES["ipo_sum"](chosen, rejected, params).item()
        assert found == pytest.approx((delta - 0.5) ** 2, abs=1e-6), kind
    params = PreferenceParams(beta=1.0, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.5)
    found = PAIR_LOSSES["ipo_sum"](chosen, rejected, params).item()
    assert found == pytest.approx((2 * (1 - 3**-0.5) - 0.5) ** 2, abs=1e-6)


def test_bounds_of_exponents_and_odds_by_hand():
    # A chosen response of probability 1 has at most probability 1/2 per token: odds 1, as the rejected one
    params = PreferenceParams(beta=0.5, orpo_max_mean_logprob=-math.log(2))
    found = PAIR_LOSSES["orpo"](responses(0.0, 0.0, 2), responses(-math.log(2), 0.0, 1), params).item()
    assert found == pytest.approx(0.5 * math.log(2), abs=1e-6)
    # 1 - 1/u with u = e^-5, whose reciprocal is bounded by e: (1 - e - 1/2)^2
    params = PreferenceParams(beta=1.0, f_divergence_type="forward_kl", f_divergence_max_exponent=1.0)
    found = PAIR_LOSSES["ipo_sum"](responses(0.0, -5.0, 1), responses(0.0, 0.0, 1), params).item()
    assert found == pytest.approx((0.5 - math.e) ** 2, abs=1e-5)


def test_kto_by_hand():
    # beta 1, z = ln 3. Desirable r = 2 ln 3: 1 - sigmoid(ln 3) = 1/4, times 2; undesirable r = 0: 1 - 3/4, times 4
    params = PreferenceParams(beta=1.0, desirable_weight=2.0, undesirable_weight=4.0)
    found = kto(torch.tensor([2 * LN3, 0.0]), torch.tensor([True, False]), LN3, params)
    assert found.tolist() == pytest.approx([0.5, 1.0])


def test_bradley_terry_by_hand():
    # scores 3 and 1, margin 2: -log sigmoid(0) = ln 2, and 0.01 (3 + 1)^2
    found = bradley_terry(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0]), 0.01)
    assert found.item() == pytest.approx(math.log(2) + 0.16)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_and_gradients_stay_finite_far_from_the_reference(name):
    params = PreferenceParams(label_smoothing=0.1, beta=1.0)
    for far in (-300.0, 300.0):
        ratio = torch.tensor([far], requires_grad=True)
        chosen = Responses(logps_P=ratio.clamp(max=0), ratios_P=ratio, lengths_P=torch.tensor([1]))
        found = PAIR_LOSSES[name](chosen, responses(0.0, 0.0, 1), params)
        found.backward()
        assert torch.isfinite(found).all()
        assert torch.isfinite(ratio.grad).all()


def test_the_config_names_exactly_the_losses_there_are():
    pairs = {*get_args(config.ReferenceLoss), *get_args(config.PolicyLoss)}
    assert pairs == PAIR_LOSSES.keys()
    assert set(get_args(config.LabelledLoss)) == LABELLED_LOSSES.keys()
    chosen, rejected = responses(-1.0, 0.3, 2), responses(-2.0, -0.4, 3)

    def depends(name, **changed):
        plain = PreferenceParams(label_smoothing=0.1)
        one, other = (PAIR_LOSSES[name](chosen, rejected, each) for each in (plain, replace(plain, **changed)))
        return not torch.equal(one, other)

    assert {name for name in pairs if depends(name, label_smoothing=0.2)} == config.SMOOTHED
    assert {name for name in pairs if depends(name, f_divergence_type="forward_kl")} == config.DIVERGENT


# -- over tokens -------------------------------------------------------------------------------------------------------


def step(seed: int, count: int, *, labelled: bool = False) -> tuple[list[TrainSequence], list[np.ndarray]]:
    """Ragged sequences with a gap in some masks, and the policy's logprobs."""
    rng = np.random.default_rng(seed)
    sequences, logprobs = [], []
    for at in range(count):
        length = int(rng.integers(2, 9))
        mask = np.arange(length) >= rng.integers(1, length)
        if mask.sum() > 2:
            mask[-2] = False
        chosen = bool(rng.integers(2)) if labelled else at % 2 == 0
        last = (np.arange(length) == length - 1).astype(np.float32)
        streams = {CHOSEN: mask.astype(np.float32), MARGIN: last * np.float32(0.3)} if chosen else {}
        if labelled and chosen:
            streams[DESIRABLE] = last
        number = at if labelled else at // 2
        sequences.append(
            TrainSequence(
                id=str(at),
                tokens=np.zeros(length, dtype=np.int64),
                loss_mask=mask,
                group=number,
                unit=number,
                ref_logprobs=-rng.random(length).astype(np.float32),
                streams=streams,
            )
        )
        logprobs.append(-rng.random(length).astype(np.float32) - 0.01)
    return sequences, logprobs


def shares(term, sequences, logprobs, most=None):
    """Loss, metrics and gradient, added up over microbatches."""
    objective = term if isinstance(term, Objective) else Objective(terms={"term": term})
    flat = {each.id: torch.tensor(own, requires_grad=True) for each, own in zip(sequences, logprobs, strict=True)}
    loss, metrics = 0.0, {}
    for micro in pack(sequences, max_sequences=most, totals=count_totals(sequences)):
        mine = torch.cat([flat[i] for i in micro.ids])
        outputs = TokenOutputs(logprobs_T=mine, values_T=mine, topk_logprobs_TK=torch.full((len(mine), 1), -0.005))
        found = objective(outputs, micro)
        found.loss.backward()
        loss += found.loss.item()
        for name, value in found.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return loss, metrics, [each.grad.numpy() for each in flat.values()]


def logsig(x):
    return -torch.log1p(torch.exp(-x))


def slow_pair(name, chosen, rejected, p):
    """The loss of one pair, written out; a response is two lists: its tokens' logprobs and reference logprobs."""
    b, e = p.beta, p.label_smoothing
    (w, rw), (v, rv) = chosen, rejected
    pw, pl = sum(w), sum(v)
    dw, dl = sum(x - y for x, y in zip(w, rw, strict=True)), sum(x - y for x, y in zip(v, rv, strict=True))
    x = b * (dw - dl)
    odds = [torch.exp(s / len(t)) / (1 - torch.exp(s / len(t))) for s, t in ((pw, w), (pl, v))]

    def smooth(z):
        return -(1 - e) * logsig(z) - e * logsig(-z)

    m = torch.sigmoid(x / p.discopop_tau)
    return {
        "sigmoid": lambda: smooth(x),
        "sigmoid_norm": lambda: smooth(b * (dw / len(w) - dl / len(v))),
        "robust": lambda: (-(1 - e) * logsig(x) + e * logsig(-x)) / (1 - 2 * e),
        "ipo": lambda: (dw / len(w) - dl / len(v) - 1 / (2 * b)) ** 2,
        "ipo_sum": lambda: (dw - dl - 1 / (2 * b)) ** 2,
        "hinge": lambda: torch.clamp(1 - x, min=0),
        "exo_pair": lambda: (
            torch.sigmoid(x) * (torch.log(torch.sigmoid(x)) - math.log(1 - e))
            + torch.sigmoid(-x) * (torch.log(torch.sigmoid(-x)) - math.log(e))
        ),
        "nca_pair": lambda: -logsig(b * dw) - 0.5 * logsig(-b * dw) - 0.5 * logsig(-b * dl),
        "bco_pair": lambda: -logsig(b * dw) - logsig(-b * dl),
        "sppo_hard": lambda: (dw - 0.5 / b) ** 2 + (dl + 0.5 / b) ** 2,
        "apo_zero": lambda: 1 - torch.sigmoid(b * dw) + torch.sigmoid(b * dl),
        "apo_down": lambda: torch.sigmoid(b * dw) + 1 - torch.sigmoid(x),
        "discopop": lambda: -logsig(x) * (1 - m) + torch.exp(-x) * m,
        "simpo": lambda: smooth(b * (pw / len(w) - pl / len(v)) - p.simpo_gamma),
        "cpo": lambda: smooth(b * (pw - pl)),
        "orpo": lambda: -b * logsig(torch.log(odds[0]) - torch.log(odds[1])),
    }[name]()


def slow(name, sequences, logprobs, params, *, kl=0.0):
    """Loss and gradient by a loop over pairs or responses and their tokens, in float64."""
    flat = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in logprobs]

    def tokens(at):
        places = np.flatnonzero(sequences[at].loss_mask)
        return [flat[at][int(t)] for t in places], [float(sequences[at].ref_logprobs[t]) for t in places]

    losses = []
    if name in LABELLED_LOSSES:
        for at, sequence in enumerate(sequences):
            own, ref = tokens(at)
            r = sum(x - y for x, y in zip(own, ref, strict=True))
            z = kl if name == "kto" else 0.0
            if DESIRABLE in sequence.streams:
                losses.append(params.desirable_weight * (1 - torch.sigmoid(params.beta * (r - z))))
            else:
                losses.append(params.undesirable_weight * (1 - torch.sigmoid(params.beta * (z - r))))
    else:
        for at in range(0, len(sequences), 2):
            losses.append(slow_pair(name, tokens(at), tokens(at + 1), params))
    loss = sum(losses) / len(losses)
    loss.backward()
    return loss.item(), [np.zeros(len(each)) if each.grad is None else each.grad.numpy() for each in flat]


@pytest.mark.parametrize("name", [*PAIR_LOSSES, *LABELLED_LOSSES])
def test_a_loss_equals_the_loop_over_tokens(name):
    for seed in range(3):
        sequences, logprobs = step(seed, 6, labelled=name in LABELLED_LOSSES)
        params = PreferenceParams(beta=0.7, label_smoothing=0.1, discopop_tau=0.5, undesirable_weight=1.5)
        loss, _, gradient = shares(PreferenceTerm(losses={name: 1.0}, params=params, kl=0.2), sequences, logprobs, 2)
        expected, wanted = slow(name, sequences, logprobs, params, kl=0.2)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        for found, right in zip(gradient, wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)


def test_sft_term_is_divided_by_the_steps_chosen_tokens():
    sequences, logprobs = step(1, 6)
    terms = {"preference": PreferenceTerm(losses={"sigmoid": 0.5, "hinge": 2.0}), "sft": CrossEntropy(stream=CHOSEN)}
    objective = Objective(terms=terms, coefs={"sft": 0.5})
    loss, metrics, _ = shares(objective, sequences, logprobs, 2)
    chosen = [-x for s, lp in zip(sequences[::2], logprobs[::2], strict=True) for x in lp[s.loss_mask]]
    assert metrics["chosen_nll"] == pytest.approx(np.mean(chosen), rel=1e-5)
    parts = 0.5 * metrics["loss/sigmoid"] + 2 * metrics["loss/hinge"] + 0.5 * np.mean(chosen)
    assert loss == pytest.approx(parts, rel=1e-5)


def test_the_metrics_are_means_over_pairs():
    sequences, logprobs = step(2, 8)
    _, metrics, _ = shares(PreferenceTerm(params=PreferenceParams(beta=0.3)), sequences, logprobs, 4)
    sums = [lp[s.loss_mask].sum() for s, lp in zip(sequences, logprobs, strict=True)]
    ratios = [total - s.ref_logprobs[s.loss_mask].sum() for s, total in zip(sequences, sums, strict=True)]
    better, worse = np.array(ratios[::2]), np.array(ratios[1::2])
    assert metrics["rewards/chosen"] == pytest.approx(0.3 * better.mean(), rel=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(0.3 * worse.mean(), rel=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(0.3 * (better - worse).mean(), rel=1e-4)
    assert metrics["rewards/accuracies"] == pytest.approx((better > worse).mean())
    assert metrics["logps/chosen"] == pytest.approx(np.mean(sums[::2]), rel=1e-5)
    assert metrics["logps/rejected"] == pytest.approx(np.mean(sums[1::2]), rel=1e-5)


def test_labelled_metrics_are_means_over_their_own_label():
    sequences, logprobs = step(3, 7, labelled=True)
    objective = PreferenceTerm(losses={"kto": 1.0}, params=PreferenceParams(beta=0.3), kl=0.25)
    _, metrics, _ = shares(objective, sequences, logprobs, 3)
    ratios = [float((lp - s.ref_logprobs)[s.loss_mask].sum()) for s, lp in zip(sequences, logprobs, strict=True)]
    good = [r for s, r in zip(sequences, ratios, strict=True) if DESIRABLE in s.streams]
    bad = [r for s, r in zip(sequences, ratios, strict=True) if DESIRABLE not in s.streams]
    assert metrics["kl"] == pytest.approx(0.25)
    assert metrics["rewards/chosen"] == pytest.approx(0.3 * np.mean(good), rel=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(0.3 * np.mean(bad), rel=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(0.3 * (np.mean(good) - np.mean(bad)), rel=1e-5)


def test_desensitisation_weighs_tokens_beyond_the_shorter_reply():
    sequences, logprobs = step(4, 2)
    sequences = [replace(each, loss_mask=np.arange(len(each)) > 0) for each in sequences]
    counts = [len(each) - 1 for each in sequences]
    assert counts[0] != counts[1]
    objective = PreferenceTerm(params=PreferenceParams(beta=1.0), ld_alpha=0.25)
    loss, _, _ = shares(objective, sequences, logprobs)
    delta = 0.0
    for sign, sequence, own in zip((1, -1), sequences, logprobs, strict=True):
        for rank, t in enumerate(range(1, len(sequence)), start=1):
            weight = 1.0 if rank <= min(counts) else 0.25
            delta += sign * weight * float(own[t] - sequence.ref_logprobs[t])
    assert loss == pytest.approx(math.log(1 + math.exp(-delta)), rel=1e-5)


def test_wpo_weighs_a_pair_by_its_probability_beside_argmax():
    sequences, logprobs = step(5, 4)
    loss, _, _ = shares(PreferenceTerm(use_weighting=True), sequences, logprobs)  # argmax tokens have -0.005
    expected = 0.0
    for at in (0, 2):
        pair, own = sequences[at : at + 2], logprobs[at : at + 2]
        single, _, _ = shares(PreferenceTerm(), pair, own)
        weights = [math.exp(np.mean(lp[s.loss_mask] + 0.005)) for s, lp in zip(pair, own, strict=True)]
        expected += weights[0] * weights[1] * single / 2
    assert loss == pytest.approx(expected, rel=1e-5)
    assert PreferenceTerm(use_weighting=True).want.topk == 1


def test_without_a_reference_ratios_are_logprobs():
    sequences, logprobs = step(6, 4)
    bare = [replace(each, ref_logprobs=None) for each in sequences]
    zero = [replace(each, ref_logprobs=np.zeros(len(each), dtype=np.float32)) for each in sequences]
    free, _, _ = shares(PreferenceTerm(reference=False), bare, logprobs)
    assert free == pytest.approx(shares(PreferenceTerm(), zero, logprobs)[0])
    with pytest.raises(DataError):
        shares(PreferenceTerm(), bare, logprobs)


def test_a_torn_pair_is_an_error():
    sequences, logprobs = step(7, 4)
    torn = [replace(each, unit=at) for at, each in enumerate(sequences)]
    with pytest.raises(DataError):
        shares(PreferenceTerm(), torn, logprobs)


OBJECTIVES = {
    **{name: PreferenceTerm(losses={name: 1.0}, params=PreferenceParams(label_smoothing=0.1)) for name in PAIR_LOSSES},
    "mpo": PreferenceTerm(losses={"sigmoid": 0.8, "bco_pair": 0.2}, ld_alpha=0.5, use_weighting=True),
    "kto": PreferenceTerm(losses={"kto": 1.0}, kl=0.1),
    "reward model": BradleyTerryTerm(center_rewards_coefficient=0.01),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 5), most=st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=5, deadline=None)
def test_loss_gradient_and_metrics_are_equal_for_any_split(name, seed, count, most):
    sequences, logprobs = step(seed, 2 * count, labelled=name == "kto")
    objective = pickle.loads(pickle.dumps(OBJECTIVES[name]))
    whole, apart = shares(objective, sequences, logprobs), shares(objective, sequences, logprobs, most)
    assert apart[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    assert apart[1] == pytest.approx(whole[1], rel=1e-4, abs=1e-5)
    for one, other in zip(whole[2], apart[2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_reward_models_score_is_the_value_at_the_last_token():
    sequences, values = step(8, 4)
    loss, metrics, gradient = shares(BradleyTerryTerm(), sequences, values)
    scores = [float(each[-1]) for each in values]
    deltas = [scores[0] - scores[1] - 0.3, scores[2] - scores[3] - 0.3]
    assert loss == pytest.approx(np.mean([math.log(1 + math.exp(-d)) for d in deltas]), rel=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(np.mean(deltas) + 0.3, rel=1e-4)
    assert metrics["rewards/accuracies"] == np.mean([scores[0] > scores[1], scores[2] > scores[3]])
    assert all((each[:-1] == 0).all() and each[-1] != 0 for each in gradient)
