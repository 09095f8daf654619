"""A model's weights as others read them: whole, by Hugging Face's names, and adapters merged."""

from __future__ import annotations

import contextlib
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from roll_core.modeling.export import check_exportable, write_model
from roll_core.modeling.lora import base_name
from roll_core.modeling.pieces import PieceWriter, stores_as_held

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.modeling.lora import Adapters
    from roll_core.spec.model import ModelSpec
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
        so. No rank holds more of the model than a piece, unless its architecture stores it in another form."""
        check_exportable(self._model, self._spec)
        adapters, first = self._adapters, self._ranks.rank == 0
        if adapters is not None and adapters.lora.export == "adapter":
            gathered = ((name, self.whole(each)) for name, each in adapters.trained().items())
            state = {name: each.cpu() for name, each in gathered if first}
            if first:
                adapters.export(path, state)
        elif stores_as_held(self._model, self._shapes()):
            self._write_in_pieces(path)
        else:
            state = {name: each.to("cpu", copy=True) for name, each in self.export() if first}
            if first:
                write_model(self._model, self._spec, state | self._tied(state) | self._buffers(), path)
        self._ranks.wait()

    def _write_in_pieces(self, path: Path) -> None:
        writer = PieceWriter(path) if self._ranks.rank == 0 else None
        for name, tensor in chain(self._buffers().items(), self.export()):
            if writer is not None:
                writer.add(name, tensor)
        if writer is not None:
            writer.finish(self._spec)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that is exported, by name."""
        added = self._adapters.trained() if self._adapters is not None else {}
        return {
            base_name(name): tuple(getattr(each, "ds_shape", each.shape))
            for name, each in self._model.named_parameters()
            if name not in added
        }

    def identity(self) -> dict[str, Any] | None:
        """Where there are adapters, what has to be the same where they go on."""
        return self._adapters.identity(self.whole) if self._adapters is not None else None

    def whole(self, parameter: Tensor) -> Tensor:
        """The live parameter, or a copy of its own of one that is spread."""
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with _gathered(parameter):
            return parameter.detach().clone()

    def _tied(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Further names of exported tensors."""
        first: dict[int, str] = {}
        every = self._model.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(each), name) for name, each in every}
        return {name: state[other] for name, other in names.items() if name != other and other in state}

    def _buffers(self) -> dict[str, Tensor]:
        """Those that transformers stores."""
        persistent = self._model.state_dict().keys()
        return {name: each.cpu() for name, each in self._model.named_buffers() if name in persistent}


def _gathered(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a parameter whole on all ranks, which enter together."""
    if not hasattr(tensor, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return cast("contextlib.AbstractContextManager[Any]", deepspeed.zero.GatheredParameters([tensor]))
