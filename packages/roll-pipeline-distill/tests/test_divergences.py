"""Divergences of distillation: by hand, against loops over tokens and ids, and by their properties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.data.pack import count_totals, pack
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.train import TokenOutputs
from roll_core.types import TrainSequence
from roll_pipeline_distill.config import Divergence
from roll_pipeline_distill.divergences import (
    STREAM,
    DistillationTerm,
    divergence,
    overlap,
    sampled_advantages,
    sampled_loss,
    with_tail,
)
from roll_testing.errors import raises_error
from shared_tests.deterministic_cuda import deterministic_cuda

KINDS = get_args(Divergence)
P, Q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
LN2 = math.log(2)
MIDDLE = [0.375, 0.25, 0.375]
BY_HAND = {
    "forward_kl": 0.25 * LN2,
    "reverse_kl": 0.25 * LN2,
    "js_divergence": 0.5 * math.log(0.5 / 0.375) + 0.25 * math.log(0.25 / 0.375),
    "skewed_forward_kl": 0.5 * math.log(0.5 / 0.3) + 0.25 * math.log(0.25 / 0.45),
    "skewed_reverse_kl": 0.25 * math.log(0.25 / 0.45) + 0.5 * math.log(0.5 / 0.3),
    "adaptive_kl": 0.25 * LN2,
}
"""With weights of 0.2: 0.2 * 0.5 + 0.8 * 0.25 = 0.3 and 0.2 * 0.25 + 0.8 * 0.5 = 0.45. JS with equal weights."""


def logs(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_by_hand(kind):
    found = divergence(logs(P), logs(Q), kind, skew=0.2)
    assert found.tolist() == pytest.approx([BY_HAND[kind]])


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_have_deterministic_kernels_on_cuda(kind):
    student = logs(Q).requires_grad_()
    with deterministic_cuda():
        divergence(logs(P), student, kind).sum().backward()
    assert student.grad.isfinite().all()


def test_adaptive_kl_weighs_directions_by_gaps_of_head_and_tail():
    # The head up to 0.5 is the first id alone: gap 0.2. The others have gaps 0.3 and 0.1.
    teacher, student = [0.6, 0.3, 0.1], [0.8, 0.0001, 0.1999]
    forward, reverse = (
        sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))
        for one, other in ((teacher, student), (student, teacher))
    )
    head, tail = 0.2, 0.2999 + 0.0999
    expected = (head * forward + tail * reverse) / (head + tail)
    assert divergence(logs(teacher), logs(student), "adaptive_kl").tolist() == pytest.approx([expected])


def test_tails_by_hand():
    two = logs([0.5, 0.2])
    assert with_tail(two, "bucket").exp().tolist() == [pytest.approx([0.5, 0.2, 0.3])]
    assert with_tail(two, "renormalise").exp().tolist() == [pytest.approx([5 / 7, 2 / 7])]
    assert with_tail(two, "drop").exp().tolist() == [pytest.approx([0.5, 0.2])]
    whole = torch.tensor([[0.5, 0.5000001]]).log()
    assert with_tail(whole, "bucket", 1e-4).exp()[0, 2].item() == pytest.approx(1e-4, rel=1e-2)


def test_without_the_tail_the_sum_is_no_divergence():
    """The student has more mass on the support: the truncated sum is negative, the bucket's is not."""
    teacher, student = logs([0.3, 0.2]), logs([0.5, 0.4])
    by_tail = {
        tail: divergence(with_tail(teacher, tail), with_tail(student, tail), "forward_kl").item() for tail in TAILS
    }
    assert by_tail["drop"] == pytest.approx(0.3 * math.log(0.6) + 0.2 * math.log(0.5))
    assert by_tail["drop"] < 0 < by_tail["renormalise"] < by_tail["bucket"]
    assert by_tail["bucket"] == pytest.approx(by_tail["drop"] + 0.5 * math.log(5))


TAILS = ("drop", "renormalise", "bucket")


def by_loops(teacher, student, kind, tail, beta, skew, head):
    """The same for one token, by scalars of autograd."""
    p, q = ([each.exp() for each in row] for row in (teacher, student))
    if tail == "bucket":
        p, q = [*p, 1 - sum(p)], [*q, 1 - sum(q)]
    elif tail == "renormalise":
        p, q = [each / sum(p) for each in p], [each / sum(q) for each in q]

    def kl(one, other):
        return sum(a * (a.log() - b.log()) for a, b in zip(one, other, strict=True))

    def mixed(one, other, share):
        return [share * a + (1 - share) * b for a, b in zip(one, other, strict=True)]

    if kind == "js_divergence":
        middle = mixed(p, q, beta)
        return beta * kl(p, middle) + (1 - beta) * kl(q, middle)
    if kind == "adaptive_kl":
        mass, gaps = 0.0, [0.0, 0.0]
        for at in sorted(range(len(p)), key=lambda i: -p[i].item()):
            gaps[mass >= head] += abs(p[at].item() - q[at].item())
            mass += p[at].item()
        return (gaps[0] * kl(p, q) + gaps[1] * kl(q, p)) / sum(gaps)
    pairs = {
        "forward_kl": (p, q),
        "reverse_kl": (q, p),
        "skewed_forward_kl": (p, mixed(p, q, skew)),
        "skewed_reverse_kl": (q, mixed(q, p, skew)),
    }
    return kl(*pairs[kind])


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_those_of_loops(kind, tail):
    generator = torch.Generator().manual_seed(3)
    z_PQ = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64) * 2
    teacher, student = z_PQ.log_softmax(-1)[:, :, :4]
    student.requires_grad_()
    found = divergence(with_tail(teacher, tail), with_tail(student, tail), kind, beta=0.3, skew=0.2, head_mass=0.6)
    expected = torch.stack([by_loops(p, q, kind, tail, 0.3, 0.2, 0.6) for p, q in zip(teacher, student, strict=True)])
    torch.testing.assert_close(found, expected)
    slopes = torch.randn(6, generator=generator, dtype=torch.float64)
    one, other = (torch.autograd.grad(each, student, slopes, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(one, other)


@given(seed=st.integers(0, 10_000), kind=st.sampled_from(KINDS), k=st.integers(1, 12), scale=st.floats(0.1, 8))
def test_bucket_divergences_bound_the_vocabulary_from_below(seed, kind, k, scale):
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(2, 3, 12, generator=generator, dtype=torch.float64) * scale).log_softmax(-1)
    some = divergence(with_tail(teacher[:, :k], "bucket", 1e-12), with_tail(student[:, :k], "bucket", 1e-12), kind)
    # The bucket's probability is 1 - Σ p: rounding changes its logarithm by 1e-15 of 1 / probability.
    least = torch.stack([teacher, student])[..., k:].exp().sum(-1).amin(0)
    rounding = 1e-9 + (1e-15 / least.clamp(min=1e-12) if k < 12 else 0)
    assert (some > -rounding).all()
    same = divergence(with_tail(teacher[:, :k], "bucket"), with_tail(teacher[:, :k], "bucket"), kind)
    torch.testing.assert_close(same, torch.zeros(3, dtype=torch.float64))
    if kind != "adaptive_kl":  # its weights depend on the support
        whole = divergence(teacher, student, kind)
        assert (some <= whole + rounding).all()
    if k == 12 and kind != "adaptive_kl":
        torch.testing.assert_close(some, whole)


def test_only_equal_distributions_have_no_divergence():
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 20, 5, generator=generator).log_softmax(-1)
    for kind in KINDS:
        assert (divergence(teacher, student, kind) > 1e-5).all()


def test_an_unknown_divergence_is_refused():
    with raises_error(UnsupportedError, "alpha_divergence", "forward_kl"):
        divergence(logs(P), logs(Q), "alpha_divergence")


# -- sampled tokens


def test_advantages_of_sampled_tokens_by_hand():
    student = torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0])
    teacher = torch.tensor([0.0, -1.5, -1.0, 0.0, -4.0])
    mask, segments = torch.tensor([0, 1, 1, 0, 1]).bool(), torch.tensor([0, 0, 0, 1, 1])

    def advantages(**options):
        return sampled_advantages(student, teacher, mask, segments, **options).tolist()

    assert advantages() == [0, -0.5, 1, 0, -3]
    assert advantages(discount=0.5) == [0, 0, 1, 0, -3]
    assert advantages(clip=0.75) == [0, -0.5, 0.75, 0, -0.75]


def test_sampled_losses_have_the_reverse_kl_gradient():
    """Exactly, over all tokens: the sum of Q(y) times the gradient of the loss of y is the gradient of KL(Q || P)."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    z = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    student = z.log_softmax(-1)
    (expected,) = torch.autograd.grad(
        divergence(teacher[None], student[None], "reverse_kl").sum(), z, retain_graph=True
    )
    probabilities = student.detach().exp()
    (of_loss,) = torch.autograd.grad((probabilities * sampled_loss(student, teacher)).sum(), z, retain_graph=True)
    torch.testing.assert_close(of_loss, expected)
    # As an advantage of the policy gradient: - A * grad log Q(y).
    advantages = teacher - student.detach()
    (of_policy,) = torch.autograd.grad((-probabilities * advantages * student).sum(), z, retain_graph=True)
    torch.testing.assert_close(of_policy, expected)
    # The plain log-ratio as a loss has none.
    (of_k1,) = torch.autograd.grad((probabilities * (student - teacher)).sum(), z)
    torch.testing.assert_close(of_k1, torch.zeros(7, dtype=torch.float64))


def test_teacher_samples_have_the_forward_kl_and_its_gradient():
    """Exactly, over all tokens: P(y) times the loss of y. By hand for one: log 0.5 - log 0.25."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    z = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    student = z.log_softmax(-1)
    expected = divergence(teacher[None], student[None], "forward_kl").sum()
    found = (teacher.exp() * sampled_loss(student, teacher, "forward_kl")).sum()
    torch.testing.assert_close(found, expected)
    one, other = (torch.autograd.grad(each, z, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(one, other)
    assert sampled_loss(logs(Q)[0], logs(P)[0], "forward_kl").tolist() == pytest.approx([LN2, 0, -LN2])


# -- the term


def batch_of(seed, lengths, k=3, vocabulary=11):
    rng = np.random.default_rng(seed)
    found = []
    for index, length in enumerate(lengths):
        mask = np.arange(length) >= min(2, length - 1) if index != 1 else np.zeros(length, np.bool_)
        mask[0] = False
        logp = np.log(rng.dirichlet(np.ones(vocabulary), length)).astype(np.float32)
        ids = np.argsort(-logp, axis=1)[:, :k]
        found.append(
            TrainSequence(
                id=str(index),
                tokens=rng.integers(0, vocabulary, length),
                loss_mask=mask,
                gather_ids=ids,
                teacher_logprobs=np.take_along_axis(logp, ids, 1),
                streams={STREAM: (mask * rng.uniform(0.5, 2, length)).astype(np.float32)},
            )
        )
    return found


def loss_of(term, micros, table, **more):
    """Loss and gradient with a table of logits per token as the student."""
    table = table.clone().requires_grad_()
    loss, metrics = torch.zeros(()), {}
    for micro in micros:
        logp = table[micro.tokens_T].log_softmax(-1)
        outputs = TokenOutputs(
            gathered_logprobs_TK=logp.gather(1, micro.gather_ids_TK), topk_ids_TK=logp.topk(3).indices, **more
        )
        found = term(outputs, micro)
        loss = loss + found.loss
        for name, value in found.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    (gradient,) = torch.autograd.grad(loss, table)
    return loss.item(), gradient, metrics


@pytest.mark.parametrize("kind", KINDS)
def test_term_is_a_weighted_token_mean_for_any_split(kind):
    batch = batch_of(0, [5, 4, 2, 7, 3])
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(2))
    term = DistillationTerm(kind=kind, overlap=3)
    whole = loss_of(term, pack(batch), table)
    split = loss_of(term, pack(batch, totals=count_totals(batch), max_sequences=2), table)
    assert split[0] == pytest.approx(whole[0], rel=1e-6)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-6, atol=1e-8)
    assert split[2] == pytest.approx(whole[2], rel=1e-5)
    total, weight, overlap, mass = 0.0, 0.0, 0.0, 0.0
    for each in batch:
        for at, (token, w) in enumerate(zip(each.tokens, each.streams[STREAM], strict=True)):
            if w:
                logp = table[int(token)].log_softmax(-1)
                student, teacher = logp[each.gather_ids[at]], torch.from_numpy(each.teacher_logprobs[at])
                total += w * by_loops(teacher, student, kind, "bucket", 0.5, 0.1, 0.5).item()
                overlap += w * len(set(logp.topk(3).indices.tolist()) & set(each.gather_ids[at].tolist())) / 3
                mass += w * student.exp().sum().item()
                weight += w
    assert whole[0] == pytest.approx(total / weight, rel=1e-5)
    assert whole[2]["divergence"] == pytest.approx(total / weight, rel=1e-5)
    assert whole[2]["overlap"] == pytest.approx(overlap / weight, rel=1e-5)
    assert whole[2]["student_mass"] == pytest.approx(mass / weight, rel=1e-5)


def test_the_overlap_counts_equal_ids_by_hand():
    ids, others = torch.tensor([[3, 1, 2], [9, 0, 4]]), torch.tensor([[2, 7, 3], [5, 6, 8]])
    assert overlap(ids, others).tolist() == pytest.approx([2 / 3, 0.0])
    assert overlap(ids, ids.flip(1)).tolist() == [1.0, 1.0]


def test_clipped_tokens_have_no_gradient_and_a_full_metric():
    batch = batch_of(0, [6])
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(2)) * 4
    free, low = (loss_of(DistillationTerm(clip=clip), pack(batch), table) for clip in (None, 1e-3))
    assert low[0] == pytest.approx(1e-3)
    assert low[1].abs().max() == 0
    assert low[2]["divergence"] == free[2]["divergence"] == pytest.approx(free[0])


def test_values_outside_of_the_stream_have_no_influence():
    batch = batch_of(0, [6, 4])
    (micro,) = pack(batch)
    logp = (
        torch.randn(10, 11, generator=torch.Generator().manual_seed(0)).log_softmax(-1).gather(1, micro.gather_ids_TK)
    )
    spoilt = torch.where((micro.streams[STREAM] == 0)[:, None], torch.nan, logp).requires_grad_()
    found = DistillationTerm()(TokenOutputs(gathered_logprobs_TK=spoilt), micro).loss
    assert found.item() == DistillationTerm()(TokenOutputs(gathered_logprobs_TK=logp), micro).loss.item()
    (gradient,) = torch.autograd.grad(found, spoilt)
    assert torch.isfinite(gradient).all()


def test_a_batch_without_a_teacher_is_refused():
    (micro,) = pack([replace(each, teacher_logprobs=None) for each in batch_of(0, [4])])
    with raises_error(DataError, "teacher_logprobs"):
        DistillationTerm()(TokenOutputs(gathered_logprobs_TK=torch.zeros(4, 3)), micro)
