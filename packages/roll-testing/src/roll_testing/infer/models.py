"""The model that engines are tested with, and its reference logits, logprobs and argmax tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_testing.models import QWEN3

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from roll_core.types import Floats, TokenIds
    from roll_testing.reference import ReferenceModel

    Logits = npt.NDArray[np.float64]

CONTEXT = 512
END = 1
"""End token of the tokenizers that the kit writes."""
SMALL: Mapping[str, Any] = {
    **QWEN3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": END,
}
"""As small as kernels of engines allow: few support attention heads smaller than 32."""
CLEAR = 1e-2
"""Minimum difference of two logits whose order is certain. Smaller ones may be reordered by rounding in sums."""


class Oracle:
    """Outputs of the reference model with its current weights."""

    def __init__(self, model: ReferenceModel) -> None:
        self.model = model
        model.module.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights, by the names under which they are published."""
        return {name: parameter.detach().clone() for name, parameter in self.model.module.named_parameters()}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights."""
        with torch.no_grad():
            for name, parameter in self.model.module.named_parameters():
                parameter.copy_(weights[name])

    def logits(self, tokens: Sequence[int] | TokenIds) -> Logits:
        """Return `[L, V]` logits; row `t` predicts the token after token `t`."""
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
        with torch.no_grad():
            logits: Logits = self.model.logits(ids).double().numpy()
        return logits

    def logprobs(self, prompt: TokenIds, response: TokenIds, temperature: float = 1.0) -> Floats:
        """Return `[R]`, the logprob of each token of the response."""
        tokens = np.concatenate([prompt, response])
        rows = self.logits(tokens)[len(prompt) - 1 : -1] / (temperature or 1.0)
        return np.asarray(log_softmax(rows)[np.arange(len(response)), response], dtype=np.float32)

    def prompt_logprobs(self, prompt: TokenIds) -> Floats:
        """Return `[P]`, the logprob of each token of the prompt; 0 for the first token."""
        return np.concatenate([np.zeros(1, dtype=np.float32), self.logprobs(prompt[:1], prompt[1:])])

    def shortfall(
        self,
        prompt: TokenIds,
        response: TokenIds,
        *,
        penalty: float = 1.0,
        banned: Collection[int] = (),
        banned_until: int = 0,
    ) -> tuple[Logits, Logits]:
        """Return two arrays `[R]`: how far each token's logit, and the second largest logit, are below the largest.

        Logits are taken after the repetition penalty. `banned` tokens are masked in the first `banned_until` positions.
        """
        tokens = np.concatenate([prompt, response])
        rows = self.logits(tokens)[len(prompt) - 1 : -1].copy()
        for step, row in enumerate(rows):
            seen = np.unique(tokens[: len(prompt) + step])
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
            if step < banned_until:
                row[sorted(banned)] = -np.inf
        falling = -np.sort(-rows, axis=-1)
        return falling[:, 0] - rows[np.arange(len(response)), response], falling[:, 0] - falling[:, 1]


def log_softmax(rows: Logits) -> Logits:
    """Return the log-softmax over the last axis."""
    shifted = rows - rows.max(-1, keepdims=True)
    logprobs: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return logprobs


def moved(weights: Mapping[str, Tensor], seed: int, only: str = "") -> dict[str, Tensor]:
    """Return the weights with random noise of about a third of their size added: to all of them, or to `only` one."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in weights.items():
        scale = 0.3 * float(tensor.float().std(correction=0)) + 0.05
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
        result[name] = tensor + scale * noise if only in ("", name) else tensor.clone()
    return result
