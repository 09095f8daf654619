"""Sums and scans over ragged sequences laid end to end, shared by estimators and losses.

T flat tokens, S sequences, N masked tokens, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_core.errors import NonFiniteError


def reverse_discounted_sum(values_N: Tensor, segments_N: Tensor, discount: float) -> Tensor:
    """Compute `y[i] = values[i] + discount * y[i + 1]` within each run of equal segments, in float64.

    Uses doubling: after step `k` an element holds the discounted sum of its next `2**k` elements. A longest sequence
    of length L takes log2(L) vector operations, without a loop over tokens.
    """
    total_N = values_N.double()
    if total_N.numel() == 0:
        return total_N
    longest = int(torch.unique_consecutive(segments_N, return_counts=True)[1].max())
    shift, factor = 1, float(discount)
    while shift < longest and factor != 0.0:
        same = segments_N[shift:] == segments_N[:-shift]
        reach = torch.where(same, factor * total_N[shift:], 0.0)
        total_N = torch.cat([total_N[:-shift] + reach, total_N[-shift:]])
        shift, factor = 2 * shift, factor * factor
    return total_N


def running_sums(masses: Tensor) -> Tensor:
    """Cumulative sums of non-negative numbers along the last dimension, in float64; totals stay below 2048.

    Adds integers, in units of 2**-52. The order of a sum of floats on a GPU depends on the timing of its blocks, so
    torch refuses a float `cumsum` there while deterministic kernels are requested.
    """
    return (masses.double() * 2**52).long().cumsum(-1).double() * 2**-52


def next_in_segment(values_N: Tensor, segments_N: Tensor) -> Tensor:
    """Each element's successor in its segment; 0 for a segment's last element."""
    following_N = torch.zeros_like(values_N)
    following_N[:-1] = torch.where(segments_N[1:] == segments_N[:-1], values_N[1:], 0.0)
    return following_N


def is_last_in_segment(segments_N: Tensor) -> Tensor:
    """True where the next element belongs to another segment, or where there is no next element."""
    last_N = torch.ones_like(segments_N, dtype=torch.bool)
    last_N[:-1] = segments_N[1:] != segments_N[:-1]
    return last_N


def dense(indices_S: Tensor) -> tuple[Tensor, int]:
    """Map arbitrary integers to 0..n-1; returns the mapped tensor and n."""
    unique, inverse_S = torch.unique(indices_S, return_inverse=True)
    return inverse_S, unique.numel()


def sums_by(values_S: Tensor, groups_S: Tensor, num_groups: int) -> Tensor:
    """Sum the values of each group, `[G]`."""
    return values_S.new_zeros(num_groups).index_add_(0, groups_S, values_S)


def require_finite(what: str, values: Tensor) -> None:
    """Raise `NonFiniteError`, naming the first NaN or infinite element of `values`."""
    bad = (~torch.isfinite(values)).nonzero()
    if bad.numel():
        index = bad[0].tolist()
        raise NonFiniteError(
            f"{what}: {len(bad)} of {values.numel()} values are not finite, the first is {values[tuple(index)].item()}"
            f" at index {index[0] if len(index) == 1 else index}"
        )
