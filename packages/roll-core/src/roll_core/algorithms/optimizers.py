"""Optimizers that `training_args.optimizer` selects. They are torch's, with the conventions of language models:

vectors (biases and norms) get no weight decay, and updates are fused where torch has a kernel for that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from roll_core.spec.train import TrainingSpec

NOT_HIDDEN = re.compile(r"(^|[._])(embed\w*|wte|wpe|lm_head|head|score|\w*_head)([._]|$)")
"""Names of embeddings and output layers, whose rows are tokens and not features of one matrix."""


def adamw(parameters: Mapping[str, Tensor], training: TrainingSpec) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""
    return torch.optim.AdamW(
        _groups(parameters, training),
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )


def sgd(
    parameters: Mapping[str, Tensor], training: TrainingSpec, *, momentum: float = 0.9, nesterov: bool = False
) -> torch.optim.SGD:
    """Gradient descent: `m ← momentum × m + g + weight_decay × w`, then `w ← w - lr × m`."""
    return torch.optim.SGD(
        _groups(parameters, training), lr=training.learning_rate, momentum=momentum, nesterov=nesterov, fused=True
    )


def muon(
    parameters: Mapping[str, Tensor],
    training: TrainingSpec,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
) -> torch.optim.Optimizer:
    """Muon for the matrices of hidden layers, AdamW for embeddings, output layers, vectors and fused experts.

    The orthogonalised momentum of a matrix `[A, B]` is scaled by `0.2 × sqrt(max(A, B))`, the root mean square of
    AdamW's updates, so that both take the same learning rate and weight decay (Liu et al., arXiv:2502.16982, section
    2.2).
    """
    hidden = {name for name, tensor in parameters.items() if tensor.ndim == 2 and not NOT_HIDDEN.search(name)}
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        parts.append(
            torch.optim.Muon(
                [parameters[name] for name in parameters if name in hidden],
                lr=training.learning_rate,
                weight_decay=training.weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if others := {name: tensor for name, tensor in parameters.items() if name not in hidden}:
        parts.append(adamw(others, training))
    return Joint(parts)


class Joint(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self.defaults = {}
        self.param_groups = [group for part in parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of all parts, by parameter."""
        return {tensor: state for part in self.parts for tensor, state in part.state.items()}

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step every part."""
        for part in self.parts:
            part.step(closure)


def _groups(parameters: Mapping[str, Tensor], training: TrainingSpec) -> list[dict[str, Any]]:
    """Matrices, and vectors, which get no weight decay."""
    tensors = list(parameters.values())
    groups = [
        {"params": [tensor for tensor in tensors if tensor.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [tensor for tensor in tensors if tensor.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
