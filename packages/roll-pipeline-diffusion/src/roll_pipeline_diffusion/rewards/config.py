"""Config schemas of image rewards. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.errors import install_command
from roll_core.spec.config import PositiveFloat, PositiveInt, RewardConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Fraction = Annotated[float, Field(ge=0, le=1)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]


RAPIDOCR = "roll_pipeline_diffusion.rewards.function:read_text"
READER = ("image",)
"""Arguments of `image_text`'s reader."""
FUNCTION = ("images", "prompts", "rows")
"""Arguments of a function of `image_function`."""
DIFFERENTIABLE = ("pixels", "columns")
"""Arguments of a differentiable one."""
OF_WORKERS = (
    "tag_included",
    "query_filter_config",
    "processes",
    "start_timeout_s",
    "device_mapping",
    "num_gpus_per_worker",
    "world_size",
    "system_envs",
    "environment",
)
"""Keys of rewards of text: image rewards score all images, in the process of the run."""
WITHOUT_CALLS = (*OF_WORKERS, "timeout_s", "max_retries")
"""Keys without an effect on rewards that call no code of a user and no endpoint."""


class ImageRewardConfig(RewardConfig):
    """Base of the schemas of image rewards."""

    target: ClassVar[str]
    """`"module:Class"` of the `ImageReward`, as in its provider."""
    sees_videos: ClassVar[bool] = False
    """True if the reward takes videos, otherwise only their frames."""
    unread: ClassVar[tuple[str, ...]] = OF_WORKERS
    """Inherited keys that have no effect, and are refused."""

    frames: Literal["mean", "together"] = "mean"
    """Frames of a video: `mean` scores each by itself and averages; `together` gives the reward the whole video."""

    @property
    def has_gradients(self) -> bool:
        """True if the reward is a `DifferentiableReward`, which `refl` can train on."""
        return False

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> ImageRewardConfig:
        # A saved config contains every default explicitly, so only other values count as given.
        fields = RewardConfig.model_fields
        unused = [
            key for key in self.unread if getattr(self, key) != fields[key].get_default(call_default_factory=True)
        ]
        if unused:
            raise ValueError(
                f"{unused[0]} has no effect with reward: {self.reward}, remove it: it scores all images, in the process"
                " of the run"
            )
        return self

    @model_validator(mode="after")
    def _takes_videos(self) -> ImageRewardConfig:
        if self.frames == "together" and not self.sees_videos:
            raise ValueError(f"frames: together, but reward {self.reward} scores single images: set frames: mean")
        return self


class DifferentiableRewardConfig(ImageRewardConfig):
    """Base of the schemas of rewards that always have gradients."""

    @property
    @override
    def has_gradients(self) -> bool:
        return True


class BrightnessConfig(DifferentiableRewardConfig):
    """`reward: image_brightness`: the mean luminance, from 0 to 1."""

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.pixels:BrightnessReward"
    unread: ClassVar[tuple[str, ...]] = WITHOUT_CALLS

    reward: Literal["image_brightness"]


class ColorConfig(DifferentiableRewardConfig):
    """`reward: image_color`: 1 minus the mean distance of pixels to a colour."""

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.pixels:ColorReward"
    unread: ClassVar[tuple[str, ...]] = WITHOUT_CALLS

    reward: Literal["image_color"]
    color: Annotated[list[Fraction], Field(min_length=3, max_length=3)] | None = None
    """Red, green and blue, from 0 to 1. Default: the column `color` of each row."""


class JpegSizeConfig(ImageRewardConfig):
    """`reward: jpeg_size`: size of the image as JPEG in kB. A negative `weight` rewards compressible images."""

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.pixels:JpegSizeReward"
    unread: ClassVar[tuple[str, ...]] = WITHOUT_CALLS

    reward: Literal["jpeg_size"]
    quality: Annotated[int, Field(ge=1, le=100)] = 95
    """Quality of the JPEG, as in DDPO."""


class ClipScoreConfig(DifferentiableRewardConfig):
    """`reward: clip_score`: similarity of image and prompt by a CLIP model, or a model like PickScore."""

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.clip:ClipScoreReward"
    unread: ClassVar[tuple[str, ...]] = WITHOUT_CALLS

    reward: Literal["clip_score"]
    model_name_or_path: str
    """Directory of a CLIP model with its tokenizer."""
    logits: bool = False
    """If true, the cosine similarity is multiplied by the model's learned scale, as PickScore does."""

    @override
    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        return _missing(self.model_name_or_path, "config.json", "model_name_or_path")


class AestheticConfig(DifferentiableRewardConfig):
    """`reward: aesthetic`: the output of linear layers on the embedding of an image by CLIP."""

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.clip:AestheticReward"
    unread: ClassVar[tuple[str, ...]] = WITHOUT_CALLS

    reward: Literal["aesthetic"]
    model_name_or_path: str
    """Directory of a CLIP model."""
    head: str
    """File with the head's weights: `.safetensors`, or a state of torch."""

    @override
    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        return {
            **_missing(self.model_name_or_path, "config.json", "model_name_or_path"),
            **_missing(self.head, "", "head"),
        }


class ImageTextConfig(ImageRewardConfig):
    """`reward: image_text`: 1 minus the edit distance between text in the image and the text that it must have."""

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.function:TextReward"
    unread: ClassVar[tuple[str, ...]] = (*OF_WORKERS, "max_retries")

    reward: Literal["image_text"]
    reader: FunctionName = RAPIDOCR
    """`module:function` that reads an image: `f(image) -> str`, of `image` `[H, W, 3]` uint8. Default: RapidOCR."""
    text: str = "text"
    """Column with the text. Rows without it need a quoted text in the prompt."""
    timeout_s: PositiveFloat = 60.0
    """Maximum seconds to read the images of a batch. All of them then count as failed."""

    @override
    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        absent = [name for name in ("rapidocr", "onnxruntime") if importlib.util.find_spec(name) is None]
        if self.reader == RAPIDOCR and absent:
            install = install_command("roll-pipeline-diffusion[ocr]")
            message = f"the default reader needs {' and '.join(absent)}: {install}, or name a function of yours"
            return {"reader": message}
        return _uncallable(self.reader, READER, "reader", timeout_s)


class ImageFunctionConfig(ImageRewardConfig):
    """`reward: image_function`: a user's Python function.

    `f(images, prompts, rows)` returns a number, a `Reward` or a dict with `value` for each image. With
    `differentiable`, `f(pixels, columns)` returns a tensor `[B]` with gradients.
    """

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.function:FunctionReward"
    unread: ClassVar[tuple[str, ...]] = (*OF_WORKERS, "max_retries")
    sees_videos: ClassVar[bool] = True

    reward: Literal["image_function"]
    function: FunctionName
    """`module:function`, importable from the working directory."""
    differentiable: bool = False
    """If true, the function takes pixels in [0, 1] as a tensor `[B, 3, H, W]`, so that `refl` can train on it."""
    numbers: list[str] = Field(default_factory=list)
    """Columns with numbers, or lists of numbers, that a differentiable function needs. It gets them as tensors."""
    timeout_s: PositiveFloat = 60.0
    """Maximum seconds to score a batch. All its samples then count as failed. A call that hangs cannot be stopped."""

    @model_validator(mode="after")
    def _numbers_are_read(self) -> ImageFunctionConfig:
        if self.numbers and not self.differentiable:
            raise ValueError("numbers: ignored without differentiable: true; the function gets all columns as rows")
        return self

    @property
    @override
    def has_gradients(self) -> bool:
        return self.differentiable

    @property
    def parameters(self) -> tuple[str, ...]:
        """Arguments of the function."""
        return DIFFERENTIABLE if self.differentiable else FUNCTION

    @override
    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        missing = [] if columns is None else [name for name in self.numbers if name not in columns]
        if missing:
            present = ", ".join(sorted(columns or ()))
            return {"numbers": f"the rows have no column {missing[0]!r}, only {present}"}
        return _uncallable(self.function, self.parameters, "function", timeout_s)


class ImageHttpConfig(ImageRewardConfig):
    """`reward: image_http`: an endpoint that scores images.

    It receives `{"images": [...], "prompts": [...], "rows": [...]}` with images as PNG in base64, a list of them for
    a video. It returns `{"scores": [...]}`: a number, `{"value": ..., "detail": {...}}` or `{"failure": "why"}` each.
    """

    target: ClassVar[str] = "roll_pipeline_diffusion.rewards.http:HttpReward"
    sees_videos: ClassVar[bool] = True

    reward: Literal["image_http"]
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """Address of the endpoint."""
    api_key: str = ""
    """Sent as `Authorization: Bearer …`. It is removed from records; `${oc.env:NAME}` reads a variable."""
    row_columns: list[str] = Field(default_factory=list)
    """Columns of the rows to send."""
    batch_size: PositiveInt = 16
    """Maximum number of images of a request."""
    timeout_s: PositiveFloat = 60.0
    """Maximum seconds of a request, until its whole reply has arrived."""

    @override
    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        missing = [] if columns is None else [name for name in self.row_columns if name not in columns]
        if missing:
            return {"row_columns": f"the rows have no column {missing[0]!r}, only {', '.join(sorted(columns or ()))}"}
        return {}


def _missing(path: str, file: str, key: str) -> dict[str, str]:
    weights = Path(path).expanduser() / file
    return {} if weights.is_file() else {key: f"{weights} does not exist: download the weights first"}


def _uncallable(function: str, parameters: tuple[str, ...], key: str, timeout_s: float) -> dict[str, str]:
    """Import a user's function in a child process. Raises `TimeoutError`."""
    call = "import sys; from roll_pipeline_diffusion.rewards.function import check; check(*sys.argv[1:])"
    path = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
    try:
        ended = subprocess.run(
            [sys.executable, "-c", call, function, *parameters],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"importing {function} takes longer than {timeout_s:g} s") from error
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines and lines[-1].startswith("{"):
        problem = json.loads(lines[-1])["problem"]
        return {key: problem} if problem else {}
    reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return {key: f"{function} cannot be imported: {reason}"}
