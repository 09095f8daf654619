"""The processor of a model with images and videos: from these to placeholder text and pixels.

It is transformers' own processor of the model, applied to one image or video at a time:

    image ──► processor ──┬► text that replaces the image's placeholder: as many image tokens as the model has features
    video                 └► arrays for the model: pixel_values, image_grid_thw, …

The text is tokenised with the rest of the prompt, so that prompts with images follow the same rules as those without.
Trainer, engine and driver load it from the run's tokenizer directory.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.video_processor import VIDEO_PROCESSORS
from roll_core.errors import DataError, ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from roll_core.data.video_processor import Qwen2VideoProcessor
    from roll_core.types import GenerateRequest, Media, SampledFrames

log = logging.getLogger(__name__)

FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a processor beside those of its tokenizer."""
NEEDED_PACKAGES = {"PixtralProcessor": "torchvision", "SmolVLMProcessor": "num2words"}
"""Packages that the code of a processor imports (Pixtral and Mistral 3, SmolVLM)."""
TEXT_OUTPUTS = (
    "input_ids",
    "attention_mask",
    "mm_token_type_ids",
    "token_type_ids",
    "text_replacement_offsets",
    "labels",
)
SECONDS = "second_per_grid_ts"
"""Name of an array of videos: seconds between frames that the model reads together."""
CACHE_BYTES = 256 << 20
"""Size of the arrays of images that a process keeps for the next pass over the same images."""
MAX_TEXTS = 4096
"""Number of texts of images and videos that a process keeps."""


class Processor:
    """Expands placeholders of images and videos, and makes the arrays that the model reads."""

    def __init__(self, processor: ProcessorMixin, tokenizer: PreTrainedTokenizerBase) -> None:
        """`processor` is the model's own. Raises `ModelError` if it has no placeholder for images."""
        self._processor = processor
        placeholder = getattr(processor, "image_token", None)
        if not isinstance(placeholder, str):
            raise ModelError(f"{type(processor).__name__} has no placeholder for images, so images are not supported")
        self.placeholder = placeholder
        """Text that the chat template writes for an image."""
        # The placeholder of Gemma 3 is not the token of its features, which comes first among the ids of images.
        self.image_token_id = int(next(iter(processor.image_token_ids)))
        """Id of the tokens whose embeddings the features of images replace."""
        self._image_token = str(tokenizer.convert_ids_to_tokens(self.image_token_id))
        special = {*processor.image_token_ids, tokenizer.convert_tokens_to_ids(placeholder)}
        self.video_processor: Qwen2VideoProcessor | None = getattr(processor, "video_processor", None)
        """Processor of videos; None if videos are not supported."""
        self.video_token_id = -1
        """Id of the tokens whose embeddings the features of videos replace; -1 if the model has none."""
        self._placeholders = {"image": placeholder}
        video = getattr(processor, "video_token", None)
        if isinstance(video, str):
            self.video_token_id = int(tokenizer.convert_tokens_to_ids(video))
            special.add(self.video_token_id)
            if self.video_processor is not None:
                self._placeholders["video"] = video
        self._place = re.compile("|".join(map(re.escape, self._placeholders.values())))
        self.media_token_ids: tuple[int, ...] = tuple(sorted(id for id in special if isinstance(id, int)))
        """Ids that belong to images and video alone. A model must not generate them, and they are never trained."""
        self.media_tokens: tuple[str, ...] = tuple(
            map(str, tokenizer.convert_ids_to_tokens(list(self.media_token_ids)))
        )
        """Their texts."""
        self._runs = re.compile(rf"({'|'.join(map(re.escape, self.media_tokens))})\1+")
        self._texts: dict[tuple[int, int, SampledFrames | None], str] = {}
        """Tokens of images and videos by width, height and frames, on which alone they depend."""
        self._cache: OrderedDict[str, tuple[str, dict[str, npt.NDArray[Any]]]] = OrderedDict()
        self._cached_bytes = 0

    @property
    def image_processor(self) -> Any:
        """transformers' image processor of the model, with Pillow."""
        return self._processor.image_processor

    def check(self, request: GenerateRequest) -> None:
        """Raise `DataError` unless the prompt has as many tokens of images and videos as these have features.

        Decodes and processes images that are not in the cache, which takes some milliseconds each.
        """
        name = f"request {request.id!r}"
        try:
            surplus = self.surplus(request.prompt_ids, request.media)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        if surplus:
            raise DataError(f"{name}: {surplus}: expand placeholders with the model's processor")

    def surplus(self, tokens: Any, media: Sequence[Media]) -> str:
        """How the number of tokens of images and videos differs from that of their features; empty if it does not.

        `tokens` is an array or a tensor. Raises `DataError` as `tokens_of`.
        """
        for kind, id in (("image", self.image_token_id), ("video", self.video_token_id)):
            items = [item for item in media if item.kind == kind]
            num_tokens, num_features = int((tokens == id).sum()), sum(map(self.num_features, items))
            if num_tokens != num_features:
                return f"{num_tokens} {kind} tokens (id {id}) for {num_features} features of {len(items)} {kind}s"
        return ""

    def expand(self, text: str, media: Sequence[Media], where: str = "") -> str:
        """Text with each placeholder replaced by the tokens of its image or video.

        Raises `DataError` as `check_places`.
        """
        self.check_places(text, media, where)
        return self.expand_next(text, iter(media))

    def check_places(self, text: str, media: Sequence[Media], where: str = "") -> None:
        """Raise `DataError` if the placeholders in a text are not those of the images and videos."""
        places = self._place.findall(text)
        if places != [self._placeholders.get(item.kind) for item in media]:
            raise DataError(
                f"{where}: the prompt has {len(places)} placeholders {' or '.join(self._placeholders.values())} for"
                f" {len(media)} images and videos: the chat template must render one for each, and no text may contain"
                " them"
            )
        for token in self.media_tokens:
            if token not in self._placeholders.values() and token in text:
                raise DataError(f"{where}: a text contains {token!r}, a token of images that only the processor writes")

    def expand_next(self, text: str, media: Iterator[Media]) -> str:
        """Text with each placeholder replaced by the tokens of the next image or video."""
        return self._place.sub(lambda _: self.tokens_of(next(media)), text)

    def tokens_of(self, media: Media) -> str:
        """Text that replaces the placeholder of an image or a video. Raises `DataError` if it cannot process it."""
        size = media.width, media.height, media.frames
        if size not in self._texts:
            if len(self._texts) >= MAX_TEXTS:
                self._texts.clear()
            self._texts[size] = self._processed(media)[0]
        return self._texts[size]

    def token_id(self, media: Media) -> int:
        """Id of the tokens whose embeddings the features of an image or video replace."""
        return self.image_token_id if media.frames is None else self.video_token_id

    @property
    def feature_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens whose embeddings features replace: of images, and of videos if the model has them."""
        return tuple(id for id in (self.image_token_id, self.video_token_id) if id >= 0)

    def num_features(self, media: Media) -> int:
        """Number of features of an image or video: of the tokens with id `token_id`."""
        return self.tokens_of(media).count(self._token(media))

    def num_runs(self, media: Media) -> int:
        """Number of runs of these tokens: some models have a time before each frame of a video."""
        return len(re.findall(rf"(?:{re.escape(self._token(media))})+", self.tokens_of(media)))

    def shortened(self, text: str) -> str:
        """Text for people, with each run of a token of images as one token and their number."""
        return self._runs.sub(lambda run: f"{run[1]} × {len(run[0]) // len(run[1])}", text)

    def inputs(self, media: Sequence[Media]) -> dict[str, npt.NDArray[Any]]:
        """Arrays of some images or some videos for the model's forward pass, concatenated in order; empty without any.

        Images of different sizes in one array (Pixtral) are padded with zeros, as by the processor.
        """
        arrays = [self._processed(image)[1] for image in media]
        return {name: _joined([array[name] for array in arrays]) for name in (arrays[0] if arrays else ())}

    def _processed(self, media: Media) -> tuple[str, dict[str, npt.NDArray[Any]]]:
        known = self._cache.get(media.digest)
        if known is None:
            known = self._process(media)
            self._cached_bytes += sum(array.nbytes for array in known[1].values())
            self._cache[media.digest] = known
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                _, (_, dropped) = self._cache.popitem(last=False)
                self._cached_bytes -= sum(array.nbytes for array in dropped.values())
        self._cache.move_to_end(media.digest)
        return known

    def _process(self, media: Media) -> tuple[str, dict[str, npt.NDArray[Any]]]:
        import numpy as np

        if media.kind not in self._placeholders:
            raise DataError(f"{type(self._processor).__name__} reads no {media.kind}s")
        try:
            images = media.images()
            more = {"videos": [images], "video_metadata": [media.frames]} if media.frames else {"images": images}
            outputs = self._processor(
                text=[self._placeholders[media.kind]],
                return_text_replacement_offsets=True,
                add_special_tokens=False,
                **more,
            )
        except DataError:
            raise
        except Exception as error:  # processors raise all kinds of errors for images that they do not support
            size = f"{media.width} x {media.height}"
            raise DataError(
                f"{type(self._processor).__name__} cannot process {media.kind}s of {size} pixels: {one_line(error)}"
            ) from error
        ((replacement,),) = outputs["text_replacement_offsets"]
        arrays = {name: np.asarray(array) for name, array in outputs.items() if name not in TEXT_OUTPUTS}
        if SECONDS in arrays:  # a list, which becomes float32 in tensors
            arrays[SECONDS] = arrays[SECONDS].astype(np.float32)
        return replacement["replacement"], arrays

    def _token(self, media: Media) -> str:
        return self._image_token if media.frames is None else self._placeholders["video"]


def _joined(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    import numpy as np

    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) > 1:
        largest = tuple(map(max, zip(*shapes, strict=True)))
        arrays = [
            np.pad(array, [(0, 0), *((0, most - size) for most, size in zip(largest, array.shape[1:], strict=True))])
            for array in arrays
        ]
    return np.concatenate(arrays)


_PROCESSOR = "roll_processor"
"""Attribute of a tokenizer with its model's processor."""


def processor_of(tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Processor beside a tokenizer, loaded once; None if the model reads text alone. Raises `ModelError`."""
    if not hasattr(tokenizer, _PROCESSOR):
        loaded: Processor | ModelError | None
        try:
            loaded = _load_processor(str(tokenizer.name_or_path), tokenizer)
        except ModelError as error:
            loaded = error
        setattr(tokenizer, _PROCESSOR, loaded)
    processor: Processor | ModelError | None = getattr(tokenizer, _PROCESSOR)
    if isinstance(processor, ModelError):
        raise processor
    return processor


def loaded_processor(tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Processor beside a tokenizer; None, with a warning in the log, also if it cannot be loaded, because a model with
    images may be used for text alone."""
    try:
        return processor_of(tokenizer)
    except ModelError as error:
        log.warning("the model reads text alone: %s", error)
        return None


def shown_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of tokens for people: with special tokens, and with runs of image tokens shortened."""
    text = str(tokenizer.decode(ids))
    try:
        processor = processor_of(tokenizer)
    except ModelError:  # rows with images report it
        return text
    return text if processor is None else processor.shortened(text)


def _load_processor(path: str, tokenizer: PreTrainedTokenizerBase) -> Processor | None:
    """Images are processed by Pillow in every process: torchvision's resize gives other pixels, and may be missing."""
    name = _processor_class(path)
    if name is None:
        return None
    import transformers

    base = getattr(transformers, name, None)
    if base is None:
        raise ModelError(f"{path}: its processor is a {name}, which transformers {transformers.__version__} has not")
    from transformers import AutoImageProcessor

    try:
        image_processor = AutoImageProcessor.from_pretrained(path, backend="pil")
        settings = _settings(path)
        if "video_processor" in inspect.signature(base).parameters:
            video = VIDEO_PROCESSORS.get(name)
            settings["video_processor"] = video and video(image_processor, _video_settings(path))
        processor = _without_video(base)(image_processor=image_processor, tokenizer=tokenizer, **settings)
        return Processor(processor, tokenizer)
    except (OSError, ValueError, TypeError, ImportError, AttributeError) as error:
        raise ModelError(f"cannot load the processor {name} of {path}: {one_line(error)}") from error


def has_processor(path: str) -> bool:
    """True if a model's directory or hub id has a processor of images. Raises `ModelError` if it cannot be used."""
    return _processor_class(path) is not None


def reads_videos(path: str) -> bool:
    """True if the processor of a model's directory or hub id reads videos. Raises `ModelError` as `has_processor`."""
    return _processor_class(path) in VIDEO_PROCESSORS


def save_processor(path: str, directory: Path) -> None:
    """Copy the files of a model's processor, if it has one, beside its tokenizer in `directory`."""
    for name in FILES:
        if (file := _file(path, name)) is not None:
            (directory / name).write_bytes(file.read_bytes())


def _processor_class(path: str) -> str | None:
    """Name of the processor's class; None if the model has no processor of images."""
    keys = [_json(path, name) for name in (*FILES, "tokenizer_config.json")]
    if not any("image_processor_type" in entry or "image_processor" in entry for entry in keys):
        return None
    for entry in keys:
        if isinstance(name := entry.get("processor_class"), str):
            package = NEEDED_PACKAGES.get(name)
            if package is not None and importlib.util.find_spec(package) is None:
                raise ModelError(f"{path}: transformers' {name} needs {package}: pip install {package}")
            return name
    raise ModelError(f"{path}: {FILES[0]} names no processor_class, so its images cannot be processed")


def _settings(path: str) -> dict[str, Any]:
    """Arguments of a processor's class beside its parts, such as the number of tokens of an image."""
    parts = ("processor_class", "auto_map", "image_processor", "video_processor", "tokenizer", "feature_extractor")
    return {key: value for key, value in _json(path, "processor_config.json").items() if key not in parts}


def _video_settings(path: str) -> Mapping[str, Any]:
    """Settings of the processor of videos, from the first file that has them, as in transformers."""
    nested = _json(path, "processor_config.json").get("video_processor")
    return nested or _json(path, "video_preprocessor_config.json") or _json(path, "preprocessor_config.json")


def _without_video(base: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """A processor that can be built without transformers' processor of videos, which needs torchvision."""

    def check(self: ProcessorMixin, name: str, argument: object) -> object:
        if argument is None or name == "video_processor":
            return type(argument)
        return base.check_argument_for_proper_class(self, name, argument)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check})


def _json(path: str, name: str) -> Mapping[str, Any]:
    file = _file(path, name)
    try:
        value = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {name} cannot be read: {one_line(error)}") from error
    return value if isinstance(value, dict) else {}


def _file(path: str, name: str) -> Path | None:
    """A file of a directory or hub id; None if there is none."""
    if Path(path).is_dir() or Path(path).is_absolute():  # a tokenizer outlives a temporary directory
        file = Path(path, name)
        return file if file.is_file() else None
    from transformers.utils import cached_file

    cached = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if cached is None else Path(cached)
