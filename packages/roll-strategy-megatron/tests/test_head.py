"""Outputs and gradients of a head whose vocabulary is spread over ranks are those of plain torch in float64 on one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from head_programs import (
    Problem,
    comparison_and_gradients,
    head_and_gradients,
    most_bytes,
    other_model,
    reverse_kl,
    slopes_of_ids,
)

from roll_core.errors import UnsupportedError
from roll_modeling.logprobs import HeadRequest, LinearHead
from roll_strategy_megatron.head import VocabularyShare, share_of_head
from roll_testing.ranks import free_port


def problem_of(request, *, tokens=9, vocabulary=61, hidden=8, scale=1.0, seed=0, ids=0, factor=1.0, softcap=0.0):
    rng = np.random.default_rng(seed)
    return Problem(
        hidden_NH=rng.normal(size=(tokens, hidden)),
        weight_VH=rng.normal(size=(vocabulary, hidden)) * scale,
        targets_N=rng.integers(0, vocabulary, size=tokens),
        slopes_2N=rng.normal(size=(2, tokens)),
        request=request,
        ids_NK=rng.integers(0, vocabulary, size=(tokens, ids)) if ids else None,
        scale=factor,
        softcap=softcap,
    )


def in_float64(problem):
    """The same by autograd, from all logits at once."""
    request = problem.request
    hidden_NH, weight_VH = (
        torch.tensor(each.astype(np.float32).astype(np.float64), requires_grad=True)
        for each in (problem.hidden_NH, problem.weight_VH)
    )
    logits_NV = hidden_NH @ weight_VH.T * problem.scale
    if problem.softcap:
        logits_NV = problem.softcap * torch.tanh(logits_NV / problem.softcap)
    logp_NV = torch.log_softmax(logits_NV / request.temperature, dim=1)
    chosen_N = logp_NV.gather(1, torch.from_numpy(problem.targets_N)[:, None])[:, 0]
    entropy_N = -torch.xlogy(logp_NV.exp(), logp_NV.exp()).sum(dim=1)
    slopes_2N = torch.from_numpy(problem.slopes_2N.astype(np.float32))
    loss = (chosen_N * slopes_2N[0]).sum()
    if request.entropy and request.entropy_grad:
        # Differentiated as -sum p log p: xlogy has no gradient at 0.
        loss = loss - (logp_NV.exp() * logp_NV * slopes_2N[1][:, None]).sum()
    if problem.ids_NK is not None:
        given_NK = logp_NV.gather(1, torch.from_numpy(problem.ids_NK))
        loss = loss + (given_NK * slopes_of_ids(problem)).sum()
    loss.backward()
    outputs = {"logprobs": chosen_N.detach().numpy()}
    if request.entropy:
        outputs["entropy"] = entropy_N.detach().numpy()
    if request.topk:
        best = logp_NV.detach().topk(request.topk, dim=1)
        outputs |= {"topk_logprobs": best.values.numpy(), "topk_ids": best.indices.numpy()}
    if problem.ids_NK is not None:
        outputs["gathered_logprobs"] = given_NK.detach().numpy()
    return outputs, hidden_NH.grad.numpy(), weight_VH.grad.numpy()


@pytest.mark.parametrize(
    ("ranks", "request_", "shape"),
    [
        pytest.param(2, HeadRequest(entropy=True, topk=3, temperature=0.7, chunk_tokens=4), {}, id="two ranks"),
        pytest.param(2, HeadRequest(chunk_tokens=1), {}, id="logprobs alone, token by token"),
        pytest.param(3, HeadRequest(entropy=True, entropy_grad=False), {}, id="three ranks, all at once"),
        pytest.param(4, HeadRequest(entropy=True, topk=5), {"vocabulary": 5}, id="a rank with padding alone"),
        pytest.param(2, HeadRequest(entropy=True, topk=2), {"scale": 300.0}, id="nearly all probabilities are 0"),
        pytest.param(2, HeadRequest(entropy=True, topk=2), {"tokens": 0}, id="no tokens"),
        pytest.param(2, HeadRequest(topk=1, chunk_tokens=4), {}, id="the first choice alone"),
        pytest.param(4, HeadRequest(topk=1), {"vocabulary": 5}, id="the first choice, and a rank with padding alone"),
        pytest.param(2, HeadRequest(topk=1), {"tokens": 0}, id="the first choice of no tokens"),
        pytest.param(3, HeadRequest(entropy=True, temperature=0.7, chunk_tokens=4), {"ids": 5}, id="given ids"),
        pytest.param(
            4,
            HeadRequest(entropy=True, topk=3, temperature=0.7, chunk_tokens=4),
            {"vocabulary": 5, "factor": 0.5, "softcap": 1.5},
            id="scaled and soft-capped logits, and a rank with padding alone",
        ),
        pytest.param(4, HeadRequest(), {"vocabulary": 5, "ids": 5}, id="given ids, and a rank with padding alone"),
    ],
)
def test_outputs_and_gradients_are_those_of_one_rank_in_float64(host, ranks, request_, shape):
    problem = problem_of(request_, **shape)
    answers = host.run(head_and_gradients, ranks, free_port(), problem, num_ranks=ranks, timeout_s=60)
    outputs, of_hidden, of_weight = in_float64(problem)
    for found, _, _ in answers:
        assert found.keys() == outputs.keys()
        for name, expected in outputs.items():
            np.testing.assert_allclose(
                found[name], expected, rtol=1e-6, atol=2e-6 * shape.get("scale", 1.0), err_msg=name
            )
    hidden, weight = sum(each[1] for each in answers), np.concatenate([each[2] for each in answers])
    for name, one, other in (("hidden", hidden, of_hidden), ("weight", weight, of_weight)):
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= 2e-6 * np.linalg.norm(other) * shape.get("scale", 1.0), name


def test_argmax_token_is_the_first_of_equal_ones_on_any_rank(host):
    # Tokens 0 to 9 again as 10 to 19 and 20 to 29, on three ranks, which all find the same greatest logit.
    problem = problem_of(HeadRequest(topk=1), tokens=40, vocabulary=10)
    problem = replace(problem, weight_VH=np.tile(problem.weight_VH, (3, 1)))
    expected = (problem.hidden_NH @ problem.weight_VH[:10].T).argmax(axis=1)
    for outputs, _, _ in host.run(head_and_gradients, 3, free_port(), problem, num_ranks=3, timeout_s=60):
        assert outputs["topk_ids"][:, 0].tolist() == expected.tolist()


def test_a_chunk_of_a_share_of_the_logits_exists_at_once(host):
    tokens, vocabulary, chunk = 512, 4096, 16
    most = {}
    for size in (chunk, 2 * chunk, tokens):
        request = HeadRequest(entropy=True, chunk_tokens=size)
        problem = problem_of(request, tokens=tokens, vocabulary=vocabulary, hidden=4)
        most[size] = max(host.run(most_bytes, 2, free_port(), problem, num_ranks=2, timeout_s=60))
    share_of_chunk = chunk * vocabulary // 2 * 4
    # What grows with the chunk are its logits and one more of their size; the rest are gradients of the weight.
    assert most[2 * chunk] - most[chunk] == pytest.approx(2 * share_of_chunk, rel=0.05)
    assert most[chunk] < tokens * vocabulary // 2 * 4 / 8
    assert most[tokens] > 2 * tokens * vocabulary // 2 * 4


@pytest.mark.parametrize(
    ("ranks", "tokens", "vocabulary", "chunk"), [(2, 9, 61, 4), (3, 10, 61, None), (4, 6, 5, 3), (2, 0, 61, None)]
)
@pytest.mark.parametrize("ahead", [True, False], ids=["weights known", "weights unknown"])
def test_comparisons_over_shards_equal_plain_torch(host, ranks, tokens, vocabulary, chunk, ahead):
    """Values and gradients of a divergence from another model, whose head is spread over the same ranks."""
    problem = problem_of(HeadRequest(temperature=0.7, chunk_tokens=chunk), tokens=tokens, vocabulary=vocabulary)
    found = host.run(comparison_and_gradients, ranks, free_port(), problem, ahead, num_ranks=ranks)
    hidden_NH, weight_VH = (
        torch.tensor(each.astype(np.float32).astype(np.float64), requires_grad=True)
        for each in (problem.hidden_NH, problem.weight_VH)
    )
    other, other_NH = other_model(problem)
    own_NV = torch.log_softmax(hidden_NH @ weight_VH.T / 0.7, dim=1)
    values_N = reverse_kl(torch.log_softmax(other.logits(other_NH).double() / 0.7, dim=1), own_NV)
    (values_N * torch.from_numpy(problem.slopes_2N[0].astype(np.float32))).sum().backward()
    for values, _, _ in found:
        np.testing.assert_allclose(values, values_N.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(sum(each[1] for each in found), hidden_NH.grad.numpy(), atol=1e-5)
    np.testing.assert_allclose(np.concatenate([each[2] for each in found]), weight_VH.grad.numpy(), atol=1e-5)


def test_a_head_of_another_vocabulary_is_refused():
    head = LinearHead(weight=torch.zeros(6, 2))
    with pytest.raises(UnsupportedError):
        share_of_head(head, VocabularyShare(group=None, first=0, num_real=5), 5, 5)
