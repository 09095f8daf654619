"""A model's weights as others read them: whole, by Hugging Face's names, and adapters merged."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast

from roll_modeling.pieces import write_gathered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_modeling.lora import Adapters
    from roll_strategy_deepspeed.ranks import Ranks


class Weights:
    """Of one model, which ZeRO-3 may have spread over the ranks. All ranks call together."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec, adapters: Adapters | None, ranks: Ranks) -> None:
        self._model, self._spec, self._adapters, self._ranks = model, spec, adapters, ranks

    def held(self) -> list[Tensor]:
        """What this rank holds of them."""
        parts = (getattr(each, part, None) for each in self._model.parameters() for part in ("data", "ds_tensor"))
        return [part for part in parts if part is not None]

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Live parameters; at stage 3 each is gathered for the time that it takes to read it. Merged weights where
        there are adapters. Tied weights come once, under their first name."""
        if self._adapters is not None:
            yield from self._adapters.merged(self.whole)
            return
        for name, parameter in self._model.named_parameters():
            with _gathered(parameter):
                yield name, parameter.detach()

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
            shape_of=lambda each: tuple(getattr(each, "ds_shape", each.shape)),
            writes=self._ranks.rank == 0,
        )
        self._ranks.wait()

    def identity(self) -> dict[str, Any] | None:
        """Where there are adapters, what has to be the same where they go on."""
        return self._adapters.identity(self.whole) if self._adapters is not None else None

    def whole(self, parameter: Tensor) -> Tensor:
        """The live parameter, or a copy of its own of one that is spread."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with _gathered(parameter):
            return parameter.detach().clone()


def _gathered(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a parameter whole on all ranks, which enter together."""
    if not hasattr(tensor, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return cast("contextlib.AbstractContextManager[Any]", deepspeed.zero.GatheredParameters([tensor]))
