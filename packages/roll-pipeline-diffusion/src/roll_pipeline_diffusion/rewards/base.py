"""`ImageReward`: scores images or videos. `ImageRewards`: the rewards of a run, with their failures.

Shapes: B images, F frames of a video, H height, W width.
"""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from typing_extensions import override

from roll_core.errors import (
    ConfigError,
    ContractError,
    DataError,
    ModelError,
    RewardFailure,
    UnsupportedError,
    error_text,
)
from roll_core.spec.rollout import RewardFunction
from roll_core.types import Reward
from roll_pipeline_diffusion.rewards.config import ImageRewardConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from roll_core.spec.config import RewardConfig
    from roll_core.spec.module_program import ModuleBatch
    from roll_core.spec.rollout import RewardRequest

    Images = NDArray[np.uint8]
    """`[B, H, W, 3]`, or videos `[B, F, H, W, 3]`."""
    Row = Mapping[str, Any]
    """Columns of a row of the data."""


IMAGES_AT_ONCE = 16
"""Images that a differentiable reward scores at a time outside training."""


class ImageReward(RewardFunction):
    """Scores batches of images. A plugin offers one by the hook `roll_rewards`; its schema is an `ImageRewardConfig`.

    Only the pipeline `reward_flow` uses it: `start` and `score`, which score text, raise `UnsupportedError`.
    """

    config: ImageRewardConfig

    def load(self, device: str) -> None:
        """Load resources. Called once, before the other methods, in each process that uses the reward."""

    @abstractmethod
    def score_images(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> Sequence[Reward]:
        """Rewards of B images. A `Reward` with a failure, or `RewardFailure` for all of them, is never 0."""

    @override
    def start(self) -> None:
        raise UnsupportedError(f"reward {self.config.reward} scores images: use it with pipeline: reward_flow")

    @override
    def score(self, request: RewardRequest) -> Reward:
        raise UnsupportedError(f"reward {self.config.reward} scores images: use it with pipeline: reward_flow")


class DifferentiableReward(ImageReward):
    """An image reward with gradients to the pixels."""

    def row_arrays(self, prompt: str, row: Row) -> Mapping[str, NDArray[np.generic]]:
        """Arrays of a row that `score_tensor` needs, such as the embedding of its prompt."""
        return {}

    @abstractmethod
    def score_tensor(self, pixels: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        """Rewards `[B]` of pixels `[B, 3, (F,) H, W]` in [0, 1], given `row_arrays` `[B, ...]`."""

    @override
    def score_images(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> Sequence[Reward]:
        import torch

        rewards: list[Reward] = []
        for start in range(0, len(images), IMAGES_AT_ONCE):
            part = slice(start, start + IMAGES_AT_ONCE)
            inputs = [self.row_arrays(prompt, row) for prompt, row in zip(prompts[part], rows[part], strict=True)]
            arrays = {
                name: torch.from_numpy(np.stack([row_inputs[name] for row_inputs in inputs])) for name in inputs[0]
            }
            pixels = torch.from_numpy(np.array(images[part])).to(self.device).float().movedim(-1, 1) / 255
            with torch.no_grad():
                values = self.score_tensor(pixels, {name: tensor.to(self.device) for name, tensor in arrays.items()})
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != (len(pixels),):
                shape = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                raise ContractError(f"returned {shape} for {len(pixels)} images, expected a tensor [{len(pixels)}]")
            rewards += [Reward(value=value) for value in values.float().tolist()]
        return rewards

    device: str = "cpu"
    """Device of the arrays and of the loaded models."""

    @override
    def load(self, device: str) -> None:
        self.device = device


class ImageRewards:
    """The rewards of a run, by name. Picklable; each process loads them once, at their first use.

    A process that receives them again with every update finds the rewards that it has loaded.
    """

    def __init__(self, configs: Mapping[str, RewardConfig], device: str = "cpu") -> None:
        """`configs` are `ImageRewardConfig`: the schema of `reward_flow` refuses rewards of text."""
        self.configs: dict[str, ImageRewardConfig] = {
            name: config for name, config in configs.items() if isinstance(config, ImageRewardConfig)
        }
        self.device = device
        self.id = uuid4().hex

    def reward(self, name: str, device: str = "") -> ImageReward:
        """The reward of this name, loaded on a device, by default that of the constructor.

        Raises errors of `ImageReward.load`, and `ContractError` for exceptions of other classes.
        """
        key, loaded = (name, device or self.device), _loaded(self.id)
        if key not in loaded:
            config = self.configs[name]
            module, _, attribute = config.target.partition(":")
            reward: ImageReward = getattr(importlib.import_module(module), attribute)(config)
            try:
                reward.load(key[1])
            except (ConfigError, ModelError, DataError):
                raise
            except Exception as error:  # code of a plugin
                raise ContractError(f"{_where(name, config)}: load failed: {_describe(error)}") from error
            loaded[key] = reward
        return loaded[key]

    def score(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> dict[str, list[Reward]]:
        """Rewards of B images by name, before `weight`.

        A reward that raises, or whose value is not finite, is a failure of its images. Raises `ContractError` for a
        wrong number of rewards or another type, and `DataError` for a column that is missing or wrong.
        """
        if not len(images) == len(prompts) == len(rows):
            raise ValueError(f"{len(images)} images, {len(prompts)} prompts and {len(rows)} rows")
        return {name: self._score(name, images, prompts, rows) for name in self.configs}

    def _score(self, name: str, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> list[Reward]:
        reward, config = self.reward(name), self.configs[name]
        if not len(images):
            return []
        frames = images.shape[1] if images.ndim == 5 and config.frames == "mean" else 1
        if frames > 1 or (images.ndim == 5 and config.frames == "mean"):
            images = images.reshape(-1, *images.shape[2:])
        many = [prompt for prompt in prompts for _ in range(frames)], [row for row in rows for _ in range(frames)]
        where = _where(name, config)
        try:
            results = reward.score_images(images, *many)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except ContractError as error:
            raise ContractError(f"{where} {error}") from error
        except Exception as error:  # code of a plugin, or of the user
            reason = str(error) if isinstance(error, RewardFailure) else _describe(error)
            return [Reward(value=None, failure=f"{where}: {reason}")] * len(prompts)
        if not isinstance(results, list | tuple) or len(results) != len(images):
            size = f"{len(results)} rewards" if isinstance(results, list | tuple) else type(results).__name__
            raise ContractError(f"{where} returned {size} for {len(images)} images, expected a list with one each")
        checked = [_checked(result, where) for result in results]
        return [_mean(checked[start : start + frames]) for start in range(0, len(checked), frames)]


@lru_cache(maxsize=2)
def _loaded(id: str) -> dict[tuple[str, str], ImageReward]:
    """Rewards that this process has loaded for the `ImageRewards` of an id, by name and device."""
    return {}


class DifferentiableRewards:
    """The weighted sum of differentiable rewards, as a function of pixels. Picklable."""

    def __init__(self, rewards: ImageRewards) -> None:
        self.rewards = rewards

    def row_arrays(self, prompt: str, row: Row) -> dict[str, NDArray[np.generic]]:
        """Arrays of a row, `reward.<name>.<array>`, that its `ModuleRow` must have. Raises `DataError`."""
        arrays = {}
        for name, config in self.rewards.configs.items():
            try:
                inputs = self._reward(name).row_arrays(prompt, row)
            except DataError as error:
                raise DataError(f"{_where(name, config)}: {error}") from error
            arrays.update({f"reward.{name}.{key}": array for key, array in inputs.items()})
        return arrays

    def __call__(self, pixels: Tensor, batch: ModuleBatch) -> Tensor:
        """Weighted sums `[B]` of rewards of pixels `[B, 3, (F,) H, W]` in [-1, 1], with gradients.

        Raises `ContractError` for a reward that returns another shape, no gradients, or values that are not finite.
        """
        import torch

        unit, rows = pixels / 2 + 0.5, len(pixels)
        total = torch.zeros(rows, device=pixels.device)
        for name, config in self.rewards.configs.items():
            prefix, frames = f"reward.{name}.", 1
            arrays = {
                key.removeprefix(prefix): tensor for key, tensor in batch.tensors.items() if key.startswith(prefix)
            }
            images = unit
            if unit.dim() == 5 and config.frames == "mean":
                frames = unit.shape[2]
                images = unit.transpose(1, 2).flatten(0, 1)
                arrays = {key: tensor.repeat_interleave(frames, 0) for key, tensor in arrays.items()}
            where = _where(name, config)
            reward = self._reward(name, str(pixels.device))
            try:
                values = reward.score_tensor(images, arrays)
            except Exception as error:  # code of a plugin, or of the user
                raise ContractError(f"{where}: {_describe(error)}") from error
            if not isinstance(values, torch.Tensor) or tuple(values.shape) != (rows * frames,):
                returned = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                raise ContractError(f"{where} returned {returned}, expected a tensor [{rows * frames}]")
            if pixels.requires_grad and not values.requires_grad:
                raise ContractError(f"{where} returned values without gradients: it must not detach the pixels")
            if not values.detach().isfinite().all():
                raise ContractError(f"{where} returned values that are not finite")
            total = total + config.weight * values.float().view(rows, frames).mean(1)
        return total

    def _reward(self, name: str, device: str = "") -> DifferentiableReward:
        reward = self.rewards.reward(name, device)
        if not isinstance(reward, DifferentiableReward):
            raise ContractError(f"{_where(name, reward.config)} has no score_tensor")
        return reward


def _where(name: str, config: ImageRewardConfig) -> str:
    """Name of a reward in messages, with the code that computes it."""
    return f"rewards.{name} ({getattr(config, 'function', config.target)})"


def _describe(error: BaseException) -> str:
    text = error_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _checked(reward: Any, where: str) -> Reward:
    """A reward whose value and details are finite, otherwise a failure. Raises `ContractError` for another type."""
    if not isinstance(reward, Reward):
        raise ContractError(f"{where} returned {type(reward).__name__}, expected a Reward")
    numbers = {"its value": reward.value, **{f"detail {key}": number for key, number in reward.detail.items()}}
    for what, number in numbers.items():
        if number is not None and not isinstance(number, str) and not math.isfinite(number):
            return Reward(value=None, failure=f"{where}: {what} is {number}")
    if reward.failure or reward.value is None:
        return Reward(
            value=None, failure=f"{where}: {reward.failure or 'no value and no failure'}", detail=reward.detail
        )
    return reward


def _mean(frames: Sequence[Reward]) -> Reward:
    """The mean of the frames of a video; a failure if one of them is."""
    if len(frames) == 1:
        return frames[0]
    failed = next((reward for reward in frames if reward.failed), None)
    if failed is not None:
        return failed
    keys = set.intersection(*(set(reward.detail) for reward in frames))
    detail: dict[str, float | str] = {}
    for key in sorted(keys):
        values = [reward.detail[key] for reward in frames]
        numbers = [value for value in values if not isinstance(value, str)]
        detail[key] = sum(numbers) / len(numbers) if len(numbers) == len(values) else str(values[0])
    return Reward(value=sum(reward.value or 0.0 for reward in frames) / len(frames), detail=detail)
