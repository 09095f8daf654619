"""Inputs of a model for token ids with images, beside the ids: pixels, kinds of tokens, positions.

    images ──► processor ──► pixels, grids                    as the model's forward pass names them
    ids    ──► image token? ──► mm_token_type_ids, token_type_ids
    both   ──► get_rope_index ──► positions                   of models whose images have two-dimensional positions

N sequences    L tokens    A axes of positions
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from roll_core.data.processor import processor_of
from roll_core.data.tokenizers import has_tokenizer
from roll_core.errors import DataError
from roll_modeling.model import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.data.processor import Processor
    from roll_core.spec.model import ModelSpec
    from roll_core.types import Media

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the input that is 1 at image tokens and 0 elsewhere."""


def load_processor(model: PreTrainedModel, spec: ModelSpec) -> Processor | None:
    """Processor of a model with images; None if the model reads text alone, or its tokenizer has no processor."""
    if model.config.get_text_config() is model.config:
        return None
    if not spec.tokenizer and not (spec.path and has_tokenizer(spec.path)):
        return None
    return processor_of(load_tokenizer(spec))


class ImageInputs:
    """Makes the inputs of one model."""

    def __init__(self, model: PreTrainedModel, processor: Processor) -> None:
        self.processor = processor
        self._device, self._dtype = model.device, model.dtype
        self._parameters = inspect.signature(model.forward).parameters
        self._rope_index: Any = getattr(getattr(model, "model", model), "get_rope_index", None)

    def arrays(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """Pixels of some images and what describes them, in order. Raises `DataError`."""
        arrays = self.processor.inputs(media)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name in self._parameters}
        return {
            name: tensor.to(self._device, self._dtype if tensor.is_floating_point() else None, non_blocking=True)
            for name, tensor in tensors.items()
        }

    def token_types(self, ids_NL: Tensor) -> dict[str, Tensor]:
        """Kinds of tokens, under the names that the model has for them."""
        types_NL = (ids_NL == self.processor.image_token_id).long()
        return {name: types_NL for name in TOKEN_TYPES if name in self._parameters}

    def positions(self, ids_NL: Tensor, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Positions `[A, N, L]` of whole sequences, and `[N, 1]`, the distance of later tokens' positions to their
        indices. None for a model that counts image tokens like others.

        `arrays` are those of the images of all sequences. No padding. Raises `DataError` for adjacent images.
        """
        if self._rope_index is None:
            return None
        types_NL = (ids_NL == self.processor.image_token_id).int()
        names = inspect.signature(self._rope_index).parameters
        grids = {name: tensor for name, tensor in arrays.items() if name in names}
        num_runs = int((types_NL.diff(dim=1, prepend=types_NL.new_zeros(len(types_NL), 1)) > 0).sum())
        if any(len(grid) != num_runs for grid in grids.values()):
            raise DataError("images must be separated by other tokens, as by the model's chat template")
        positions_ANL, shifts_N1 = self._rope_index(ids_NL, mm_token_type_ids=types_NL, **grids)
        return positions_ANL, shifts_N1.view(-1, 1)
