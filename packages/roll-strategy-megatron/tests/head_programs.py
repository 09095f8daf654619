"""The head on ranks that share a vocabulary: imported by the ranks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron_programs import LiveBytes

from roll_modeling.logprobs import HeadRequest, LinearHead
from roll_strategy_megatron.head import (
    ExchangedIds,
    VocabularyShare,
    sharded_comparison,
    sharded_head_outputs,
    share_of_head,
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Plain numbers: N tokens, H hidden, V tokens of the vocabulary."""

    hidden_NH: np.ndarray
    weight_VH: np.ndarray
    targets_N: np.ndarray
    slopes_2N: np.ndarray
    """Upstream gradients of logprobs and entropies."""
    request: HeadRequest
    ids_NK: np.ndarray | None = None
    """Given ids; the upstream gradient of the k-th is that of the logprobs, times k + 1."""
    scale: float = 1.0
    softcap: float = 0.0

    def head(self, weight_VH):
        return LinearHead(weight=weight_VH, scale=self.scale, softcap=self.softcap)


def slopes_of_ids(problem):
    factors_K = np.arange(1, problem.ids_NK.shape[1] + 1)
    return torch.from_numpy(problem.slopes_2N[0][:, None] * factors_K).float()


@contextmanager
def group_of(rank, size, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def share_of(rank, size, weight_VH, group):
    """As Megatron cuts it, with rows of padding whose numbers are nobody's business."""
    vocabulary, hidden = weight_VH.shape
    rows = -(-vocabulary // size)
    padded = np.full((rows * size, hidden), 7.0, np.float32)
    padded[:vocabulary] = weight_VH
    first = rank * rows
    share = VocabularyShare(group=group, first=first, num_real=min(max(vocabulary - first, 0), rows))
    return torch.tensor(padded[first : first + rows], requires_grad=True), share


def head_and_gradients(rank, size, port, problem):
    """Outputs; this rank's part of the hidden states' gradient; that of its rows."""
    with group_of(rank, size, port) as group:
        weight_VH, share = share_of(rank, size, problem.weight_VH, group)
        hidden_NH = torch.tensor(problem.hidden_NH, dtype=torch.float32, requires_grad=True)
        targets_N = torch.from_numpy(problem.targets_N)
        ids_NK = None if problem.ids_NK is None else torch.from_numpy(problem.ids_NK)
        found = sharded_head_outputs(hidden_NH, problem.head(weight_VH), targets_N, problem.request, share, ids_NK)
        slopes_2N = torch.from_numpy(problem.slopes_2N).float()
        loss = (found.logprobs_N * slopes_2N[0]).sum()
        if problem.request.entropy and problem.request.entropy_grad:
            loss = loss + (found.entropy_N * slopes_2N[1]).sum()
        if ids_NK is not None:
            loss = loss + (found.gathered_logprobs_NK * slopes_of_ids(problem)).sum()
        loss.backward()
        outputs = {
            "logprobs": found.logprobs_N,
            "entropy": found.entropy_N,
            "topk_logprobs": found.topk_logprobs_NK,
            "topk_ids": found.topk_ids_NK,
            "gathered_logprobs": found.gathered_logprobs_NK,
        }
        return (
            {name: each.detach().numpy() for name, each in outputs.items() if each is not None},
            hidden_NH.grad.numpy(),
            weight_VH.grad.numpy()[: share.num_real],
        )


def reverse_kl(other_CV, own_CV):
    return (own_CV.exp() * (own_CV - other_CV)).sum(dim=1)


def comparison_and_gradients(rank, size, port, problem, ahead):
    """Values of the reverse KL from another model with half the hidden size, a bias and a softcap; gradients as above.

    `ahead`: the weights are known in the forward pass.
    """
    with group_of(rank, size, port) as group:
        weight_VH, share = share_of(rank, size, problem.weight_VH, group)
        vocabulary, rows = len(problem.weight_VH), len(weight_VH)
        other, other_NH = other_model(problem)
        own = share_of_head(other, share, rows, vocabulary)
        hidden_NH = torch.tensor(problem.hidden_NH, dtype=torch.float32, requires_grad=True)
        slopes_N = torch.from_numpy(problem.slopes_2N[0]).float()
        shards = ExchangedIds(group, vocabulary, rows)
        values_N = sharded_comparison(
            hidden_NH,
            problem.head(weight_VH),
            own,
            other_NH,
            reverse_kl,
            problem.request,
            slopes_N if ahead else None,
            shards,
        )
        (values_N * slopes_N).sum().backward()
        return values_N.detach().numpy(), hidden_NH.grad.numpy(), weight_VH.grad.numpy()[: share.num_real]


def other_model(problem):
    half = problem.weight_VH.shape[1] // 2
    weight, hidden = (
        torch.tensor(each[:, :half] * 0.5, dtype=torch.float32) for each in (problem.weight_VH, problem.hidden_NH)
    )
    return LinearHead(weight=weight, bias=weight[:, 0].clone(), softcap=3.0), hidden


def most_bytes(rank, size, port, problem):
    """Of tensors that exist at once because of the head, on the way there and back."""
    with group_of(rank, size, port) as group:
        weight_VH, share = share_of(rank, size, problem.weight_VH, group)
        hidden_NH = torch.tensor(problem.hidden_NH, dtype=torch.float32, requires_grad=True)
        targets_N = torch.from_numpy(problem.targets_N)
        with LiveBytes([weight_VH, hidden_NH, targets_N]) as count:
            found = sharded_head_outputs(hidden_NH, problem.head(weight_VH), targets_N, problem.request, share)
            (found.logprobs_N.sum() + found.entropy_N.sum()).backward()
        return count.most
