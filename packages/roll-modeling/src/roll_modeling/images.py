"""Images and videos of a microbatch: inputs of the model's image encoder, and the places and positions of their tokens.

    Media ── processor ──► pixels, grids ── encoder, projector ──► features, which replace embeddings of image tokens
    tokens, grids ── get_rope_index, one sequence at a time ──► positions of models whose positions have several axes

Equal images of a microbatch, such as those of the samples of one prompt, are encoded once.

Shapes: T flat tokens, S sequences, A axes of positions.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.data.media import image_media
from roll_core.data.processor import SECONDS, loaded_processor, processor_of
from roll_core.errors import DataError, ModelError, UnsupportedError
from roll_core.spec.module_program import move_tensors
from roll_core.spec.rollout import MEDIA_KINDS
from roll_modeling.model import body_of, image_parts, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from roll_core.data.processor import Processor
    from roll_core.spec.model import ModelSpec
    from roll_core.types import Media, MediaKind

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments with 1 at the tokens of images and 2 at those of videos, which a model's `forward` may have."""
VIDEO_ARRAYS = {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"}
"""Arrays of videos, and those of images that the encoder reads in the same way."""
POSITION_ARRAYS: Mapping[str, MediaKind] = {"image_grid_thw": "image", "video_grid_thw": "video", SECONDS: "video"}
"""Arrays that determine positions, and the kind whose."""
PROBE_SIZE = 48, 80
"""Width and height of the image with which a model is tried."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Images and videos of one microbatch, on the model's device."""

    arrays: Mapping[str, Tensor]
    """Inputs of the image encoder: of all different images, then of all different videos, so that it runs once."""
    sizes: tuple[int, ...]
    """Number of features of each of these."""
    places: Mapping[str, tuple[int, ...]]
    """Index among these of each image (`image`) and video (`video`), in the order of the sequences; without kinds that
    the sequences lack."""
    types_T: Tensor
    """int64, 1 for tokens whose embeddings are features of images, 2 for those of videos, and 0 for text."""
    positions_AT: Tensor | None
    """int64, positions on each axis; None for models with one axis."""
    blocks: tuple[Tensor | None, ...]
    """For each sequence int64 `[L]`: number of the image (of videos: of the frames without text in between) of each
    token, -1 for text; None for a sequence without."""
    starts_with_image: bool
    """True if token 0 belongs to an image or a video."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """Sequences with which a model is tried."""

    tokens_T: Tensor
    """In host memory."""
    lengths: tuple[int, ...]
    media_S: tuple[tuple[Media, ...], ...]
    images: Images


class ImageReader:
    """Reads the images of microbatches for one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """The model's processor is beside the tokenizer. Raises `UnsupportedError` without a processor."""
        processor = processor_of(tokenizer)
        if processor is None:
            raise UnsupportedError(f"{tokenizer.name_or_path}: no processor of images")
        module: Any = body_of(model)
        self._module, self._tokenizer = module, tokenizer
        self.processor: Processor = processor
        parts = image_parts(model)
        self._encoder = parts["vision"][0]
        self.trained = _are_trained(parts)
        """True if gradients reach the encoder or the projector."""
        self.unsupported = ""
        """Reason why the model cannot read images; empty if it can."""
        self.both_ways = False
        """True if the tokens of an image attend to each other in both directions (Gemma 3)."""
        self._arguments = set(inspect.signature(module.forward).parameters)
        if "mm_encoder_outputs" not in self._arguments or not hasattr(module, "get_image_features"):
            self.unsupported = f"{type(module).__name__} of the installed transformers takes no features of images"

    def read(
        self, tokens_T: Tensor, lengths: Sequence[int], media_S: Sequence[tuple[Media, ...]], ids: Sequence[str]
    ) -> Images | None:
        """Images of the sequences whose tokens, in host memory, are `tokens_T`; None without any.

        Raises `DataError` for a sequence whose tokens of images or videos are not as many as the features of these, and
        `UnsupportedError` for a model that cannot read images.
        """
        media_S = media_S or ((),) * len(lengths)
        for id, tokens_L, media in zip(ids, torch.split(tokens_T, list(lengths)), media_S, strict=True):
            if surplus := self.processor.surplus(tokens_L, media):
                raise DataError(
                    f"sequence {id}: {surplus}; a response must not contain such tokens, and truncation must not cut"
                    " through an image or a video"
                )
        if not any(media_S):
            return None
        if self.unsupported:
            raise UnsupportedError(f"images are not supported: {self.unsupported}")
        return self._read(tokens_T, lengths, media_S, ids)

    def _read(
        self, tokens_T: Tensor, lengths: Sequence[int], media_S: Sequence[tuple[Media, ...]], ids: Sequence[str]
    ) -> Images:
        types_T = (tokens_T == self.processor.image_token_id).to(torch.int64)
        types_T = types_T.masked_fill(tokens_T == self.processor.video_token_id, 2)
        every = [media for sequence in media_S for media in sequence]
        different = {
            kind: list({media.digest: media for media in every if media.kind == kind}.values()) for kind in MEDIA_KINDS
        }
        arrays, of_videos = (
            {name: torch.from_numpy(array) for name, array in self.processor.inputs(different[kind]).items()}
            for kind in MEDIA_KINDS
        )
        index_of = {media.digest: index for index, media in enumerate(chain(*different.values()))}
        places = {kind: tuple(index_of[media.digest] for media in every if media.kind == kind) for kind in MEDIA_KINDS}
        blocks = tuple(_blocks(types_L > 0) for types_L in torch.split(types_T, list(lengths)))
        named, first = {**arrays, **of_videos}, {"image": 0, "video": len(different["image"])}
        grids = {
            name: named[name][[index - first[kind] for index in places[kind]]]
            for name, kind in POSITION_ARRAYS.items()
            if name in named
        }
        positions_AT = self._positions(tokens_T, types_T, lengths, media_S, blocks, grids, ids)
        for name, of_images in VIDEO_ARRAYS.items() if of_videos else ():
            arrays[of_images] = (
                torch.cat([arrays[of_images], of_videos[name]]) if of_images in arrays else of_videos[name]
            )
        device = next(self._module.parameters()).device
        named = {**arrays, "types_T": types_T}
        named |= {} if positions_AT is None else {"positions_AT": positions_AT}
        named |= {f"block {index}": block for index, block in enumerate(blocks) if block is not None}
        moved: dict[str, Any] = move_tensors(named, device)
        return Images(
            arrays={name: moved[name] for name in arrays},
            sizes=tuple(map(self.processor.num_features, chain(*different.values()))),
            places={kind: indices for kind, indices in places.items() if indices},
            types_T=moved["types_T"],
            positions_AT=moved.get("positions_AT"),
            blocks=tuple(moved.get(f"block {index}") for index in range(len(blocks))),
            starts_with_image=bool(types_T[0]),
        )

    def features(self, images: Images) -> dict[str, Any]:
        """Outputs of encoder and projector by kind, the argument `mm_encoder_outputs` of the model; without gradients
        if both are frozen."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained):
            outputs = self._module.get_image_features(**self.inputs(images), return_dict=True)
        if images.places == {"image": tuple(range(len(images.sizes)))}:
            return {"image": outputs}
        return {kind: _selected(outputs, images.sizes, indices) for kind, indices in images.places.items()}

    def inputs(self, images: Images) -> dict[str, Tensor]:
        """Inputs of the encoder that the model has, in the encoder's dtype."""
        dtype = next(self._encoder.parameters()).dtype
        names = inspect.signature(self._module.get_image_features).parameters
        return {
            name: array.to(dtype) if array.is_floating_point() else array
            for name, array in images.arrays.items()
            if name in names
        }

    def nothing(self) -> Tensor:
        """Zero that depends on the encoder and the projector: their output for a small image, times 0.

        A microbatch without images adds it where other ranks wait for this one, or expect gradients.
        """
        outputs = self.features(self.probe.images)["image"]
        named = [getattr(outputs, name, None) for name in ("pooler_output", "deepstack_features")]
        return torch.stack([tensor.flatten()[:0].sum() for tensor in _tensors(named)]).sum()

    def types(self, types: Tensor) -> dict[str, Tensor]:
        """Arguments of `TYPES` that the model has."""
        return {name: types for name in TYPES if name in self._arguments}

    @property
    def has_blocks(self) -> bool:
        """True if the model may treat the tokens of an image as a block."""
        return TYPES[0] in self._arguments

    @cached_property
    def probe(self) -> Probe:
        """Three sequences, the second of which has a small image."""
        width, height = PROBE_SIZE
        pixels = (np.arange(width * height * 3) * 37 % 251).astype(np.uint8).reshape(height, width, 3)
        media = _pillow(pixels)
        text = self.processor.expand(self.processor.placeholder, [media])
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        text_ids = [id for id in range(len(self._tokenizer)) if id not in self.processor.media_token_ids]
        a, b, c, d, e, f, g = (text_ids[7 * i % len(text_ids)] for i in range(1, 8))
        rows = [a, b, c, d], [e, f, *ids, g, a], [b, d, f]
        tokens_T = torch.tensor([token for row in rows for token in row])
        lengths, media_S = tuple(map(len, rows)), ((), (media,), ())
        images = self._read(tokens_T, lengths, media_S, ("probe",) * len(rows))
        return Probe(tokens_T=tokens_T, lengths=lengths, media_S=media_S, images=images)

    def _positions(
        self,
        tokens_T: Tensor,
        types_T: Tensor,
        lengths: Sequence[int],
        media_S: Sequence[tuple[Media, ...]],
        blocks: Sequence[Tensor | None],
        grids: Mapping[str, Tensor],
        ids: Sequence[str],
    ) -> Tensor | None:
        get_rope_index: Any = getattr(self._module, "get_rope_index", None)
        if get_rope_index is None:
            return None
        sizes = list(lengths)
        split = {
            name: torch.split(
                array, [sum(media.kind == POSITION_ARRAYS[name] for media in sequence) for sequence in media_S]
            )
            for name, array in grids.items()
        }
        parts: list[Tensor] = []
        every = zip(ids, torch.split(tokens_T, sizes), torch.split(types_T, sizes), media_S, blocks, strict=True)
        for index, (id, tokens_L, types_L, media, block_L) in enumerate(every):
            if block_L is None:
                parts.append(torch.arange(len(tokens_L)).expand(3, -1))
                continue
            if int(block_L.max()) + 1 != sum(map(self.processor.num_runs, media)):
                raise DataError(
                    f"sequence {id}: images are not separated by other tokens, as the model's template does"
                )
            grids_by_name = {name: array_S[index] for name, array_S in split.items() if len(array_S[index])}
            positions_A1L, _ = get_rope_index(
                input_ids=tokens_L[None], mm_token_type_ids=types_L[None], attention_mask=None, **grids_by_name
            )
            parts.append(_continued(positions_A1L[:, 0], types_L))
        return torch.cat(parts, dim=1)


def _selected(outputs: Any, sizes: tuple[int, ...], indices: Sequence[int]) -> Any:
    """Outputs of `get_image_features` for these images. `sizes` are the numbers of features of all images."""

    def select(features: Any) -> Any:
        is_joined = isinstance(features, torch.Tensor)  # [images or tiles, features, units]
        flat = features.flatten(0, -2) if is_joined else torch.cat(list(features))
        parts = torch.split(flat, list(sizes))
        selected = tuple(parts[index] for index in indices)
        return torch.cat(selected).view(-1, *features.shape[1:]) if is_joined else selected

    parts = {"pooler_output": select(outputs.pooler_output)}
    if (deepstack := getattr(outputs, "deepstack_features", None)) is not None:
        parts["deepstack_features"] = [select(features) for features in deepstack]
    return type(outputs)(**parts)


def _continued(positions_AL: Tensor, types_L: Tensor) -> Tensor:
    """Positions in which the text after a video begins behind the largest position of the video, on any axis.

    So do Qwen's models: "the text start position_ids as the max vision position_ids plus 1" (transformers' pull request
    35569, vLLM). transformers 5.24 continues behind height and width alone, so that times of Qwen2.5-VL would recur.
    """
    kinds, sizes = torch.unique_consecutive(types_L, return_counts=True)
    parts: list[Tensor] = []
    shift, end = 0, 0
    for kind, part_AL in zip(kinds.tolist(), torch.split(positions_AL, sizes.tolist(), dim=1), strict=True):
        shift += max(0, end - int(part_AL.min()) - shift)
        parts.append(part_AL + shift)
        end = int(parts[-1].max()) + 1 if kind == 2 else 0
    return torch.cat(parts, dim=1)


def image_reader(model: PreTrainedModel, spec: ModelSpec) -> ImageReader | None:
    """Reader for a model that has an image encoder, and whose tokenizer has a processor beside it; otherwise None.

    Raises `ModelError` if the encoder or projector is trained, but there is no processor.
    """
    parts = image_parts(model)
    tokenizer = load_tokenizer(spec) if parts and (spec.tokenizer or spec.path) else None
    find = processor_of if _are_trained(parts) else loaded_processor  # text alone needs no processor
    if tokenizer is not None and find(tokenizer) is not None:
        return ImageReader(model, tokenizer)
    if _are_trained(parts):
        raise ModelError(
            f"{type(model).__name__}: model_args.freeze leaves the image encoder or projector to be trained, but the"
            f" tokenizer {spec.tokenizer or spec.path!r} has no processor (preprocessor_config.json) beside it: freeze"
            " both vision and projector"
        )
    return None


def _are_trained(parts: Mapping[str, Sequence[nn.Module]]) -> bool:
    return any(parameter.requires_grad for part in chain(*parts.values()) for parameter in part.parameters())


def _pillow(pixels: Any) -> Media:
    from PIL import Image

    return image_media(Image.fromarray(pixels))


def _blocks(is_image_L: Tensor) -> Tensor | None:
    """Number of the run of image tokens to which each token belongs, -1 for others; None if there is no run."""
    if not bool(is_image_L.any()):
        return None
    starts_L = is_image_L & ~torch.cat([is_image_L.new_zeros(1), is_image_L[:-1]])
    return torch.where(is_image_L, starts_L.cumsum(0) - 1, -1)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, (list, tuple)):
        for part in nested:
            yield from _tensors(part)
