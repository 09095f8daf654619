"""Rows of data as arrays for programs, and images of samples for people."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.rows import text_of
from roll_core.errors import DataError, ModelError
from roll_pipeline_diffusion.cache import ArrayCache
from roll_pipeline_diffusion.decoding import LatentDecoder, to_uint8
from roll_pipeline_diffusion.encoders import ImageEncoder, PromptEncoder, WordEncoder, given_conditioning
from roll_pipeline_diffusion.models.description import describe_args
from roll_pipeline_diffusion.rows import CONDITIONING, folder_of, image_file, need_encoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from roll_core.data.rows import Row, Rows
    from roll_core.spec.config import DataArguments
    from roll_core.spec.module_program import ModuleBatch, ProgramModule
    from roll_pipeline_diffusion.config import RewardFlowConfig
    from roll_pipeline_diffusion.programs import SamplingProgram
    from roll_pipeline_diffusion.schedules import SigmaSchedule

    Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRow:
    """A row of the data: what a model is conditioned on, and maybe what it is trained on."""

    id: str
    prompt: str
    values: Mapping[str, Any]
    """All columns, for rewards."""
    arrays: Mapping[str, NDArray[np.generic]] = field(repr=False)
    """`cond.<name>`, with guidance `uncond.<name>`, and latents of the data, without batch dimension."""


class FlowData:
    """Reads rows: text as embeddings and images as latents, both cached in `<output_dir>/flow_cache`."""

    def __init__(self, config: RewardFlowConfig) -> None:
        """Describe the model. Raises `ModelError`, and `DataError` for sizes that it cannot generate."""
        args = config.actor_train.model_args
        model = describe_args(args, config.pretrain)
        if model is None:
            raise ModelError(
                f"{args.path(config.pretrain) or 'no model'}: expected a local directory of diffusers, or random_init:"
                " download models of the hub first, with `hf download`"
            )
        self.config, self.model = config, model
        self.latent_shape = self.model.latent_shape(config.height, config.width, config.num_frames)
        self.decoder = LatentDecoder(
            directory=str(self.model.directory) if self.model.vae is not None else "",
            rows=config.decode_batch_size,
            checkpoint=config.objective == "refl",
        )
        self.cache = ArrayCache(Path(config.output_dir).expanduser() / "flow_cache")

    def schedule(self, num_steps: int | None = None) -> SigmaSchedule:
        """Sigma schedule of the config for the model's tokens, with another number of steps for an evaluation."""
        return self.config.schedule(num_steps, patch_size=self.model.family.patch(self.model.config))

    def read(self, rows: Rows, data: DataArguments, *, images: Mapping[str, str]) -> list[FlowRow]:
        """All rows. `images` maps names of latents to the columns that they are from. Raises `DataError`."""
        conditionings = [self._given(row, data, CONDITIONING) for row in rows]
        without = [self._given(row, data, f"un{CONDITIONING}") for row in rows]
        prompts = [str(row.values.get(data.prompt) or "") for row in rows]
        missing = [index for index, arrays in enumerate(conditionings) if not arrays]
        if missing:
            texts = [text_of(rows[index], data.prompt, rows) for index in missing]
            encoder = self._encoder(rows[missing[0]], data)
            for index, arrays in zip(missing, encoder.encode(texts), strict=True):
                conditionings[index] = arrays
        guided = self.config.needs_unconditional
        if guided and missing:
            (unconditional,) = encoder.encode([self.config.negative_prompt], negative=True)
            for index in missing:
                without[index] = without[index] or unconditional
        flow_rows = []
        for row, prompt, cond, uncond in zip(rows, prompts, conditionings, without, strict=True):
            if guided and not uncond:
                raise _no_guidance(row, self.config)
            arrays = {f"cond.{name}": array for name, array in cond.items()}
            arrays |= {f"uncond.{name}": array for name, array in uncond.items()} if guided else {}
            arrays |= {name: self._latents(row, data, column) for name, column in images.items()}
            flow_rows.append(FlowRow(id=row.id, prompt=prompt, values=row.values, arrays=arrays))
        return flow_rows

    def _given(self, row: Row, data: DataArguments, kind: str) -> Arrays:
        return given_conditioning(row.values, self.model, kind=kind, base=folder_of(row, data), where=row.where)

    def _encoder(self, row: Row, data: DataArguments) -> PromptEncoder | WordEncoder:
        config = self.config
        need_encoder(row, data, self.model, encoder=config.prompt_encoder, guidance=config.embedded_guidance)
        if config.prompt_encoder == "words":
            tokens = {} if config.prompt_tokens is None else {"tokens": config.prompt_tokens}
            return WordEncoder(model=self.model, guidance=config.embedded_guidance, **tokens)
        return PromptEncoder(
            model=self.model,
            cache=self.cache,
            device=config.encoder_device,
            max_tokens=config.prompt_tokens,
            guidance=config.embedded_guidance,
        )

    def _latents(self, row: Row, data: DataArguments, column: str) -> NDArray[np.generic]:
        """Latents of an image file, or latents as they are in a `.npy` file."""
        file, where = image_file(row, data, column), f"{row.where}: column {column!r}"
        if file.suffix == ".npy":
            try:
                latents: NDArray[np.generic] = np.load(file, allow_pickle=False).astype(np.float32)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{where}: {file} cannot be read as latents: {error}") from error
        else:
            pixels = read_image(file, where)
            expected = (self.config.height, self.config.width)
            if pixels.shape[-3:-1] != expected:
                size = " × ".join(map(str, pixels.shape[-3:-1]))
                raise DataError(
                    f"{where}: {file} has {size} pixels, expected height × width {expected[0]} × {expected[1]}"
                )
            encoder = ImageEncoder(decoder=self.decoder, cache=self.cache, device=self.config.encoder_device)
            latents = encoder.encode([pixels])[0] if self.decoder.directory else _pixels(pixels)
        if latents.shape != self.latent_shape or not np.isfinite(latents).all():
            state = list(latents.shape) if latents.shape != self.latent_shape else "values that are NaN or infinite"
            raise DataError(f"{where}: {file} gives latents {state}, expected finite {list(self.latent_shape)}")
        return latents


def _pixels(image: NDArray[np.uint8]) -> NDArray[np.generic]:
    return np.moveaxis(image.astype(np.float32) / 127.5 - 1, -1, 0)


def _no_guidance(row: Row, config: RewardFlowConfig) -> DataError:
    scale = config.guidance_scale if config.guidance_scale != 1 else config.validation_guidance
    return DataError(
        f"{row.where}: guidance_scale {scale:g} needs v_uncond + {scale:g} · (v_cond - v_uncond), but the row has"
        f" precomputed conditioning without 'un{CONDITIONING}': add it, or set guidance_scale 1"
    )


def read_image(file: Path, where: str) -> NDArray[np.uint8]:
    """Colours `[H, W, 3]` of an image file. Raises `DataError`."""
    from PIL import Image

    try:
        with Image.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # PIL raises many classes for bad files
        raise DataError(f"{where}: {file} cannot be read as an image: {error}") from error


def seed_of(*parts: int | str) -> int:
    """Seed of a row's random numbers, below 2^63: the same for the same parts on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def png_of(image: NDArray[np.uint8], *, size: int = 256) -> bytes:
    """PNG of an image `[H, W, 3]`, or of the first frame of a video `[F, H, W, 3]`; at most `size` pixels wide."""
    from PIL import Image

    shown = Image.fromarray(image[0] if image.ndim == 4 else image)
    shown.thumbnail((size, size))
    stream = io.BytesIO()
    shown.save(stream, format="PNG")
    return stream.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledImages:
    """Program that samples and decodes: the outputs of `sampling`, and `images` in 8 bits per colour."""

    sampling: SamplingProgram
    decoder: LatentDecoder

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> Mapping[str, Tensor]:
        """Sample, then decode `decoder.rows` images at a time."""
        import torch

        outputs = self.sampling(module, batch)
        with torch.no_grad():
            pixels = self.decoder.decode(outputs["latents"])
        return {**outputs, "images": torch.from_numpy(to_uint8(pixels))}
