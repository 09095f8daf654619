"""A sharded model's weights as others read them: whole, by Hugging Face's names, and adapters merged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from roll_modeling.pieces import write_gathered
from roll_strategy_fsdp2.optimizer import like, local

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_modeling.lora import Adapters


class Weights:
    """Of one model, gathered one at a time. All ranks call together."""

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, adapters: Adapters | None, dtype: torch.dtype, device: str
    ) -> None:
        """`dtype` is that which computes, `device` that of the collectives."""
        self._model, self._adapters = model, adapters
        self._dtype, self._device = dtype, device
        self._spec = replace(spec, dtype="bf16" if dtype == torch.bfloat16 else "fp32")

    def held(self) -> dict[str, Tensor]:
        """What a state keeps of them: this rank's shares of all, or of the adapters alone."""
        kept = dict(self._model.named_parameters()) if self._adapters is None else self._adapters.trained()
        return {name: like(each, local(each)) for name, each in kept.items()}

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the dtype that computes, on every rank. Tied weights come once, under their first name;
        adapters are merged in float32."""
        if self._adapters is None:
            for name, parameter in self._model.named_parameters():
                yield name, self._whole(parameter, self._dtype)
            return
        for name, tensor in self._adapters.merged(self.whole):
            yield name, tensor.to(self._dtype)

    def write(self, path: Path) -> None:
        """As a directory that transformers loads, by rank 0: the model, or the adapters alone where `lora_export` says
        so."""
        write_gathered(
            self._model,
            self._spec,
            path,
            adapters=self._adapters,
            exported=self.export(),
            whole=self.whole,
            shape_of=lambda each: tuple(each.shape),
            writes=dist.get_rank() == 0,
        )
        dist.barrier()

    def identity(self) -> dict[str, Any] | None:
        """Where there are adapters, what has to be the same where they go on."""
        return self._adapters.identity(self.whole) if self._adapters is not None else None

    def whole(self, parameter: Tensor) -> Tensor:
        """Adapters as they are stepped, the model beneath as it computes."""
        return self._whole(parameter, torch.float32 if parameter.requires_grad else self._dtype)

    @torch.no_grad()
    def _whole(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded before it travels, and gathered on the device even where the shares lie on the host."""
        share = local(parameter).to(self._device, dtype)
        return like(parameter, share).full_tensor()
