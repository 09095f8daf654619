"""Tiny random models of diffusers: transformers, VAEs, and whole pipelines in directories."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from roll_core.spec.model import ModelSpec
from roll_pipeline_diffusion.models.library import DiffusersLibrary, FlowModel

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = DiffusersLibrary()
TINY: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16, "pooled_projection_dim": 12,
        "out_channels": 4, "pos_embed_max_size": 8,
    },
    "FluxTransformer2DModel": {
        "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 12, "guidance_embeds": True,
        "axes_dims_rope": [4, 2, 2],
    },
    "Flux2Transformer2DModel": {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 16, "timestep_guidance_channels": 8, "axes_dims_rope": [2, 2, 2, 2],
    },
    "QwenImageTransformer2DModel": {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": [2, 2, 4],
    },
    "WanTransformer3DModel": {
        "patch_size": [1, 2, 2], "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    },
    "SanaTransformer2DModel": {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16,
        "caption_channels": 12, "sample_size": 8, "patch_size": 1, "timestep_scale": 1.0,
    },
}  # fmt: skip
"""Keys of tiny configs by `_class_name`."""


def tiny_keys(name: str, **others: Any) -> dict[str, Any]:
    """`random_init` of a tiny model."""
    return {"_class_name": name, **TINY[name], **others}


def spec_of(name: str, **others: Any) -> ModelSpec:
    return ModelSpec(task="flow", random_init=tiny_keys(name, **others), seed=7)


def loaded(spec: ModelSpec) -> FlowModel:
    model = LIBRARY.load(spec)
    assert isinstance(model, FlowModel)
    return model


def tiny_vae(name: str = "AutoencoderKL", **keys: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        if name == "AutoencoderKL":
            given = {
                "block_out_channels": [4, 4], "down_block_types": ["DownEncoderBlock2D"] * 2, "layers_per_block": 1,
                "up_block_types": ["UpDecoderBlock2D"] * 2, "latent_channels": 4, "norm_num_groups": 2,
                "scaling_factor": 1.5, "shift_factor": 0.1, "use_quant_conv": False, "use_post_quant_conv": False,
            }  # fmt: skip
        elif name == "AutoencoderKLWan" or name == "AutoencoderKLQwenImage":
            given = {
                "base_dim": 3, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
                "temperal_downsample": [False, True, True], "latents_mean": [0.1, -0.2, 0.3, 0.0],
                "latents_std": [1.5, 2.0, 0.5, 1.0],
            }  # fmt: skip
        elif name == "AutoencoderKLFlux2":
            given = {
                "block_out_channels": [4, 4], "down_block_types": ["DownEncoderBlock2D"] * 2, "layers_per_block": 1,
                "up_block_types": ["UpDecoderBlock2D"] * 2, "latent_channels": 4, "norm_num_groups": 2,
            }  # fmt: skip
        else:
            given = {
                "latent_channels": 4, "attention_head_dim": 2, "scaling_factor": 0.5,
                "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
                "decoder_block_types": ["ResBlock", "EfficientViTBlock"], "encoder_block_out_channels": [4, 8],
                "decoder_block_out_channels": [4, 8], "encoder_qkv_multiscales": [[], [5]],
                "decoder_qkv_multiscales": [[], [5]], "encoder_layers_per_block": [1, 1],
                "decoder_layers_per_block": [1, 1], "downsample_block_type": "conv", "decoder_act_fns": "silu",
                "upsample_block_type": "interpolate", "decoder_norm_types": "rms_norm",
            }  # fmt: skip
        return getattr(diffusers, name)(**given, **keys).eval()


def scheduler(**keys: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**keys)


def wan_pipeline(experts: int) -> Any:
    parts = [loaded(replace(spec_of("WanTransformer3DModel"), seed=seed)).transformer for seed in (7, 8)]
    boundary = {"transformer_2": parts[1], "boundary_ratio": 0.8} if experts == 2 else {}
    pipe = diffusers.WanPipeline(None, None, tiny_vae("AutoencoderKLWan"), scheduler(), parts[0], **boundary)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save_without_text(pipe: Any, path: Path) -> Path:
    pipe.save_pretrained(path)
    return path


def tiny_sd3(path: Path) -> Any:
    """A whole SD3 pipeline: two CLIP encoders with a tokenizer of a few words, and no T5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", "a", "red", "blue", "circle"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=6
    )
    encoders = []
    for seed in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = CLIPTextConfig(
                vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=6, projection_dim=6, eos_token_id=1, pad_token_id=0, bos_token_id=1,
            )  # fmt: skip
            encoders.append(CLIPTextModelWithProjection(config).eval())
    model = loaded(spec_of("SD3Transformer2DModel", joint_attention_dim=16, pooled_projection_dim=12))
    pipe = diffusers.StableDiffusion3Pipeline(
        model.transformer, scheduler(), tiny_vae(), encoders[0], fast, encoders[1], fast, None, None
    )
    pipe.save_pretrained(path)
    return pipe
