"""Exports of a model: full tensors by Hugging Face names, with adapters merged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_modeling.lora import Adapters


class Weights:
    """Exporter of one model, which ZeRO-3 may have sharded. All methods except `held` are then collective."""

    def __init__(self, model: PreTrainedModel, adapters: Adapters | None) -> None:
        self._model, self._adapters = model, adapters

    def held(self) -> list[Tensor]:
        """This rank's tensors of the weights: parameters, and their shards at stage 3."""
        parts = (
            getattr(parameter, part, None) for parameter in self._model.parameters() for part in ("data", "ds_tensor")
        )
        return [part for part in parts if part is not None]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters themselves, or merged weights if there are adapters.

        At stage 3, a parameter is gathered only while the caller reads it. Tied weights are yielded once, under their
        first name.
        """
        if self._adapters is not None:
            yield from self._adapters.merged(self.whole)
            return
        for name, parameter in self._model.named_parameters():
            with _gathered(parameter):
                yield name, parameter.detach()

    def whole(self, parameter: Tensor) -> Tensor:
        """The parameter itself, or a gathered copy if it is sharded."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with _gathered(parameter):
            return parameter.detach().clone()


def _gathered(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Gather a parameter on all ranks inside the context. Collective."""
    if not hasattr(tensor, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return cast("contextlib.AbstractContextManager[Any]", deepspeed.zero.GatheredParameters([tensor]))
