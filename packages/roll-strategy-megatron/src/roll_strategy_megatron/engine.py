"""Choice between Megatron's own layers and Transformer Engine's, which require CUDA and a separate installation."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError, UnsupportedError, install_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from roll_core.spec.model import ModelSpec
    from roll_strategy_megatron.config import MegatronConfig

ENGINE = "transformer_engine"
OLDEST = "2.9"
"""Oldest version supported by megatron-core 0.16.1."""
BACKENDS = {"auto": "111", "flash": "100", "fused": "010"}
"""Values of NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN that Megatron sets, by `attention_backend`."""

logger = logging.getLogger(__name__)


def install() -> str:
    """Command that installs Transformer Engine, which is built against the installed torch."""
    return install_command("--no-build-isolation", f"transformer-engine[pytorch]>={OLDEST}")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Implementation of a model's layers."""

    engine: bool
    """Use Transformer Engine's modules instead of Megatron's own."""
    grouped: bool = False
    """Compute a rank's experts together (grouped GEMM)."""
    fused_norms: bool = False
    """Fuse norms with the following linear layer.

    Off with LoRA, because a fused module does not expose the adapters' input.
    """


def choose(config: MegatronConfig, model: ModelSpec, device: torch.device, settings: Mapping[str, Any]) -> LayerSpec:
    """Choose the layer implementation. `settings` are the arguments of Megatron's `TransformerConfig`.

    Raises `UnsupportedError` if the config requires Transformer Engine and it cannot be used, and `ModelError` if
    environment variables contradict `attention_backend`.
    """
    asked = config.transformer_impl == ENGINE
    reason = _why_not(config, settings)
    if asked and reason:
        raise UnsupportedError(f"transformer_impl: {ENGINE}: {reason}. Remove the key to use Megatron's own layers")
    if not asked:
        reason = reason or _unsuited(model, device)
    for key, requested in (
        ("moe_grouped_gemm: true", bool(config.moe_grouped_gemm)),
        (f"attention_backend: {config.attention_backend}", config.attention_backend != "auto"),
    ):
        if requested and reason:
            raise UnsupportedError(
                f"{key} requires Transformer Engine's layers, but Megatron's own are used: {reason}. Remove the key"
            )
    _check_environment(config)
    if reason:
        return LayerSpec(engine=False)
    return LayerSpec(engine=True, grouped=config.moe_grouped_gemm is not False, fused_norms=model.lora is None)


def lacking_engine() -> str:
    """Why Transformer Engine cannot be used in this process; empty if it can."""
    if find_spec(ENGINE) is None:
        return f"Transformer Engine is not installed. It needs CUDA: {install()}"
    try:
        importlib.import_module(f"{ENGINE}.pytorch")
    except Exception as error:  # a library built for a different torch or CUDA may raise anything
        return f"Transformer Engine cannot be imported ({type(error).__name__}: {error}). Reinstall it: {install()}"
    from megatron.core.utils import get_te_version, is_te_min_version

    if not is_te_min_version(OLDEST):
        return f"Transformer Engine {get_te_version()} is older than Megatron requires: {install()}"
    return ""


def _why_not(config: MegatronConfig, settings: Mapping[str, Any]) -> str:
    """Why Transformer Engine cannot be used with this config; empty if it can."""
    if config.transformer_impl == "local":
        return "transformer_impl is local"
    lacking = lacking_engine()
    if lacking:
        if find_spec(ENGINE) is not None:
            logger.warning("%s; layers are Megatron's own", lacking)
        return lacking
    if settings.get("attention_softcap"):
        return "its attention has no soft-capped scores"
    if settings.get("softmax_type", "vanilla") != "vanilla":
        return "its attention sinks have not been tried"
    if settings.get("window_size") and config.context_parallel_size > 1:
        return "it has no attention within a window where ranks share sequences (context_parallel_size)"
    return ""


def _unsuited(model: ModelSpec, device: torch.device) -> str:
    """Why `auto` selects Megatron's own layers; empty if it does not."""
    if device.type != "cuda":
        return f"the device is {device}"
    if model.dtype != "bf16":
        return f"its attention is for bf16, and the model's dtype is {model.dtype}"
    return ""


def _check_environment(config: MegatronConfig) -> None:
    """Raise `ModelError` if NVTE variables in the environment contradict `attention_backend`; Megatron would fail on
    them."""
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    for name, expected in zip(names, BACKENDS[config.attention_backend], strict=True):
        current = os.environ.get(name, expected)
        if current != expected:
            raise ModelError(
                f"{name} is {current} in the environment, and attention_backend: {config.attention_backend} requires"
                f" {expected}. Unset the variable, and set attention_backend to flash or fused; roles that share a"
                " process need the same value"
            )
