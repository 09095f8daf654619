"""Families of diffusers transformers: how each computes a velocity. One adapter per `_class_name`.

All of them predict the velocity `v = ε − x_0` of `x_σ = (1 − σ) x_0 + σ ε`. They differ in the layout of latents, in
the scale of the timestep and in their conditioning. An adapter calls the transformer as the family's pipeline in
diffusers does.

Imports neither torch nor diffusers, so that configs can be checked without them.

Shapes: B rows; C channels, F frames, H height, W width of latents; L text tokens, D width of their embeddings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from roll_core.errors import DataError, ModelError
from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

TIMESTEPS = 1000
"""Timestep of σ = 1. Every family was trained with it."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A tensor that the model is conditioned on."""

    shape: tuple[int | None, ...]
    """Shape of one row; None: any size."""
    required: bool = True
    mask: bool = False
    """True if it marks the text tokens that are not padding."""


class Family(ABC):
    """One class of transformers."""

    class_name: ClassVar[str]
    """`_class_name` in the transformer's config."""
    defaults: ClassVar[Mapping[str, Any]]
    """Keys of the config that this module reads, with diffusers' defaults."""
    blocks: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    """Attributes of the transformer with its repeated blocks."""
    video: ClassVar[bool] = False
    """True if latents are `[B, C, F, H, W]`, otherwise `[B, C, H, W]`."""
    max_text_tokens: ClassVar[int] = 512
    """Maximum number of text tokens, by default. SD3 adds 77 tokens of its CLIP encoders."""

    @abstractmethod
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        """Tensors that `velocity` needs, by name."""

    @abstractmethod
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        """Velocity like `latents`, for `sigma` `[B]` and conditioning tensors `[B, ...]`."""

    def latent_channels(self, config: Mapping[str, Any]) -> int:
        """Number of channels of the latents, C."""
        return int(config["in_channels"])

    def patch(self, config: Mapping[str, Any]) -> int:
        """H and W are multiples of it."""
        return int(config["patch_size"])

    def problem(self, config: Mapping[str, Any]) -> str:
        """Why a transformer with this config is unsupported; empty if it is supported."""
        return ""

    def config(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """`keys` of a config, and the defaults of those that are missing. Raises `ModelError` if unsupported."""
        config = {**self.defaults, **keys}
        if problem := self.problem(config):
            raise ModelError(f"{self.class_name} is unsupported with {problem}")
        return config

    def check(self, config: Mapping[str, Any], cond: Mapping[str, Any], where: str, *, rows: bool = True) -> None:
        """Check conditioning tensors or arrays, with a first dimension B if `rows`. Raises `DataError`."""
        expected = self.conditioning(config)
        if unknown := sorted(set(cond) - set(expected)):
            raise DataError(
                f"{where}: {self.class_name} has no conditioning {unknown[0]!r}, only {', '.join(expected)}"
            )
        for name, condition in expected.items():
            if name not in cond:
                if condition.required:
                    present = ", ".join(cond) or "none"
                    raise DataError(f"{where}: {self.class_name} needs conditioning {name!r}, found {present}")
                continue
            shape = tuple(cond[name].shape)[1:] if rows else tuple(cond[name].shape)
            same = len(shape) == len(condition.shape) and all(
                size in (None, actual) for size, actual in zip(condition.shape, shape, strict=True)
            )
            if not same:
                dims = "[" + ", ".join("any" if size is None else str(size) for size in condition.shape) + "]"
                raise DataError(f"{where}: {name} has shape {list(shape)} per row, {self.class_name} needs {dims}")
        tokens = {name: cond[name].shape[int(rows)] for name in cond if expected[name].shape[:1] == (None,)}
        if len(set(tokens.values())) > 1:
            present = ", ".join(f"{name} {number}" for name, number in tokens.items())
            raise DataError(f"{where}: different numbers of text tokens: {present}")


class StableDiffusion3(Family):
    """SD3 and SD3.5 (arXiv:2403.03206). Timesteps are `1000 σ`."""

    class_name = "SD3Transformer2DModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 16,
        "patch_size": 2,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
    }
    max_text_tokens = 256

    @override
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        return {
            "prompt_embeds": Conditioning((None, config["joint_attention_dim"])),
            "pooled_prompt_embeds": Conditioning((config["pooled_projection_dim"],)),
        }

    @override
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        return _output(
            transformer(
                hidden_states=latents,
                timestep=sigma * TIMESTEPS,
                encoder_hidden_states=cond["prompt_embeds"],
                pooled_projections=cond["pooled_prompt_embeds"],
                return_dict=False,
            )
        )


class PackedFamily(Family):
    """A family whose transformer takes patches of 2×2, packed into tokens with 4 C channels."""

    @override
    def latent_channels(self, config: Mapping[str, Any]) -> int:
        return int(config["in_channels"]) // 4

    @override
    def patch(self, config: Mapping[str, Any]) -> int:
        return 2


class Flux(PackedFamily):
    """FLUX.1. The transformer multiplies timesteps by 1000."""

    class_name = "FluxTransformer2DModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
    }
    blocks = ("transformer_blocks", "single_transformer_blocks")

    @override
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        return {
            "prompt_embeds": Conditioning((None, config["joint_attention_dim"])),
            "pooled_prompt_embeds": Conditioning((config["pooled_projection_dim"],)),
            **({"guidance": Conditioning(())} if config["guidance_embeds"] else {}),
        }

    @override
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        import torch

        height, width = latents.shape[-2:]
        text = cond["prompt_embeds"]
        ids = torch.zeros(height // 2, width // 2, 3, device=latents.device)
        ids[..., 1] = torch.arange(height // 2, device=latents.device)[:, None]
        ids[..., 2] = torch.arange(width // 2, device=latents.device)[None, :]
        packed = transformer(
            hidden_states=_pack(latents),
            timestep=sigma,
            guidance=cond.get("guidance"),
            pooled_projections=cond["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=latents.device),
            img_ids=ids.flatten(0, 1),
            return_dict=False,
        )
        return _unpack(_output(packed), height, width)


class Flux2(Family):
    """FLUX.2. Its latents are patchified already: C is four times the channels of the VAE."""

    class_name = "Flux2Transformer2DModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 128,
        "joint_attention_dim": 15360,
        "guidance_embeds": True,
        "patch_size": 1,
    }
    blocks = ("transformer_blocks", "single_transformer_blocks")

    @override
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        return {
            "prompt_embeds": Conditioning((None, config["joint_attention_dim"])),
            **({"guidance": Conditioning(())} if config["guidance_embeds"] else {}),
        }

    @override
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        import torch

        height, width = latents.shape[-2:]
        text = cond["prompt_embeds"]
        one = torch.arange(1)
        packed = transformer(
            hidden_states=latents.flatten(2).transpose(1, 2),
            timestep=sigma,
            guidance=cond.get("guidance"),
            encoder_hidden_states=text,
            # Positions (time, row, column, text token).
            txt_ids=torch.cartesian_prod(one, one, one, torch.arange(text.shape[1])).to(latents.device),
            img_ids=torch.cartesian_prod(one, torch.arange(height), torch.arange(width), one).to(latents.device),
            return_dict=False,
        )
        return _output(packed).transpose(1, 2).reshape(len(latents), -1, height, width)


class QwenImage(PackedFamily):
    """Qwen-Image (arXiv:2508.02324). The timestep is σ."""

    class_name = "QwenImageTransformer2DModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 64,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "zero_cond_t": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    }

    @override
    def problem(self, config: Mapping[str, Any]) -> str:
        keys = ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope")
        return next((f"{key}: true" for key in keys if config[key]), "")

    @override
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        return {
            "prompt_embeds": Conditioning((None, config["joint_attention_dim"])),
            "prompt_embeds_mask": Conditioning((None,), required=False, mask=True),
        }

    @override
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        height, width = latents.shape[-2:]
        mask = cond.get("prompt_embeds_mask")
        packed = transformer(
            hidden_states=_pack(latents),
            timestep=sigma,
            encoder_hidden_states=cond["prompt_embeds"],
            encoder_hidden_states_mask=None if mask is None else mask.bool(),
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
        )
        return _unpack(_output(packed), height, width)


class Wan(Family):
    """Text to video of Wan 2.1 and 2.2 (arXiv:2503.20314). Timesteps are `1000 σ`."""

    class_name = "WanTransformer3DModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": (1, 2, 2),
        "text_dim": 4096,
        "image_dim": None,
    }
    blocks = ("blocks",)
    video = True

    @override
    def problem(self, config: Mapping[str, Any]) -> str:
        if config["image_dim"] is not None:
            return f"image_dim: {config['image_dim']} (image to video)"
        if config["in_channels"] != (config["out_channels"] or config["in_channels"]):
            return f"in_channels {config['in_channels']} and out_channels {config['out_channels']} (image to video)"
        if config["patch_size"][0] != 1 or config["patch_size"][1] != config["patch_size"][2]:
            return f"patch_size: {list(config['patch_size'])}, expected [1, n, n]"
        return ""

    @override
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        return {"prompt_embeds": Conditioning((None, config["text_dim"]))}

    @override
    def patch(self, config: Mapping[str, Any]) -> int:
        return int(config["patch_size"][1])

    @override
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        return _output(
            transformer(
                hidden_states=latents,
                timestep=sigma * TIMESTEPS,
                encoder_hidden_states=cond["prompt_embeds"],
                return_dict=False,
            )
        )


class Sana(Family):
    """Sana (arXiv:2410.10629). Timesteps are `1000 σ · timestep_scale`. Channels of a learned variance are dropped."""

    class_name = "SanaTransformer2DModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 32,
        "patch_size": 1,
        "caption_channels": 2304,
        "guidance_embeds": False,
        "timestep_scale": 1.0,
    }
    max_text_tokens = 300

    @override
    def problem(self, config: Mapping[str, Any]) -> str:
        return "guidance_embeds: true (Sana Sprint)" if config["guidance_embeds"] else ""

    @override
    def conditioning(self, config: Mapping[str, Any]) -> Mapping[str, Conditioning]:
        return {
            "prompt_embeds": Conditioning((None, config["caption_channels"])),
            "prompt_attention_mask": Conditioning((None,), required=False, mask=True),
        }

    @override
    def velocity(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
        scale: float = transformer.config.timestep_scale  # type: ignore[assignment, union-attr]
        result = transformer(
            latents,
            encoder_hidden_states=cond["prompt_embeds"],
            encoder_attention_mask=cond.get("prompt_attention_mask"),
            timestep=sigma * TIMESTEPS * scale,
            return_dict=False,
        )
        return _output(result)[:, : latents.shape[1]]


FAMILIES: dict[str, Family] = {
    family.class_name: family for family in (StableDiffusion3(), Flux(), Flux2(), QwenImage(), Wan(), Sana())
}
"""Supported families of transformers, by `_class_name`."""


def family_of(class_name: object, where: str) -> Family:
    """The family of a transformer's class. Raises `ModelError`, which names the known classes."""
    family = FAMILIES.get(class_name) if isinstance(class_name, str) else None
    if family is None:
        raise ModelError(f"{where}: _class_name {class_name!r} is no known flow model, expected {', '.join(FAMILIES)}")
    return family


def _output(result: tuple[Tensor, ...]) -> Tensor:
    return result[0]


def _pack(latents: Tensor) -> Tensor:
    """`[B, C, H, W]` as tokens `[B, H/2 · W/2, 4 C]`. Channels of a token: C, row, column."""
    return latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def _unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Latents `[B, C, H, W]` of tokens: the inverse of `_pack`."""
    grid = tokens.reshape(len(tokens), height // 2, width // 2, -1, 2, 2)
    return grid.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


document_fields(__name__)
