"""From latents to pixels and back: the VAE of a pipeline, a few rows at a time.

Shapes: B rows; C channels, F frames, H height, W width of latents; pixels have 3 channels, sizes of their own, and
values in [-1, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError, ModelError, NonFiniteError
from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDecoder:
    """Decodes latents, with gradients to them. It is picklable: a process loads the VAE at its first use."""

    directory: str = ""
    """Directory of a pipeline with a VAE. Empty: latents are pixels."""
    dtype: str = "fp32"
    """Dtype of the VAE: `fp32`, `bf16` or `fp16`."""
    rows: int = 1
    """Rows that are decoded at a time. Fewer rows need less memory."""
    checkpoint: bool = False
    """If true, the backward pass computes the activations of each slice again instead of storing those of all."""

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels `[B, 3, (F,) H, W]`, clamped to [-1, 1], of latents `[B, C, (F,) H, W]`."""
        import torch

        if not self.directory:
            _need_colours(latents, "latents without a VAE")
            return latents.clamp(-1, 1)
        vae = _load_vae(self.directory, self.dtype, str(latents.device))
        decode = _Checkpointed(vae) if self.checkpoint and torch.is_grad_enabled() else vae.decode
        parts = [decode(part) for part in torch.split(latents, self.rows)]
        return torch.cat(parts).to(latents.dtype).clamp(-1, 1)

    def encode(self, pixels: Tensor) -> Tensor:
        """Latents of pixels, without gradients: the mean of the VAE's distribution."""
        import torch

        _need_colours(pixels, "pixels")
        if not self.directory:
            return pixels
        vae = _load_vae(self.directory, self.dtype, str(pixels.device))
        with torch.no_grad():
            return torch.cat([vae.encode(part) for part in torch.split(pixels, self.rows)]).to(pixels.dtype)


class _Vae:
    """A VAE of diffusers between latents as its transformer sees them and pixels."""

    def __init__(self, vae: Any, dtype: Any) -> None:
        self.vae, self.dtype = vae.eval().requires_grad_(False), dtype
        self.name = type(vae).__name__

    def decode(self, latents: Tensor) -> Tensor:
        one_frame = self.name == "AutoencoderKLQwenImage"  # a VAE of videos, used for images
        latents = self._denormalize(latents.float()).to(self.dtype)
        pixels: Tensor = self.vae.decode(latents[:, :, None] if one_frame else latents, return_dict=False)[0]
        return pixels[:, :, 0] if one_frame else pixels

    def encode(self, pixels: Tensor) -> Tensor:
        one_frame = self.name == "AutoencoderKLQwenImage"
        encoded = self.vae.encode((pixels[:, :, None] if one_frame else pixels).to(self.dtype))
        latents: Tensor = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
        return self._normalize((latents[:, :, 0] if one_frame else latents).float())

    def _denormalize(self, latents: Tensor) -> Tensor:
        mean, std = self._statistics(latents)
        latents = latents * std + mean
        if self.name != "AutoencoderKLFlux2":
            return latents
        rows, channels, height, width = latents.shape
        grid = latents.reshape(rows, channels // 4, 2, 2, height, width)  # see `Flux2`
        return grid.permute(0, 1, 4, 2, 5, 3).flatten(4, 5).flatten(2, 3)

    def _normalize(self, latents: Tensor) -> Tensor:
        if self.name == "AutoencoderKLFlux2":
            latents = latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 1, 4, 5, 2, 3).flatten(1, 3)
        mean, std = self._statistics(latents)
        return (latents - mean) / std

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the VAE's latents, per channel, by which the transformer's are normalised."""
        import torch

        config = self.vae.config
        if self.name in ("AutoencoderKLWan", "AutoencoderKLQwenImage"):
            mean, std = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
        elif self.name == "AutoencoderKLFlux2":
            norm = self.vae.bn
            mean, std = norm.running_mean.float(), (norm.running_var.float() + config.batch_norm_eps).sqrt()
        else:
            shift = getattr(config, "shift_factor", None)
            mean, std = torch.tensor([shift or 0.0]), torch.tensor([1 / config.scaling_factor])
        shape = (1, -1, *[1] * (like.dim() - 2))
        return mean.to(like.device).view(shape), std.to(like.device).view(shape)


class _Checkpointed:
    def __init__(self, vae: _Vae) -> None:
        self.vae = vae

    def __call__(self, latents: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        pixels: Tensor = checkpoint(self.vae.decode, latents, use_reentrant=False)
        return pixels


@lru_cache(maxsize=2)
def _load_vae(directory: str, dtype: str, device: str) -> _Vae:
    import diffusers
    import torch

    from roll_pipeline_diffusion.models.description import describe_vae

    description = describe_vae(Path(directory))
    if description is None:
        raise ModelError(f"{directory}: no vae/config.json, expected a pipeline with a VAE")
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    try:
        vae = getattr(diffusers, description.class_name).from_pretrained(
            Path(directory, "vae"), dtype=kind, local_files_only=True
        )
    except Exception as error:  # diffusers raises many classes for bad files
        raise ModelError(f"{directory}: the VAE cannot be loaded: {error}") from error
    return _Vae(vae.to(device), kind)


def to_unit(pixels: Tensor) -> Tensor:
    """Pixels from [-1, 1] to [0, 1], with gradients."""
    return pixels / 2 + 0.5


def to_uint8(pixels: Tensor) -> NDArray[np.uint8]:
    """Images `[B, H, W, 3]` or videos `[B, F, H, W, 3]` of pixels in [-1, 1]. Raises `NonFiniteError`."""
    import torch

    finite = pixels.detach().flatten(1).isfinite().all(1)
    if not finite.all():
        rows = (~finite).nonzero().flatten().tolist()
        raise NonFiniteError(f"pixels of rows {rows} are not finite: the model's velocities or the VAE overflow")
    levels = (to_unit(pixels.detach().float()).clamp(0, 1) * 255).round().to(torch.uint8)
    images: NDArray[np.uint8] = levels.movedim(1, -1).contiguous().cpu().numpy()
    return images


def from_uint8(images: NDArray[np.uint8]) -> Tensor:
    """Pixels in [-1, 1] of images `[B, H, W, 3]` or videos `[B, F, H, W, 3]`."""
    import torch

    return (torch.from_numpy(images).float() / 127.5 - 1).movedim(-1, 1).contiguous()


def _need_colours(pixels: Tensor, what: str) -> None:
    if pixels.dim() not in (4, 5) or pixels.shape[1] != 3:
        raise DataError(f"{what}: shape {list(pixels.shape)}, expected [B, 3, H, W] or [B, 3, F, H, W]")


document_fields(__name__)
