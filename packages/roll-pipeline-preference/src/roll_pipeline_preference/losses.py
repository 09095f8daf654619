"""Preference losses: one loss per pair of responses, or per labelled response. `PreferenceTerm` averages them.

P pairs, S labelled responses. `w` is the chosen and `l` the rejected response. `logp` is the sum of a response's
logprobs under the policy, `r = logp - logp_ref` its log-ratio to the reference, and `n` its number of tokens.

Names and constants are those of TRL (1.16). Every loss is a mean over the pairs of the whole optimizer step. TRL and
OpenRLHF average over each microbatch, so a pair of a smaller microbatch weighs more there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn.functional import logsigmoid, relu

if TYPE_CHECKING:
    from torch import Tensor

FDivergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceParams:
    """Constants of the losses, from the config keys of the same names."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: FDivergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    f_divergence_max_exponent: float = 80.0
    simpo_gamma: float = 0.5
    discopop_tau: float = 0.05
    orpo_max_mean_logprob: float = -1e-6
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The chosen, or the rejected, responses of P pairs."""

    logps_P: Tensor
    """Sum of logprobs under the policy."""
    ratios_P: Tensor
    """Sum of logprobs under the policy minus the reference; the same as `logps_P` without a reference."""
    lengths_P: Tensor
    """Number of tokens in the loss."""

    @property
    def mean_logps_P(self) -> Tensor:
        """Mean logprob of a response's tokens."""
        return self.logps_P / self.lengths_P


PairLoss = Callable[[Responses, Responses, PreferenceParams], "Tensor"]
"""Loss of each pair, from its chosen and its rejected response."""


# -- losses of pairs ---------------------------------------------------------------------------------------------------


def sigmoid(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """DPO (arXiv:2305.18290 eq. 7): `-log sigmoid(beta (r_w - r_l))`.

    With `label_smoothing` e it is cDPO (Mitchell 2023): `-(1 - e) log sigmoid(x) - e log sigmoid(-x)`, as in OpenRLHF.
    TRL ignores `label_smoothing` for this loss.
    """
    return _smoothed(params.beta * _delta(chosen, rejected, params), params)


def sigmoid_norm(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """Length-normalised DPO (arXiv:2411.15124 §5.1): `-log sigmoid(beta (r_w/n_w - r_l/n_l))`.

    `label_smoothing` as in `sigmoid`.
    """
    return _smoothed(params.beta * _mean_delta(chosen, rejected, params), params)


def robust(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """Robust DPO (arXiv:2403.00409 eq. 12): unbiased if a fraction e = `label_smoothing` of the pairs is flipped.

    `[-(1 - e) log sigmoid(x) + e log sigmoid(-x)] / (1 - 2e)` with `x = beta (r_w - r_l)`.
    """
    x_P, e = params.beta * _delta(chosen, rejected, params), params.label_smoothing
    return (-(1 - e) * logsigmoid(x_P) + e * logsigmoid(-x_P)) / (1 - 2 * e)


def ipo(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """IPO (arXiv:2310.12036 eq. 17) with log-ratios per token: `(r_w/n_w - r_l/n_l - 1/(2 beta))^2`.

    As in TRL; the authors confirmed the mean over tokens. `beta` is the paper's tau.
    """
    return (_mean_delta(chosen, rejected, params) - 1 / (2 * params.beta)).square()


def ipo_sum(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """IPO (arXiv:2310.12036 eq. 17) with summed log-ratios: `(r_w - r_l - 1/(2 beta))^2`, as in OpenRLHF and ROLL."""
    return (_delta(chosen, rejected, params) - 1 / (2 * params.beta)).square()


def hinge(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """SLiC's hinge loss on DPO's margin (arXiv:2305.10425, arXiv:2309.06657): `max(0, 1 - beta (r_w - r_l))`."""
    return relu(1 - params.beta * _delta(chosen, rejected, params))


def exo_pair(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """EXO for pairs (arXiv:2402.00856 eq. 16): the reverse KL of `(sigmoid(x), sigmoid(-x))` to `(1 - e, e)`.

    `x = beta (r_w - r_l)`, and e = `label_smoothing` must be positive.
    """
    x_P, e = params.beta * _delta(chosen, rejected, params), params.label_smoothing
    towards_P = x_P.sigmoid() * (logsigmoid(x_P) - math.log1p(-e))
    return towards_P + (-x_P).sigmoid() * (logsigmoid(-x_P) - math.log(e))


def nca_pair(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """NCA for pairs (arXiv:2402.05369 eq. 12).

    `-log sigmoid(beta r_w) - log sigmoid(-beta r_w) / 2 - log sigmoid(-beta r_l) / 2`.
    """
    w_P, l_P = params.beta * chosen.ratios_P, params.beta * rejected.ratios_P
    return -logsigmoid(w_P) - 0.5 * logsigmoid(-w_P) - 0.5 * logsigmoid(-l_P)


def bco_pair(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """BCO for pairs (arXiv:2404.04656 eq. 10): `-log sigmoid(beta r_w) - log sigmoid(-beta r_l)`.

    As in TRL's DPOTrainer, without the paper's reward shift (a running mean of both rewards).
    """
    return -logsigmoid(params.beta * chosen.ratios_P) - logsigmoid(-params.beta * rejected.ratios_P)


def sppo_hard(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """SPPO (arXiv:2405.00675 eq. 4.7) with win rates 1 and 0: `(r_w - 1/(2 beta))^2 + (r_l + 1/(2 beta))^2`."""
    target = 1 / (2 * params.beta)
    return (chosen.ratios_P - target).square() + (rejected.ratios_P + target).square()


def apo_zero(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """APO-zero (arXiv:2408.06266 eq. 7), for chosen responses better than the policy's.

    `1 - sigmoid(beta r_w) + sigmoid(beta r_l)`.
    """
    return 1 - (params.beta * chosen.ratios_P).sigmoid() + (params.beta * rejected.ratios_P).sigmoid()


def apo_down(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """APO-down (arXiv:2408.06266 eq. 8), for chosen responses worse than the policy's.

    `sigmoid(beta r_w) + 1 - sigmoid(beta (r_w - r_l))`.
    """
    delta_P = chosen.ratios_P - rejected.ratios_P
    return (params.beta * chosen.ratios_P).sigmoid() + 1 - (params.beta * delta_P).sigmoid()


def discopop(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """DiscoPOP's log-ratio modulated loss (arXiv:2406.08414 eq. 5), with m = sigmoid(x / `discopop_tau`).

    `-(1 - m) log sigmoid(x) + m exp(-x)` with `x = beta (r_w - r_l)`. `m exp(-x)` is computed as one exponential, which
    stays finite where TRL's product is NaN (x below -88).
    """
    x_P = params.beta * _delta(chosen, rejected, params)
    scaled_P = x_P / params.discopop_tau
    return -(-scaled_P).sigmoid() * logsigmoid(x_P) + (logsigmoid(scaled_P) - x_P).exp()


def simpo(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """SimPO (arXiv:2405.14734 eq. 6), without a reference: `-log sigmoid(beta (logp_w/n_w - logp_l/n_l) - gamma)`.

    `simpo_gamma` is absolute, as in TRL and the paper's formula. Its authors tune `gamma / beta`. `label_smoothing` as
    in `sigmoid`.
    """
    return _smoothed(params.beta * (chosen.mean_logps_P - rejected.mean_logps_P) - params.simpo_gamma, params)


def cpo(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """CPO's preference term (arXiv:2401.08417 eq. 3), without a reference: `-log sigmoid(beta (logp_w - logp_l))`.

    The paper's loss adds the term `sft`. `label_smoothing` as in `sigmoid`.
    """
    return _smoothed(params.beta * (chosen.logps_P - rejected.logps_P), params)


def orpo(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    """ORPO's odds ratio term (arXiv:2403.07691 eq. 6-7), without a reference: `-beta log sigmoid(o_w - o_l)`.

    `o = log(p / (1 - p))` with `p = exp(logp / n)`, a response's probability per token. `beta` is the paper's lambda.
    `logp / n` is at most `orpo_max_mean_logprob`. The paper's loss adds the term `sft`, which in TRL covers the tokens
    of prompts too.
    """
    return -params.beta * logsigmoid(_log_odds(chosen, params) - _log_odds(rejected, params))


PAIR_LOSSES: dict[str, PairLoss] = {
    loss.__name__: loss
    for loss in (
        sigmoid,
        sigmoid_norm,
        robust,
        ipo,
        ipo_sum,
        hinge,
        exo_pair,
        nca_pair,
        bco_pair,
        sppo_hard,
        apo_zero,
        apo_down,
        discopop,
        simpo,
        cpo,
        orpo,
    )
}


# -- losses of labelled responses --------------------------------------------------------------------------------------


def kto(ratios_S: Tensor, desirable_S: Tensor, kl: float, params: PreferenceParams) -> Tensor:
    """KTO (arXiv:2402.01306 eq. 7-8), on labelled responses.

    Desirable: `lambda_D (1 - sigmoid(beta (r - z)))`. Undesirable: `lambda_U (1 - sigmoid(beta (z - r)))`. The weights
    are `desirable_weight` and `undesirable_weight`. `z = max(0, mean r)` over prompts with responses to other prompts,
    without gradient: `kl`, an estimate over the whole optimizer step. TRL estimates it in each microbatch.
    """
    signs_S = torch.where(desirable_S, 1.0, -1.0)
    weights_S = torch.where(desirable_S, params.desirable_weight, params.undesirable_weight)
    return weights_S * (-params.beta * signs_S * (ratios_S - kl)).sigmoid()


def apo_zero_unpaired(ratios_S: Tensor, desirable_S: Tensor, kl: float, params: PreferenceParams) -> Tensor:
    """APO-zero (arXiv:2408.06266 eq. 7) on labelled responses: `kto` with `z = 0`."""
    return kto(ratios_S, desirable_S, 0.0, params)


LABELLED_LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


# -- reward models -----------------------------------------------------------------------------------------------------


def bradley_terry(chosen_P: Tensor, rejected_P: Tensor, margins_P: Tensor | float, center: float) -> Tensor:
    """Bradley-Terry loss of a reward model (arXiv:2203.02155 eq. 1) on the scores of both responses.

    `-log sigmoid(s_w - s_l - margin) + center (s_w + s_l)^2`: with the margin of Llama 2 (arXiv:2307.09288 eq. 2) and
    the auxiliary loss that centres scores at 0 (arXiv:2312.09244 §2), as in TRL.
    """
    return -logsigmoid(chosen_P - rejected_P - margins_P) + center * (chosen_P + rejected_P).square()


# -- parts -------------------------------------------------------------------------------------------------------------


def _smoothed(x_P: Tensor, params: PreferenceParams) -> Tensor:
    e = params.label_smoothing
    return -(1 - e) * logsigmoid(x_P) - e * logsigmoid(-x_P)


def _delta(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    return _divergence(chosen.ratios_P, params) - _divergence(rejected.ratios_P, params)


def _mean_delta(chosen: Responses, rejected: Responses, params: PreferenceParams) -> Tensor:
    chosen_P = _divergence(chosen.ratios_P, params) / chosen.lengths_P
    return chosen_P - _divergence(rejected.ratios_P, params) / rejected.lengths_P


def _divergence(ratios_P: Tensor, params: PreferenceParams) -> Tensor:
    """f-DPO (arXiv:2309.16240 table 1): `f'(u)` of the probability ratio `u = exp(r)`; `r` for `reverse_kl`.

    forward_kl: `1 - 1/u`. js_divergence: `log(2u / (1 + u))`. alpha_divergence: `(u^(a - 1) - 1) / (a - 1)` as in TRL,
    with a = `f_alpha_divergence_coef` = 1 - the paper's alpha: 1 is reverse_kl, 0 is forward_kl. Exponents are at most
    `f_divergence_max_exponent`; TRL clamps only those of alpha_divergence.
    """
    if params.f_divergence_type == "forward_kl":
        return 1 - (-ratios_P).clamp(max=params.f_divergence_max_exponent).exp()
    if params.f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(ratios_P)
    power = params.f_alpha_divergence_coef - 1
    if params.f_divergence_type == "reverse_kl" or abs(power) < 1e-6:
        return ratios_P
    return torch.expm1((power * ratios_P).clamp(max=params.f_divergence_max_exponent)) / power


def _log_odds(responses: Responses, params: PreferenceParams) -> Tensor:
    logps_P = responses.mean_logps_P.clamp(max=params.orpo_max_mean_logprob)
    return logps_P - torch.log(-torch.expm1(logps_P))
