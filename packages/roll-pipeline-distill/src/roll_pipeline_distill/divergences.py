"""Divergences between a teacher's and a student's next-token distributions, and their credit.

P is the teacher, Q the student. Divergences are computed on a support of K token ids per position, given as logprobs of
both models at one temperature. Gradients flow into the student's.

    teacher's ids, or the student's ──► logprobs of both [T, K] ──► tail: K or K + 1 columns ──► divergence [T]

T flat tokens of a microbatch, K ids of the support, J = K or K + 1 columns with a tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, get_args

import torch

from roll_core.algorithms.aggregate import stream_weights, weighted_sum
from roll_core.algorithms.segments import reverse_discounted_sum, running_sums
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.train import Comparison, LossOutput, WantedOutputs
from roll_pipeline_distill.config import Divergence, Tail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.train import MicroBatch, TokenOutputs

STREAM = "distillation"
"""Name of the weights and of the objective's term."""


def with_tail(logp_TK: Tensor, tail: Tail, floor: float = 1e-5) -> Tensor:
    """Logprobs of the support and of what lies outside of it, `[T, J]`.

    * `bucket`: the remaining mass is one more column, at least `floor`. The divergence of the resulting K + 1 classes
      is a lower bound of that of the whole vocabulary (data-processing inequality), and non-negative.
    * `renormalise`: divide by the mass of the support. The student's mass outside of the support is then free.
    * `drop`: ignore the rest. The sum is then no divergence: it is negative where Q has more mass than P. verl clamps
      it at 0, which was active in most steps of a reported run (verl issue 7856).
    """
    if tail == "drop":
        return logp_TK
    mass_T1 = torch.logsumexp(logp_TK, dim=1, keepdim=True)
    if tail == "renormalise":
        return logp_TK - mass_T1
    # Rounding may leave a mass slightly above 1.
    rest_T1 = torch.log(-torch.expm1(mass_T1.clamp(max=math.log1p(-floor))))
    return torch.cat([logp_TK, rest_T1], dim=1)


def divergence(
    teacher_TJ: Tensor,
    student_TJ: Tensor,
    kind: Divergence,
    *,
    beta: float = 0.5,
    skew: float = 0.1,
    head_mass: float = 0.5,
) -> Tensor:
    """Divergence of each token, `[T]`, in nats, between logprobs on equal columns.

    * `forward_kl`: `KL(P || Q)`, mode-covering (arXiv:1503.02531, without the factor temperature²; so TRL).
    * `reverse_kl`: `KL(Q || P)`, mode-seeking (MiniLLM, arXiv:2306.08543).
    * `js_divergence`: `β KL(P || M) + (1 - β) KL(Q || M)` with `M = β P + (1 - β) Q` (GKD, arXiv:2306.13649 eq. 1). TRL
      defines β = 0 and β = 1 as the forward and the reverse KL, which are the limits of the divergence over β and over
      1 - β. They have names of their own here.
    * `skewed_forward_kl`: `KL(P || λ P + (1 - λ) Q)`, and `skewed_reverse_kl`: `KL(Q || (1 - λ) P + λ Q)`, with λ =
      `skew` (DistiLLM, arXiv:2402.03898).
    * `adaptive_kl`: `(g_h KL(P || Q) + g_t KL(Q || P)) / (g_h + g_t)` (AKL, arXiv:2404.02657). `g_h` is the sum of
      |P - Q| over the teacher's most likely tokens up to `head_mass`, `g_t` over the others; neither has gradients.
    """
    if kind == "forward_kl":
        return _kl(teacher_TJ, student_TJ)
    if kind == "reverse_kl":
        return _kl(student_TJ, teacher_TJ)
    if kind == "js_divergence":
        middle_TJ = _mixture(teacher_TJ, student_TJ, beta)
        return beta * _kl(teacher_TJ, middle_TJ) + (1 - beta) * _kl(student_TJ, middle_TJ)
    if kind == "skewed_forward_kl":
        return _kl(teacher_TJ, _mixture(teacher_TJ, student_TJ, skew))
    if kind == "skewed_reverse_kl":
        return _kl(student_TJ, _mixture(student_TJ, teacher_TJ, skew))
    if kind == "adaptive_kl":
        share_T = _head_share(teacher_TJ.exp(), student_TJ.detach().exp(), head_mass)
        return share_T * _kl(teacher_TJ, student_TJ) + (1 - share_T) * _kl(student_TJ, teacher_TJ)
    raise UnsupportedError(f"unknown kd_objective {kind!r}, expected {', '.join(get_args(Divergence))}")


def _kl(logp_TJ: Tensor, logq_TJ: Tensor) -> Tensor:
    return (logp_TJ.exp() * (logp_TJ - logq_TJ)).sum(dim=1)


def _mixture(logp_TJ: Tensor, logq_TJ: Tensor, share: float) -> Tensor:
    """Logprobs of `share * p + (1 - share) * q`."""
    return torch.logaddexp(logp_TJ + math.log(share), logq_TJ + math.log1p(-share))


def _head_share(p_TJ: Tensor, q_TJ: Tensor, head_mass: float) -> Tensor:
    """Share of the head in the sum of |p - q|. The head has the fewest columns with mass `head_mass` of p."""
    sorted_TJ, order_TJ = p_TJ.sort(dim=1, descending=True)
    in_head_TJ = running_sums(sorted_TJ) - sorted_TJ < head_mass
    gaps_TJ = (p_TJ - q_TJ).abs().gather(1, order_TJ)
    return (gaps_TJ * in_head_TJ).sum(dim=1) / gaps_TJ.sum(dim=1).clamp(min=torch.finfo(p_TJ.dtype).tiny)


def sampled_advantages(
    student_T: Tensor,
    teacher_T: Tensor,
    mask_T: Tensor,
    segments_T: Tensor,
    *,
    clip: float | None = None,
    discount: float = 0.0,
) -> Tensor:
    """Advantages of on-policy distillation, `[T]`: `A_t = sum_{j >= t} discount^(j - t) * (log P(y_j) - log Q(y_j))`.

    Each term is one sample of `-KL(Q || P)` at its position (Thinking Machines, "On-Policy Distillation", 2025, where
    `discount` is `kl_discount_factor`, 0). The student's logprobs are those of the policy that sampled, without
    gradients. `clip` bounds the absolute value of a term. 0 outside the mask; tokens outside of it are no terms.
    """
    terms_N = (teacher_T - student_T)[mask_T]
    if clip is not None:
        terms_N = terms_N.clamp(-clip, clip)
    advantages_T = torch.zeros_like(student_T)
    advantages_T[mask_T] = reverse_discounted_sum(terms_N, segments_T[mask_T], discount).to(student_T.dtype)
    return advantages_T


def sampled_loss(student_T: Tensor, teacher_T: Tensor, kind: Divergence = "reverse_kl") -> Tensor:
    """Estimate of each token's divergence from the logprobs of one sample, `[T]`.

    * `reverse_kl`, on samples of the student: `0.5 * (log Q(y) - log P(y))²`, the estimator k2 of `KL(Q || P)`. Its
      gradient has the expectation of the KL's gradient. The gradient of `log Q - log P` itself (k1) does not contain
      the teacher, and its expectation is zero.
    * `forward_kl`, on samples of the teacher: `log P(y) - log Q(y)`, the estimator k1 of `KL(P || Q)`. Its gradient is
      that of the negative log-likelihood, and unbiased: sequence-level distillation (arXiv:1606.07947).
    """
    if kind == "forward_kl":
        return teacher_T - student_T
    return 0.5 * (student_T - teacher_T).square()


def overlap(ids_TK: Tensor, others_TK: Tensor) -> Tensor:
    """Share of each token's `ids` that are among its `others`, `[T]`."""
    sorted_TK = others_TK.sort(dim=1).values
    places_TK = torch.searchsorted(sorted_TK, ids_TK.contiguous()).clamp(max=others_TK.shape[1] - 1)
    return (sorted_TK.gather(1, places_TK) == ids_TK).float().mean(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationTerm:
    """Divergence from the teacher, averaged over tokens by the weights of the stream `distillation`.

    Reads `gather_ids` and `teacher_logprobs`. Metrics, averaged alike:

    * `divergence`: the loss per token before `clip`.
    * `teacher_mass`, `student_mass`: probability of the support (not for sampled tokens).
    * `overlap`: share of the support that is among the student's K most likely tokens, if `overlap`.
    """

    kind: Divergence = "forward_kl"
    tail: Tail = "bucket"
    sampled: bool = False
    """The support is the sampled token alone: `sampled_loss`."""
    beta: float = 0.5
    skew: float = 0.1
    head_mass: float = 0.5
    clip: float | None = None
    """Upper bound of a token's loss. Tokens above it have no gradient."""
    head: str = ""
    """File with the teacher's head: compare over the whole vocabulary, with `teacher_hidden`."""
    overlap: int = 0
    """K of the metric `overlap`; 0 omits it. Requires a strategy with `capabilities.topk`."""
    temperature: float = 1.0

    @property
    def want(self) -> WantedOutputs:
        """Logprobs of the support for the masked tokens, or their divergences over the whole vocabulary."""
        if self.head:
            comparison = Comparison(head=self.head, function=self._divergence, stream=STREAM)
            return WantedOutputs(comparison=comparison, masked_only=True, temperature=self.temperature)
        return WantedOutputs(gathered=True, masked_only=True, topk=self.overlap, temperature=self.temperature)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. Raises `DataError` if the batch has no teacher."""
        weights_T = stream_weights(micro, STREAM)
        if self.head:
            if outputs.compared_T is None:
                raise DataError("distillation over the whole vocabulary needs teacher_hidden, but the batch has none")
            return self._weighted(outputs.compared_T, weights_T, {})
        student_TK, teacher_TK = outputs.gathered_logprobs_TK, micro.teacher_logprobs_TK
        if student_TK is None or teacher_TK is None or micro.gather_ids_TK is None:
            raise DataError("distillation needs gather_ids and teacher_logprobs, but the batch has none")
        used_T1 = (weights_T != 0)[:, None]
        student_TK, teacher_TK = torch.where(used_T1, student_TK, 0.0), torch.where(used_T1, teacher_TK, 0.0)
        values_T = self._values(teacher_TK, student_TK)
        metrics: dict[str, Tensor] = {}
        if not self.sampled:
            metrics |= {"teacher_mass": teacher_TK.exp().sum(dim=1), "student_mass": student_TK.exp().sum(dim=1)}
        if outputs.topk_ids_TK is not None and self.overlap:
            metrics["overlap"] = overlap(micro.gather_ids_TK, outputs.topk_ids_TK)
        return self._weighted(values_T, weights_T, metrics)

    def _weighted(self, values_T: Tensor, weights_T: Tensor, metrics: Mapping[str, Tensor]) -> LossOutput:
        """Clip, and average by the weights."""
        loss_T = values_T if self.clip is None else values_T.clamp(max=self.clip)
        values = {"divergence": values_T, **metrics}
        means = {name: weighted_sum(each_T.detach(), weights_T) for name, each_T in values.items()}
        return LossOutput(loss=weighted_sum(loss_T, weights_T), metrics=means)

    def _values(self, teacher_TK: Tensor, student_TK: Tensor) -> Tensor:
        if self.sampled:
            return sampled_loss(student_TK[:, 0], teacher_TK[:, 0], self.kind)
        return self._divergence(with_tail(teacher_TK, self.tail), with_tail(student_TK, self.tail))

    @property
    def _divergence(self) -> partial[Tensor]:
        """`divergence` with the options of the term."""
        return partial(divergence, kind=self.kind, beta=self.beta, skew=self.skew, head_mass=self.head_mass)
