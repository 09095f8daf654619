"""Conditioning of flow models: text embeddings, arrays of data files, seeded embeddings; and latents of images.

Everything is computed before training and cached on disk. Text encoders are not in memory while the model trains.
Arrays have the names of `Family.conditioning`, without batch dimension.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import DataError, ModelError
from roll_core.field_docs import document_fields
from roll_pipeline_diffusion.cache import ArrayCache, files_identity, key_of
from roll_pipeline_diffusion.decoding import LatentDecoder, from_uint8
from roll_pipeline_diffusion.models.description import EXPERTS, INDEX, FlowDescription

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[np.generic]]


def usable_device(name: str) -> torch.device:
    """Device of `encoder_device`. Raises `ModelError` where torch has none of that name."""
    import torch

    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ModelError(f"encoder_device: {name} cannot be used here: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Text embeddings by `encode_prompt` of the model's own pipeline, cached on disk.

    Embeddings have one length: the family's pipeline pads them, or zeros with a mask do.
    """

    model: FlowDescription
    """Model whose `directory` has the text encoders."""
    cache: ArrayCache
    device: str = "cpu"
    dtype: str = "bf16"
    """Dtype of the text encoders: `fp32`, `bf16` or `fp16`."""
    max_tokens: int | None = None
    """Text tokens of a prompt; more are cut off. None: the default of the family's pipeline."""
    guidance: float | None = None
    """Embedded guidance scale, for models distilled from guidance (FLUX.1-dev, FLUX.2). Required by them."""

    def encode(self, prompts: Sequence[str], *, negative: bool = False) -> list[Arrays]:
        """Arrays of each prompt. Equal prompts are encoded once. `negative`: prompts of the unconditional velocity.

        Loads the text encoders only if a prompt is not in the cache, and releases them.
        """
        directory = self.model.directory
        if directory is None or not self.model.pipeline:
            raise ModelError("text embeddings need a pipeline's directory, or conditioning columns in the data")
        identity = _encoder_identity(directory)
        keys = {prompt: self._key(identity, prompt, negative) for prompt in dict.fromkeys(prompts)}
        cached = {prompt: self.cache.get(key) for prompt, key in keys.items()}
        missing = [prompt for prompt, arrays in cached.items() if arrays is None]
        if missing:
            pipeline = self._load(directory)
            for prompt in missing:
                arrays = self._compute(pipeline, prompt, negative)
                self.cache.put(keys[prompt], arrays)
                cached[prompt] = arrays
        return [self._complete(cached[prompt] or {}) for prompt in prompts]

    @property
    def tokens(self) -> int:
        """Maximum number of text tokens."""
        return self.model.family.max_text_tokens if self.max_tokens is None else self.max_tokens

    def _key(self, identity: str, prompt: str, negative: bool) -> str:
        import diffusers

        settings = {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "negative": negative,
            "diffusers": diffusers.__version__,
        }
        return key_of(kind="prompt", model=identity, pipeline=self.model.pipeline, prompt=prompt, **settings)

    def _load(self, directory: Path) -> Any:
        import diffusers
        import torch

        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        absent = [name for name, component in index.items() if component == [None, None]]  # such as SD3's T5
        without = {name: None for name in (*EXPERTS, "vae", *absent) if name in index}
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]
        try:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                directory, dtype=dtype, local_files_only=True, **without
            )
        except Exception as error:  # diffusers and transformers raise many classes for bad files
            raise ModelError(f"{directory}: the text encoders cannot be loaded: {error}") from error
        pipeline = pipeline.to(usable_device(self.device))
        # SD3 reads the width of its embeddings from the transformer if it has no T5.
        object.__setattr__(pipeline, EXPERTS[0], SimpleNamespace(config=SimpleNamespace(**self.model.config)))
        return pipeline

    def _compute(self, pipeline: Any, prompt: str, negative: bool) -> Arrays:
        import torch

        encode = _ENCODE[self.model.family.class_name]
        try:
            with torch.no_grad():
                tensors = encode(pipeline, prompt, self.tokens, negative)
        except Exception as error:  # diffusers fails in many ways; without ftfy, Wan's pipeline raises NameError
            raise ModelError(f"{self.model.pipeline} cannot encode prompt {prompt!r}: {error}") from error
        arrays: Arrays = {}
        for name, condition in self.model.family.conditioning(self.model.config).items():
            if name == "guidance":
                continue
            tensor = tensors.get(name)
            if condition.mask:
                rows = len(tensors["prompt_embeds"][0])
                mask = np.ones(rows, bool) if tensor is None else tensor[0].bool().cpu().numpy()
                arrays[name] = _pad(mask, self.tokens)
            elif tensor is not None:
                array = tensor[0].float().cpu().numpy()
                arrays[name] = _pad(array, self.tokens) if _has_mask(self.model) and array.ndim == 2 else array
        self.model.family.check(self.model.config, self._complete(arrays), f"prompt {prompt!r}", rows=False)
        return arrays

    def _complete(self, arrays: Arrays) -> Arrays:
        if "guidance" not in self.model.family.conditioning(self.model.config):
            return dict(arrays)
        if self.guidance is None:
            raise ModelError(f"{self.model.family.class_name} embeds a guidance scale: set one, such as 3.5")
        return {**arrays, "guidance": np.asarray(self.guidance, np.float32)}


def _has_mask(model: FlowDescription) -> bool:
    return any(condition.mask for condition in model.family.conditioning(model.config).values())


def _pad(array: NDArray[Any], tokens: int) -> NDArray[Any]:
    cut = array[:tokens]
    return np.concatenate([cut, np.zeros((tokens - len(cut), *cut.shape[1:]), cut.dtype)])


def _encoder_identity(directory: Path) -> str:
    folders = [path.name for path in directory.iterdir() if path.name.startswith(("text_encoder", "tokenizer"))]
    return files_identity(directory, folders)


def _encode_sd3(pipeline: Any, prompt: str, tokens: int, negative: bool) -> dict[str, Any]:
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompt=[prompt],
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=tokens,
    )
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _encode_flux(pipeline: Any, prompt: str, tokens: int, negative: bool) -> dict[str, Any]:
    embeds, pooled, _ = pipeline.encode_prompt(prompt=[prompt], prompt_2=None, max_sequence_length=tokens)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _encode_flux2(pipeline: Any, prompt: str, tokens: int, negative: bool) -> dict[str, Any]:
    embeds, _ = pipeline.encode_prompt(prompt=[prompt], max_sequence_length=tokens)
    return {"prompt_embeds": embeds}


def _encode_qwen(pipeline: Any, prompt: str, tokens: int, negative: bool) -> dict[str, Any]:
    embeds, mask = pipeline.encode_prompt(prompt=[prompt], max_sequence_length=tokens)
    return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}


def _encode_wan(pipeline: Any, prompt: str, tokens: int, negative: bool) -> dict[str, Any]:
    embeds, _ = pipeline.encode_prompt(prompt=[prompt], do_classifier_free_guidance=False, max_sequence_length=tokens)
    return {"prompt_embeds": embeds}


def _encode_sana(pipeline: Any, prompt: str, tokens: int, negative: bool) -> dict[str, Any]:
    # Its pipeline puts an instruction before prompts, but not before negative ones.
    instruction = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
    embeds, mask, _, _ = pipeline.encode_prompt(
        prompt=[prompt],
        do_classifier_free_guidance=False,
        max_sequence_length=tokens,
        complex_human_instruction=None if negative else instruction,
    )
    return {"prompt_embeds": embeds, "prompt_attention_mask": mask}


_ENCODE: dict[str, Callable[[Any, str, int, bool], dict[str, Any]]] = {
    "SD3Transformer2DModel": _encode_sd3,
    "FluxTransformer2DModel": _encode_flux,
    "Flux2Transformer2DModel": _encode_flux2,
    "QwenImageTransformer2DModel": _encode_qwen,
    "WanTransformer3DModel": _encode_wan,
    "SanaTransformer2DModel": _encode_sana,
}


# -- without text encoders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WordEncoder:
    """A seeded Gaussian vector per word, for random models: embeddings of a prompt are the vectors of its words.

    The empty prompt has only zeros. Pooled embeddings are the sum of the vectors, over the root of their number.
    """

    model: FlowDescription
    tokens: int = 8
    """Number of text tokens; prompts with more words raise `DataError`."""
    seed: int = 0
    guidance: float | None = None
    """Value of the guidance input, as for `PromptEncoder`."""

    def encode(self, prompts: Sequence[str], *, negative: bool = False) -> list[Arrays]:
        """Arrays of each prompt."""
        return [self._encode(prompt) for prompt in prompts]

    def _encode(self, prompt: str) -> Arrays:
        words = prompt.lower().split()
        if len(words) > self.tokens:
            raise DataError(
                f"prompt {prompt!r} has {len(words)} words, expected at most {self.tokens}: set more tokens"
            )
        arrays: Arrays = {}
        for name, condition in self.model.family.conditioning(self.model.config).items():
            if condition.mask:
                # Attention over no token at all is not defined.
                arrays[name] = np.arange(self.tokens) < max(1, len(words))
            elif name == "guidance":
                if self.guidance is None:
                    raise ModelError(f"{self.model.family.class_name} embeds a guidance scale: set one, such as 3.5")
                arrays[name] = np.asarray(self.guidance, np.float32)
            else:
                arrays[name] = self._embed(words, condition.shape)
        return arrays

    def _embed(self, words: list[str], shape: tuple[int | None, ...]) -> NDArray[np.generic]:
        width = shape[-1] or 1
        vectors = [self._vector(word, width) for word in words]
        if len(shape) == 1:
            total = np.sum(vectors, axis=0) / np.sqrt(len(vectors)) if vectors else np.zeros(width)
            return np.asarray(total, np.float32)
        embeds = np.zeros((self.tokens, width), np.float32)
        for place, vector in enumerate(vectors):
            embeds[place] = vector
        return embeds

    def _vector(self, word: str, width: int) -> NDArray[np.float64]:
        digest = hashlib.sha256(f"{self.seed}:{word}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(width)


def given_conditioning(row: Mapping[str, Any], model: FlowDescription, *, kind: str, base: Path, where: str) -> Arrays:
    """Conditioning in a row of the data; empty if it has none. `kind`: `cond` or `uncond`.

    The column `<kind>` names a `.npz` or `.safetensors` file with the arrays. A column `<kind>.<name>` is one array: a
    list of numbers, or a `.npy` file. Paths are relative to `base`. Raises `DataError`, which begins with `where`.
    """
    arrays: Arrays = {}
    if row.get(kind) is not None:
        arrays.update(_read_file(row[kind], base, f"{where}: {kind}", (".npz", ".safetensors")))
    for column, value in row.items():
        name = column.removeprefix(f"{kind}.")
        if name == column or value is None:
            continue
        place = f"{where}: {column}"
        arrays[name] = _read_file(value, base, place, (".npy",))[""] if isinstance(value, str) else _array(value, place)
    if not arrays:
        return {}
    expected = model.family.conditioning(model.config)
    for name, array in arrays.items():
        if name in expected and expected[name].mask:
            arrays[name] = array.astype(bool)
            if not arrays[name].any():
                raise DataError(f"{where}: {kind}.{name} marks no text token")
            continue
        if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
            raise DataError(f"{where}: {kind}.{name} has dtype {array.dtype}, expected real numbers")
        arrays[name] = array.astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            raise DataError(f"{where}: {kind}.{name} has values that are not finite")
    model.family.check(model.config, arrays, f"{where}: {kind}", rows=False)
    return arrays


def _read_file(value: Any, base: Path, where: str, suffixes: tuple[str, ...]) -> Arrays:
    if not isinstance(value, str) or Path(value).suffix not in suffixes:
        raise DataError(f"{where}: {value!r}, expected a path to a file {' or '.join(suffixes)}")
    file = base / value
    try:
        if file.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(file))
        # Pickled objects are refused: they could run code.
        content = np.load(file, allow_pickle=False)
        if file.suffix == ".npy":
            return {"": content}
        with content:
            return {name: content[name] for name in content.files}
    except Exception as error:  # each library raises many classes for bad files
        raise DataError(f"{where}: {file} cannot be read: {error}") from error


def _array(value: Any, where: str) -> NDArray[np.generic]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if array.dtype == object:
        raise DataError(f"{where}: expected a list of numbers, or lists of equal lengths")
    return array


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoder:
    """Latents of images, cached on disk."""

    decoder: LatentDecoder
    cache: ArrayCache
    device: str = "cpu"

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.generic]]:
        """Latents `[C, (F,) H, W]` of each image `[H, W, 3]` or video `[F, H, W, 3]`."""
        directory = self.decoder.directory
        identity = files_identity(Path(directory), ["vae"]) if directory else ""
        return [self._encode(image, identity) for image in images]

    def _encode(self, image: NDArray[np.uint8], identity: str) -> NDArray[np.generic]:
        if image.dtype != np.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3:
            raise DataError(
                f"an image has shape {list(image.shape)} and dtype {image.dtype}, expected [H, W, 3], uint8"
            )
        content = hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()
        key = key_of(kind="latents", vae=identity, dtype=self.decoder.dtype, shape=list(image.shape), content=content)
        stored = self.cache.get(key)
        if stored is not None:
            return stored["latents"]
        pixels = from_uint8(np.array(image)[None]).to(usable_device(self.device))
        latents: NDArray[np.generic] = self.decoder.encode(pixels)[0].cpu().numpy()
        self.cache.put(key, {"latents": latents})
        return latents


document_fields(__name__)
