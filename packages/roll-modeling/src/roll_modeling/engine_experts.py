"""Expert tensors of a mixture of experts in an engine: their Hugging Face names, their shapes, one expert read back.

Engines store the experts of a layer in two tensors, whose first dimension are this process's experts:

in the engine                            Hugging Face, all experts in one tensor    one expert
w13_weight [E_local, 2·I/tp, H]          experts.gate_up_proj [E, 2·I, H]           experts.7.gate_proj.weight [I, H]
    rows of gate, then of up                                                        experts.7.up_proj.weight [I, H]
w2_weight  [E_local, H, I/tp]            experts.down_proj [E, H, I]                experts.7.down_proj.weight [H, I]

E experts, H hidden size, I intermediate size of an expert. Mixtral's files name gate, up and down w1, w3 and w2.
gpt-oss has the transposed tensors, with rows of gate and up in turn, and biases (`gate_up_proj_bias [E, 2·I]`).

In fp8 (`roll_core.spec.fp8`) each of them is followed by its scales, with a row and a column per 128 of the matrix:
`w13_weight_scale_inv`, `experts.gate_up_proj_scale_inv`, `experts.7.gate_proj.weight_scale_inv`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from roll_core.spec.fp8 import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

GATE, UP = 0, 1
"""Parts of w13."""
SCALE = "weight_scale_inv"
"""Parameter with the scales of fp8 blocks."""
_PROJECTIONS: dict[str, tuple[Literal["w13", "w2"], int | None]] = {
    "gate_up_proj": ("w13", None),
    "gate_proj": ("w13", GATE),
    "w1": ("w13", GATE),
    "up_proj": ("w13", UP),
    "w3": ("w13", UP),
    "down_proj": ("w2", None),
    "w2": ("w2", None),
}
_ALL = re.compile(r"(?P<path>.*\bexperts)\.(?P<projection>gate_up_proj|down_proj)(_(?P<parameter>\w+))?")
_ONE = re.compile(
    rf"(?P<path>.*\bexperts)\.(?P<expert>\d+)\.(?P<projection>{'|'.join(_PROJECTIONS)})\.(?P<parameter>\w+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertName:
    """A Hugging Face name of an expert tensor, taken apart."""

    path: str
    """Path of the module that contains the experts, such as `model.layers.0.mlp.experts`."""
    matrix: Literal["w13", "w2"]
    parameter: str
    """`weight`, `bias`, or the name of a scale."""
    part: int | None = None
    """`GATE` or `UP`; None for both, and for w2."""
    expert: int | None = None
    """Index of the expert among all E; None for a tensor of all experts."""

    @classmethod
    def parse(cls, name: str) -> ExpertName | None:
        """The parts of `name`; None if it does not name an expert tensor (a shared expert is an ordinary MLP)."""
        match = _ALL.fullmatch(name) or _ONE.fullmatch(name)
        if match is None:
            return None
        groups = match.groupdict()
        matrix, part = _PROJECTIONS[groups["projection"]]
        expert, parameter = groups.get("expert"), groups["parameter"] or "weight"
        return cls(
            path=groups["path"],
            matrix=matrix,
            parameter=SCALE if parameter == "scale_inv" else parameter,
            part=part,
            expert=None if expert is None else int(expert),
        )

    @property
    def stored(self) -> str:
        """Name of the engine's parameter that contains the tensor, such as `w13_weight`."""
        return f"{self.matrix}_{self.parameter}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Sizes of a layer's experts over all processes, and how Hugging Face's tensors differ from the engine's."""

    num_experts: int
    hidden: int
    intermediate: int
    interleaved: bool = False
    """True if rows of gate and up alternate, on both sides."""
    transposed: bool = False
    """True if Hugging Face's matrices are the transposed ones of the engine."""

    def shape(self, name: ExpertName) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor."""
        rows = self.hidden if name.matrix == "w2" else self.intermediate * (2 if name.part is None else 1)
        columns = self.intermediate if name.matrix == "w2" else self.hidden
        if name.parameter == SCALE:
            rows, columns = -(-rows // BLOCK), -(-columns // BLOCK)
        one = (rows,) if name.parameter == "bias" else (columns, rows) if self.transposed else (rows, columns)
        return one if name.expert is not None else (self.num_experts, *one)

    def experts(self, name: ExpertName) -> Sequence[int]:
        """Indices of the experts in the tensor, in order."""
        return range(self.num_experts) if name.expert is None else (name.expert,)

    def joined(self, name: ExpertName, shards: Sequence[Tensor]) -> Tensor:
        """The Hugging Face tensor of one expert, from the engine's shards of its matrix by tensor parallel rank.

        Shards have the engine's form: `[2·I/tp, H]` of w13, `[H, I/tp]` of w2; biases `[2·I/tp]`, and `[H]` of which
        the first rank's is the bias. Scales have the form of their matrix; no block spans gate and up, or two ranks.
        """
        if name.matrix == "w2":
            matrix = shards[0] if name.parameter == "bias" else torch.cat(list(shards), dim=1)
        elif self.interleaved:
            rows = torch.cat(list(shards))
            matrix = rows if name.part is None else rows[name.part :: 2]
        else:
            halves = [shard.chunk(2) for shard in shards]
            parts = (GATE, UP) if name.part is None else (name.part,)
            matrix = torch.cat([half[part] for part in parts for half in halves])
        return matrix.T if self.transposed and matrix.ndim == 2 else matrix

    def split(self, name: ExpertName, tensor: Tensor) -> Iterator[tuple[int, int | None, Tensor]]:
        """Experts of a Hugging Face tensor: index, part, and matrix in the engine's form, as views.

        gate and up are separate unless they are interleaved; the part of w2 is None.
        """
        for expert, stored in zip(self.experts(name), tensor if name.expert is None else (tensor,), strict=True):
            matrix = stored.T if self.transposed and stored.ndim == 2 else stored
            if name.matrix == "w2" or name.part is not None or self.interleaved:
                yield expert, name.part, matrix
            else:
                yield from ((expert, part, half) for part, half in enumerate(matrix.chunk(2)))

    def keys(self, name: ExpertName) -> tuple[tuple[int, int | None], ...]:
        """Expert and part of everything in the tensor: equal for equal contents, whichever names are used."""
        parts = (None,) if name.matrix == "w2" else (GATE, UP) if name.part is None else (name.part,)
        return tuple((expert, part) for expert in self.experts(name) for part in parts)
