"""Divergences give TRL's numbers and gradients on the same ragged batch: `./run test-engines trl`."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from roll_core.data.pack import pack
from roll_core.spec.train import TokenOutputs
from roll_core.types import TrainSequence
from roll_modeling.logprobs import HeadRequest, LinearHead, compared
from roll_pipeline_distill.divergences import STREAM, DistillationTerm, divergence, with_tail

pytestmark = pytest.mark.engine("trl")

LENGTHS = (5, 3, 8)
"""Tokens of sequences; the first two are a prompt."""
VOCABULARY, TEMPERATURE = 11, 1.7
NUM_TRAINED = sum(LENGTHS) - 2 * len(LENGTHS)
BETAS = [("forward_kl", 0.0), ("reverse_kl", 1.0), ("js_divergence", 0.5), ("js_divergence", 0.1)]
"""TRL's β = 0 and β = 1 are the forward and the reverse KL, which have names of their own here."""


def options(kind, beta):
    return {"kind": kind, "beta": beta if kind == "js_divergence" else 0.5}


@pytest.mark.parametrize(("kind", "beta"), BETAS)
def test_divergences_over_all_tokens_are_those_of_gkd(kind, beta):
    """`GKDTrainer.generalized_jsd_loss` on padded logits, averaged over the responses' tokens."""
    trl = pytest.importorskip("trl.experimental.gkd")
    generator = torch.Generator().manual_seed(0)
    teacher_TV, own_TV = (2 * torch.randn(sum(LENGTHS), VOCABULARY, generator=generator) for _ in range(2))
    trained_T = torch.cat([torch.arange(length) > 1 for length in LENGTHS])
    theirs_TV, ours_TV = own_TV.clone().requires_grad_(), own_TV.clone().requires_grad_()

    padded = [
        torch.nn.utils.rnn.pad_sequence(each.split(LENGTHS), batch_first=True)
        for each in (theirs_TV, teacher_TV, torch.where(trained_T, 0, -100))
    ]
    labels = torch.where(torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None], padded[2], -100)
    expected = trl.GKDTrainer.generalized_jsd_loss(
        *padded[:2], labels, beta, TEMPERATURE, num_items_in_batch=NUM_TRAINED
    )
    expected.backward()

    starts = np.cumsum([0, *LENGTHS])
    teacher_logp_TV = torch.log_softmax(teacher_TV / TEMPERATURE, dim=1).numpy()
    sequences = []
    for at, length in enumerate(LENGTHS):
        mask = np.arange(length) > 1
        sequences.append(
            TrainSequence(
                id=str(at),
                tokens=np.zeros(length, dtype=np.int64),
                loss_mask=mask,
                group=at,
                streams={STREAM: mask.astype(np.float32)},
                gather_ids=np.tile(np.arange(VOCABULARY), (length, 1)),
                teacher_logprobs=teacher_logp_TV[starts[at] : starts[at + 1]],
            )
        )
    (micro,) = pack(sequences)
    term = DistillationTerm(tail="drop", temperature=TEMPERATURE, **options(kind, beta))
    outputs = TokenOutputs(gathered_logprobs_TK=torch.log_softmax(ours_TV / TEMPERATURE, dim=1))
    found = term(outputs, micro)
    found.loss.backward()
    torch.testing.assert_close(found.loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours_TV.grad, theirs_TV.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "beta"), BETAS)
def test_comparisons_of_heads_equal_the_distillation_trainer(kind, beta):
    """`_chunked_divergence_loss`, with a teacher of another hidden size, biases, a scale and a softcap."""
    trl = pytest.importorskip("trl.trainer.distillation_trainer")
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, weight, bias = normal(2, 6, 8), normal(VOCABULARY, 8), normal(VOCABULARY)
    other_hidden, other_weight = normal(2, 6, 12), normal(VOCABULARY, 12)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])

    theirs = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    expected, _, count = trl._chunked_divergence_loss(
        theirs[0],
        other_hidden,
        theirs[1],
        other_weight,
        mask,
        beta,
        student_lm_head_bias=theirs[2],
        teacher_logit_scale=0.5,
        student_final_logit_softcapping=5.0,
        temperature=TEMPERATURE,
    )
    expected.backward()

    ours = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    weights_N = mask.flatten() / count
    values_N = compared(
        LinearHead(weight=ours[1], bias=ours[2], softcap=5.0),
        ours[0].flatten(0, 1),
        LinearHead(weight=other_weight, scale=0.5),
        other_hidden.flatten(0, 1),
        partial(divergence, **options(kind, beta)),
        HeadRequest(temperature=TEMPERATURE, chunk_tokens=5),
        weights_N,
    )
    found = (values_N * weights_N).sum()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_the_bucket_of_the_tail_is_that_of_sdpo(alpha):
    """`compute_divergence` of `add_tail_bucket`, over the student's most likely tokens. TRL's α is our `js_beta`."""
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    generator = torch.Generator().manual_seed(2)
    teacher_TV, own_TV = (torch.log_softmax(2 * torch.randn(6, VOCABULARY, generator=generator), dim=1) for _ in "pq")
    ids_TK = own_TV.topk(4, dim=1).indices
    teacher_TK, own_TK = teacher_TV.gather(1, ids_TK), own_TV.gather(1, ids_TK)
    expected = trl.compute_divergence(trl.add_tail_bucket(own_TK), trl.add_tail_bucket(teacher_TK), alpha)
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(alpha, "js_divergence")
    found = divergence(with_tail(teacher_TK, "bucket"), with_tail(own_TK, "bucket"), kind)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
