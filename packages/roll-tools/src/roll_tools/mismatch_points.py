"""Activations of a side compared with the reference, point by point, for `roll-core doctor mismatch`.

In one pass of the reference, each activation is replaced by the side's after it was computed. The difference before it
is replaced is thus the error of this point alone, since its inputs are the side's. Then a pass for each kind of point
adds the errors of this kind to a plain reference: the part of the gap that this reproduces comes from the kind.

L tokens of a sequence, W width of an activation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roll_tools.mismatch_reference import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.types import Floats
    from roll_tools.mismatch_reference import Edits, Reference, ScoredTokens

TOLERANCE = 1e-5
"""Relative error of an activation that rounding in float32 may cause."""
SHARE = 0.1
"""Smallest share of the gap of a kind of points that counts."""
FIT = 0.02
"""Largest share of a point's error that a simple function of the reference's activation may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Where the gap of a side begins."""

    kinds: frozenset[str]
    """Kinds of points, and `logits` for what comes after the model."""
    layer: str = ""
    """Kind with the largest share."""
    names: tuple[str, ...] = ()
    """Points of this kind that have errors, in the order of the model."""
    function: str = ""
    """What the side computes there instead, if it is simple."""
    shares: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in self.shares.items())
        place = "after the last point" if not self.names else f"at {self.names[0]}"
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{told} {place}{more}{self.function and ': '}{self.function}"


def locate(
    reference: Reference,
    sequence: ScoredTokens,
    logprobs: Floats,
    activations: Mapping[str, Tensor],
    edits: Edits,
    noise: float,
) -> Located:
    """Compare a side's activations and logprobs of a sequence."""
    ours: dict[str, Tensor] = {}

    def replaced(name: str, tensor: Tensor) -> Tensor:
        theirs = activations.get(name)
        # Modules inside of experts run several times, with the tokens of one expert each.
        if theirs is None or theirs.numel() != tensor.numel() or ".experts." in name:
            return tensor
        ours[name] = tensor.clone()
        return theirs.to(tensor).view_as(tensor)

    def distance(values: Floats) -> float:
        return float(np.abs(values.astype(np.float64) - logprobs).mean())

    first = distance(reference.visited(sequence, edits, lambda name, tensor: tensor))
    left = distance(reference.visited(sequence, edits, replaced))
    errors = {name: activations[name].to(tensor).view_as(tensor) - tensor for name, tensor in ours.items()}
    sizes = {name: float(error.norm() / ours[name].norm().clamp_min(1e-9)) for name, error in errors.items()}
    last = next(reversed(ours), "")
    if first <= noise or (left > first / 2 and kind_of(last) == "head"):
        return Located(kinds=frozenset({"inputs", "logits"}))
    shares: dict[str, float] = {}
    for kind in {kind_of(name) for name, size in sizes.items() if size > TOLERANCE}:
        added = {name: error for name, error in errors.items() if kind_of(name) == kind and sizes[name] > TOLERANCE}
        values = reference.visited(sequence, edits, lambda name, tensor: tensor + added.get(name, 0))  # noqa: B023
        shares[kind] = 1 - distance(values) / first
    if kind_of(last) != "head":
        shares["head"] = left / first
    shares = dict(sorted(((k, s) for k, s in shares.items() if s > SHARE), key=lambda item: -item[1]))
    layer = next(iter(shares), "")
    names = [name for name, size in sizes.items() if kind_of(name) == layer and size > TOLERANCE]
    names = [name for name in names if sizes[name] > max(sizes[name] for name in names) / 10]
    functions = {_function(ours[name], errors[name]) for name in names}
    return Located(
        kinds=frozenset({*shares, "logits"}),
        layer=layer,
        names=tuple(names),
        function=functions.pop() if len(functions) == 1 else "",
        shares=shares,
    )


def _function(ours: Tensor, error: Tensor) -> str:
    """The simple function of the reference's activation that has this error; empty if there is none."""
    ours, error = ours.flatten(0, -2), error.flatten(0, -2)
    factor = 1 + float((ours * error).sum() / (ours * ours).sum())
    options = {
        f"{factor:.4g} times the reference's": error - (factor - 1) * ours,
        "the reference's plus a constant, as of a bias": error - error.mean(0),
        "the reference's with another weight for each unit": error
        - ours * (ours * error).sum(0) / (ours * ours).sum(0).clamp_min(1e-12),
    }
    fits = (told for told, rest in options.items() if float(rest.norm()) < FIT * float(error.norm()))
    begins = (error.norm(dim=-1) > 0.01 * error.norm(dim=-1).max()).nonzero()
    from_token = int(begins[0]) if len(begins) else 0
    return next(fits, f"from token {from_token} on" if from_token > 1 else "")
