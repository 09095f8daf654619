"""Exports of a sharded model: full tensors by Hugging Face names, with adapters merged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from roll_strategy_fsdp2.optimizer import like, local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_modeling.lora import Adapters


class Weights:
    """Exporter of one model; gathers one parameter at a time. All methods are collective."""

    def __init__(
        self, model: PreTrainedModel, spec: ModelSpec, adapters: Adapters | None, dtype: torch.dtype, device: str
    ) -> None:
        """`dtype` is the compute dtype, `device` the device of the collectives."""
        self._model, self._adapters = model, adapters
        self._dtype, self._device = dtype, device
        self.spec = replace(spec, dtype="bf16" if dtype == torch.bfloat16 else "fp32")
        """The spec of the exported model."""

    def held(self) -> dict[str, Tensor]:
        """The sharded tensors of a checkpoint: all parameters, or only the trained ones if there are adapters."""
        parameters = dict(self._model.named_parameters()) if self._adapters is None else self._adapters.trained()
        return {name: like(parameter, local(parameter)) for name, parameter in parameters.items()}

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors in the compute dtype, on every rank.

        Tied weights are yielded once, under their first name. Adapters are merged in float32.
        """
        if self._adapters is None:
            for name, parameter in self._model.named_parameters():
                yield name, self._whole(parameter, self._dtype)
            return
        for name, tensor in self._adapters.merged(self.whole):
            yield name, tensor.to(self._dtype)

    def whole(self, parameter: Tensor) -> Tensor:
        """The full tensor: trained adapters in float32, base-model parameters in the compute dtype unless quantized."""
        if not parameter.is_floating_point():
            return self._whole(parameter, parameter.dtype)
        return self._whole(parameter, torch.float32 if parameter.requires_grad else self._dtype)

    @torch.no_grad()
    def _whole(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather a parameter in `dtype` on the device, even if its shards are in host memory.

        Casting first halves traffic for bfloat16.
        """
        share = local(parameter).to(self._device, dtype)
        return like(parameter, share).full_tensor()
