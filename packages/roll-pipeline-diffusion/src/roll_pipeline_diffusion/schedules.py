"""Sigma schedules: the noise levels at which a sampler calls the model. Imports no torch.

T steps have T + 1 sigmas, from 1 (noise) to exactly 0 (data). Step i goes from sigma i to sigma i + 1. Schedules of
diffusers may end with 0.001 before the 0: the std of that step is nearly 0, and its logprob is unusable for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp, prod
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicShift:
    """Shift that grows with the number of image tokens N: `exp(mu)`, with mu linear in N through two points.

    Source: FLUX.1's sampling, and `use_dynamic_shifting` of diffusers with `time_shift_type: exponential`.
    """

    base_tokens: int = 256
    """Number of tokens with `base_shift`."""
    max_tokens: int = 4096
    """Number of tokens with `max_shift`."""
    base_shift: float = 0.5
    """mu at `base_tokens`."""
    max_shift: float = 1.15
    """mu at `max_tokens`."""
    patch_size: int = 2
    """Height and width of a token in latents."""

    def shift(self, latent_shape: Sequence[int]) -> float:
        """Shift for latents of the shape `(C, H, W)` or `(C, F, H, W)`."""
        tokens = prod(latent_shape[1:]) / self.patch_size**2
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return exp(self.base_shift + slope * (tokens - self.base_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmaSchedule:
    """Sigmas `s·u / (1 + (s − 1)·u)` for u = 1, (T − 1)/T, ..., 0 with the shift s (arXiv:2403.03206 eq. 23).

    A shift above 1 moves steps toward noise. With shift 1 the sigmas are linear.
    """

    num_steps: int
    """Number of steps, T."""
    shift: float = 1.0
    dynamic_shift: DynamicShift | None = None
    """Compute the shift from the latents' shape instead."""

    def __post_init__(self) -> None:
        """Raise `UnsupportedError` for values without a schedule."""
        if self.num_steps < 1 or not 0 < self.shift < float("inf"):
            raise UnsupportedError(
                f"no sigma schedule with {self.num_steps} steps and shift {self.shift}: expected at least 1 step and a"
                " positive shift"
            )

    def sigmas(self, latent_shape: Sequence[int]) -> tuple[float, ...]:
        """The T + 1 sigmas for latents of a shape without batch dimension."""
        shift = self.shift if self.dynamic_shift is None else self.dynamic_shift.shift(latent_shape)
        return _shifted(self.num_steps, shift)


@lru_cache(maxsize=64)
def _shifted(num_steps: int, shift: float) -> tuple[float, ...]:
    linear = [1.0 - step / num_steps for step in range(num_steps + 1)]
    sigmas = [shift * sigma / (1.0 + (shift - 1.0) * sigma) for sigma in linear]
    return (1.0, *sigmas[1:-1], 0.0)


document_fields(__name__)
