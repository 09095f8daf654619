"""Logprobs and entropies by chunks equal those from whole logits, which never come into being."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.spec.train import WantedOutputs
from roll_kernels import elementwise
from roll_modeling import logprobs
from roll_modeling.logprobs import (
    HeadRequest,
    LinearHead,
    any_head_outputs,
    compared,
    first_choice,
    head_outputs,
    read_head,
    write_head,
)
from roll_pipeline_distill.divergences import divergence
from roll_pipeline_distill.plans import ARRAYS
from roll_strategy_hf.config import HFTrainConfig
from roll_testing.errors import raises_error
from shared_tests.live_bytes import LiveBytes

N, V, H = 23, 37, 8


def inputs(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, H, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (N,), generator=generator)
    return hidden, weight, bias, targets, torch.randn(2, N, generator=generator)


def by_autograd(hidden, weight, bias, targets, temperature, scale, softcap):
    logits = (hidden @ weight.T + bias) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], torch.special.entr(logp.exp()).sum(dim=-1), logp


@pytest.fixture(params=["compiled", "torch"])
def kernels(request, monkeypatch):
    """With the compiled kernels, and as it is without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(elementwise, "available", lambda: False)
    else:
        assert elementwise.available()


@pytest.mark.parametrize("chunk", [None, 1, 5, 23])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.6, 1.7, 0.0), (0.6, 1.0, 3.0)])
def test_values_and_gradients_equal_autograds(kernels, chunk, temperature, scale, softcap):
    hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
    expected_logp, expected_entropy, logp = by_autograd(hidden, weight, bias, targets, temperature, scale, softcap)
    expected = torch.autograd.grad([expected_logp, expected_entropy], [hidden, weight, bias], list(upstream))
    head = LinearHead(weight=weight, bias=bias, scale=scale, softcap=softcap)
    request = HeadRequest(temperature=temperature, entropy=True, topk=4, chunk_tokens=chunk)
    found = head_outputs(head, hidden, targets, request)
    torch.testing.assert_close(found.logprobs_N, expected_logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy_N, expected_entropy, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.topk_logprobs_NK, logp.topk(4).values, rtol=0, atol=1e-5)
    torch.testing.assert_close(logp.gather(1, found.topk_ids_NK), logp.topk(4).values, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad([found.logprobs_N, found.entropy_N], [hidden, weight, bias], list(upstream))
    for each, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


def test_backward_recomputes_only_chunks_after_the_fourth():
    hidden, weight, _, targets, _ = inputs(dtype=torch.float32)
    computed = []

    class Counted(LinearHead):
        def logits(self, hidden_CH):
            computed.append(len(hidden_CH))
            return super().logits(hidden_CH)

    head_outputs(Counted(weight=weight), hidden, targets, HeadRequest(chunk_tokens=4)).logprobs_N.sum().backward()
    assert computed == [4, 4, 4, 4, 4, 3, 4, 3]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_single_chunk_and_several_have_equal_gradients(dtype, tolerance):
    hidden, weight, _, targets, upstream = inputs(dtype=dtype)
    found = []
    for chunk in (N, 8, 2):
        outputs = head_outputs(LinearHead(weight=weight), hidden, targets, HeadRequest(chunk_tokens=chunk))
        found.append(torch.autograd.grad(outputs.logprobs_N, [hidden, weight], upstream[0]))
    assert all(each.dtype is dtype for gradients in found for each in gradients)
    for several in found[1:]:
        torch.testing.assert_close(several, found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.6, 1.7, 0.0), (0.6, 1.0, 3.0)])
@pytest.mark.parametrize("alone", [False, True])
def test_given_ids_have_the_logprobs_and_gradients_of_autograd(kernels, chunk, temperature, scale, softcap, alone):
    hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (N, 4), generator=generator)
    ids[:, 0], ids[:, 2] = targets, ids[:, 1]  # the target among them, and one id twice
    slopes = torch.randn(N, 4, generator=generator)
    logprobs, entropy, logp = by_autograd(hidden, weight, bias, targets, temperature, scale, softcap)
    head = LinearHead(weight=weight, bias=bias, scale=scale, softcap=softcap)
    request = HeadRequest(temperature=temperature, entropy=True, chunk_tokens=chunk)
    found = head_outputs(head, hidden, targets, request, ids)
    torch.testing.assert_close(found.gathered_logprobs_NK, logp.gather(1, ids), rtol=0, atol=1e-5)
    number = 1 if alone else 3
    expected = torch.autograd.grad(
        [logp.gather(1, ids), logprobs, entropy][:number], [hidden, weight, bias], [slopes, *upstream][:number]
    )
    gradients = torch.autograd.grad(
        [found.gathered_logprobs_NK, found.logprobs_N, found.entropy_N][:number],
        [hidden, weight, bias],
        [slopes, *upstream][:number],
    )
    for each, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


def test_head_given_as_a_function_is_equal():
    hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
    request = HeadRequest(temperature=0.8, entropy=True, chunk_tokens=4, topk=2)
    ids = torch.stack([targets, (targets + 3) % V], dim=1)
    upstream = [*upstream, upstream.T.contiguous()]
    linear = head_outputs(LinearHead(weight=weight, bias=bias), hidden, targets, request, ids)
    free = any_head_outputs(lambda rows: rows @ weight.T + bias, V, hidden, targets, request, ids)
    torch.testing.assert_close(free.logprobs_N, linear.logprobs_N)
    torch.testing.assert_close(free.topk_logprobs_NK, linear.topk_logprobs_NK)
    torch.testing.assert_close(free.gathered_logprobs_NK, linear.gathered_logprobs_NK)
    wanted = [hidden, weight, bias]
    one, two = (
        torch.autograd.grad([each.logprobs_N, each.entropy_N, each.gathered_logprobs_NK], wanted, upstream)
        for each in (linear, free)
    )
    for each, other in zip(one, two, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [1, 2, 37, 255, 256, 257, 1000, 1024, 4099])
def test_argmax_token_is_the_first_of_equal_ones(columns):
    generator = torch.Generator().manual_seed(columns)
    # Few values, so that nearly every row has several that are the greatest, also across the blocks of the search.
    few = torch.randint(0, 3, (200, columns), generator=generator).float()
    last = torch.zeros(3, columns)
    last[0, -1], last[1, 0], last[2, columns // 2] = 1.0, 1.0, float("inf")
    nothing = torch.full((2, columns), float("-inf"))
    random = torch.randn(200, columns, generator=generator)
    rows = torch.cat([few, last, nothing, random])
    best, ids = first_choice(rows)
    everything = rows.double().numpy()
    assert ids.tolist() == everything.argmax(axis=1).tolist()
    assert best.tolist() == everything.max(axis=1).tolist()


def test_argmax_token_equals_that_of_the_logits():
    hidden, weight, bias, targets, _ = inputs(dtype=torch.float32)
    weight = weight.detach().repeat(20, 1)  # every token twenty times: only the first counts
    bias = bias.detach().repeat(20)
    request = HeadRequest(topk=1, chunk_tokens=4, temperature=0.7)
    expected = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=1)
    for found in (
        head_outputs(LinearHead(weight=weight, bias=bias), hidden, targets, request),
        any_head_outputs(lambda rows: rows @ weight.T + bias, len(weight), hidden, targets, request),
    ):
        assert found.topk_ids_NK.shape == (N, 1)
        assert (found.topk_ids_NK[:, 0] < V).all()
        torch.testing.assert_close(found.topk_logprobs_NK[:, 0], expected.amax(1), rtol=0, atol=1e-5)
        torch.testing.assert_close(expected.gather(1, found.topk_ids_NK)[:, 0], expected.amax(1), rtol=0, atol=1e-5)


def test_entropy_that_is_only_reported_carries_no_gradient():
    hidden, weight, bias, targets, _ = inputs(dtype=torch.float32)
    found = head_outputs(
        LinearHead(weight=weight, bias=bias), hidden, targets, HeadRequest(entropy=True, entropy_grad=False)
    )
    assert not found.entropy_N.requires_grad
    assert found.logprobs_N.requires_grad


@pytest.mark.parametrize("more", [{}, {"entropy": True}, {"entropy": True, "entropy_grad": False}])
def test_top_k_outputs_carry_no_gradient(more):
    hidden, weight, bias, targets, _ = inputs(dtype=torch.float32)
    found = head_outputs(LinearHead(weight=weight, bias=bias), hidden, targets, HeadRequest(topk=3, **more))
    assert found.logprobs_N.requires_grad
    assert not found.topk_logprobs_NK.requires_grad


def test_entropy_without_upstream_gradient_changes_no_gradient():
    gradients = []
    for entropy in (False, True):
        hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
        head = LinearHead(weight=weight, bias=bias)
        head_outputs(head, hidden, targets, HeadRequest(entropy=entropy)).logprobs_N.backward(upstream[0])
        gradients.append((hidden.grad, weight.grad, bias.grad))
    for without, beside in zip(*gradients, strict=True):
        torch.testing.assert_close(beside, without, rtol=0, atol=1e-6)


def test_impossible_token_keeps_entropy_and_gradient_finite(kernels):
    weight = torch.tensor([[1e4], [-1e4]])
    hidden = torch.ones(1, 1, requires_grad=True)
    found = head_outputs(LinearHead(weight=weight), hidden, torch.tensor([1]), HeadRequest(entropy=True))
    assert found.logprobs_N.tolist() == [-2e4]
    assert found.entropy_N.tolist() == [0.0]
    found.entropy_N.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_token_forbidden_by_the_bias_equals_a_missing_token(kernels):
    hidden, weight, bias, _, upstream = inputs(dtype=torch.float32)
    targets = torch.arange(N) % (V - 1)
    forbidding = torch.cat([bias[:-1], torch.tensor([-torch.inf])])
    with_it = head_outputs(LinearHead(weight=weight, bias=forbidding), hidden, targets, HeadRequest(entropy=True))
    head = LinearHead(weight=weight[:-1], bias=bias[:-1])
    without = head_outputs(head, hidden, targets, HeadRequest(entropy=True))
    torch.testing.assert_close(with_it.entropy_N, without.entropy_N)
    slopes = [upstream[0], 64 * upstream[1]]
    one = torch.autograd.grad([with_it.logprobs_N, with_it.entropy_N], [hidden, weight], slopes)
    two = torch.autograd.grad([without.logprobs_N, without.entropy_N], [hidden, weight], slopes)
    for each, other in zip(one, two, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab_size", [1, 31, 500, 9001])
def test_logprobs_and_gradients_equal_double_precision(kernels, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(200, H, generator=generator)
    weight = torch.randn(vocab_size, H, generator=generator)
    targets = torch.randint(0, vocab_size, (200,), generator=generator)
    upstream = torch.randn(2, 200, generator=generator)
    hidden_64, weight_64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(hidden_64 @ weight_64.T / 0.7, dim=-1)
    expected = [logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)]
    slopes = torch.autograd.grad(expected, [hidden_64, weight_64], list(upstream.double()))
    hidden.requires_grad_(), weight.requires_grad_()
    request = HeadRequest(temperature=0.7, entropy=True, chunk_tokens=199)
    outputs = head_outputs(LinearHead(weight=weight), hidden, targets, request)
    found = [outputs.logprobs_N, outputs.entropy_N]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)
    for one, other in zip(torch.autograd.grad(found, [hidden, weight], list(upstream)), slopes, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_non_finite_logits_give_non_finite_logprobs(kernels):
    weight = torch.full((40, 2), 1.0)
    hidden = torch.tensor([[1.0, 1.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    found = head_outputs(LinearHead(weight=weight), hidden, torch.tensor([0, 0, 0]), HeadRequest(entropy=True))
    assert torch.isfinite(found.logprobs_N).tolist() == [True, False, False]
    assert torch.isfinite(found.entropy_N).tolist() == [True, False, False]


def test_no_tokens_give_no_outputs_and_zero_gradients():
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.ones(V, H, requires_grad=True)
    found = head_outputs(
        LinearHead(weight=weight), hidden, torch.zeros(0, dtype=torch.int64), HeadRequest(entropy=True)
    )
    (found.logprobs_N.sum() + found.entropy_N.sum()).backward()
    assert found.logprobs_N.shape == (0,)
    assert float(weight.grad.abs().sum()) == 0.0


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
def test_scoring_and_gradients_take_the_memory_that_the_plan_has(monkeypatch, entropy):
    monkeypatch.setattr(elementwise, "available", lambda: False)
    monkeypatch.setattr("roll_modeling.logprobs.kept_tokens", lambda *_: 0)
    # Called from C, a function does not free its caller's arguments. With torch.compile in the process, none does.
    monkeypatch.setattr("roll_modeling.logprobs._log_softmax", functools.partial(logprobs._log_softmax))
    vocab_size, chunk = 2000, 64
    hidden, targets = torch.randn(4 * chunk, 4), torch.zeros(4 * chunk, dtype=torch.int64)
    weight = torch.randn(vocab_size, 4, requires_grad=True)
    for backward, most in ((False, 2), (True, 3)):  # as in docs/plan.md and `memory.head_bytes`
        with LiveBytes() as count, torch.set_grad_enabled(backward):
            found = head_outputs(
                LinearHead(weight=weight), hidden, targets, HeadRequest(entropy=entropy, chunk_tokens=chunk)
            )
            if backward:
                (found.logprobs_N.sum() + (found.entropy_N.sum() if entropy else 0)).backward()
        assert count.most < (most + 0.3) * 4 * chunk * vocab_size
        del found


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comparisons_take_the_memory_that_the_plan_has(monkeypatch, kind, dtype):
    monkeypatch.setattr("roll_modeling.logprobs._log_softmax", functools.partial(logprobs._log_softmax))
    vocab_size, chunk = 2000, 64
    hidden, other_hidden = torch.randn(4 * chunk, 4, dtype=dtype, requires_grad=True), torch.randn(4 * chunk, 4)
    weight = torch.randn(vocab_size, 4, dtype=dtype, requires_grad=True)
    other, weights = LinearHead(weight=torch.randn(vocab_size, 4, dtype=dtype)), torch.rand(4 * chunk)
    function, request = functools.partial(divergence, kind=kind), HeadRequest(chunk_tokens=chunk)
    with LiveBytes() as count:
        found = compared(LinearHead(weight=weight), hidden, other, other_hidden, function, request, weights)
        (found * weights).sum().backward()
    assert ARRAYS[kind] - 1 < count.most / (4 * chunk * vocab_size) < ARRAYS[kind] + 0.3


@pytest.mark.parametrize("want", [WantedOutputs(logprobs=True, entropy=True, topk=2), WantedOutputs(logprobs=True)])
def test_logits_of_all_tokens_never_exist_at_once(build, sequences, want):
    vocab_size, chunk = 5000, 4
    keys = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    strategy = build(random_init=keys, config=HFTrainConfig(logprob_chunk_tokens=chunk))
    (micro,) = pack(sequences)
    with Largest() as seen:
        strategy.forward(micro, want)
        strategy.forward_backward([micro], sft_objective())
    weight = vocab_size * 16
    assert seen.elements <= max(weight, chunk * vocab_size)
    assert micro.num_tokens * vocab_size > 1.5 * seen.elements


def test_of_no_token_outputs_have_their_shapes():
    head = LinearHead(weight=torch.randn(7, 3))
    found = head_outputs(head, torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), HeadRequest(entropy=True, topk=2))
    assert (found.logprobs_N.shape, found.entropy_N.shape) == ((0,), (0,))
    assert (found.topk_logprobs_NK.shape, found.topk_ids_NK.shape) == ((0, 2), (0, 2))
    none = torch.zeros(0, dtype=torch.int64)
    found = head_outputs(head, torch.zeros(0, 3), none, HeadRequest(), none.view(0, 4))
    assert found.gathered_logprobs_NK.shape == (0, 4)


@pytest.mark.parametrize("hint", ["none", "others", "multiple"])
@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize(("temperature", "scale", "softcap"), [(1.0, 1.0, 0.0), (0.6, 1.7, 3.0)])
def test_comparison_with_another_head_equals_that_of_full_logits(chunk, temperature, scale, softcap, hint, tmp_path):
    hidden, weight, bias, targets, upstream = inputs(dtype=torch.float32)
    other_hidden, other_weight, other_bias, *_ = inputs(1, dtype=torch.float32)
    other_hidden, other_weight = other_hidden[:, :6], other_weight[:, :6]  # another hidden size
    other = LinearHead(weight=other_weight, bias=other_bias, scale=0.7, softcap=2.0)
    write_head(other, tmp_path / "head")
    head = LinearHead(weight=weight, bias=bias, scale=scale, softcap=softcap)

    def kl(other_CV, own_CV):
        return (own_CV.exp() * (own_CV - other_CV)).sum(dim=1)

    request = HeadRequest(temperature=temperature, chunk_tokens=chunk)
    read = read_head(str(tmp_path / "head"), torch.device("cpu"))
    weights = {"none": None, "others": upstream[1].abs(), "multiple": upstream[0] * 3}[hint]
    found = compared(head, hidden, read, other_hidden, kl, request, weights)
    *_, own = by_autograd(hidden, weight, bias, targets, temperature, scale, softcap)
    *_, others = by_autograd(other_hidden, other_weight, other_bias, targets, temperature, 0.7, 2.0)
    expected = kl(others.detach(), own)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(found, [hidden, weight, bias], upstream[0])
    for each, wanted in zip(gradients, torch.autograd.grad(expected, [hidden, weight, bias], upstream[0]), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-5)


def test_heads_of_different_vocabularies_are_not_compared():
    hidden, weight, *_ = inputs(dtype=torch.float32)
    with pytest.raises(UnsupportedError):
        compared(
            LinearHead(weight=weight),
            hidden,
            LinearHead(weight=weight[:-1]),
            hidden,
            lambda other, own: own.sum(1),
            HeadRequest(),
        )


def test_a_head_that_cannot_be_read_is_named(tmp_path):
    with raises_error(CheckpointError, str(tmp_path / "none")):
        read_head(str(tmp_path / "none"), torch.device("cpu"))
