"""Whether a model is made of Transformer Engine's modules, which need CUDA and are not there everywhere."""

from __future__ import annotations

import importlib
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from roll_core.spec.model import ModelSpec
    from roll_strategy_megatron.config import MegatronConfig

ENGINE = "transformer_engine"
OLDEST = "2.9"
"""The first that megatron-core 0.16.1 names."""
INSTALL = f"pip install --no-build-isolation 'transformer-engine[pytorch]>={OLDEST}'"
BACKENDS = {"auto": "111", "flash": "100", "fused": "010"}
"""What Megatron sets NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN to, by `attention_backend`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Make:
    """What the layers of a model are made of."""

    engine: bool
    """Transformer Engine's modules rather than Megatron's own."""
    grouped: bool = False
    """The experts of a rank are computed together."""
    fused_norms: bool = False
    """A norm and the matrix behind it are one module, from which what adapters take in does not come out."""


def choose(config: MegatronConfig, model: ModelSpec, device: torch.device, settings: Mapping[str, Any]) -> Make:
    """For a model with these arguments of Megatron's `TransformerConfig`. Raises `UnsupportedError` for what is asked
    for by name and cannot be had."""
    asked = config.transformer_impl == ENGINE
    reason = _why_not(config, settings)
    if asked and reason:
        raise UnsupportedError(
            f"transformer_impl: {ENGINE}: {reason}. Leave it out, and Megatron's own layers are taken"
        )
    if not asked:
        reason = reason or _unsuited(model, device)
    for key, wanted in (
        ("moe_grouped_gemm: true", bool(config.moe_grouped_gemm)),
        (f"attention_backend: {config.attention_backend}", config.attention_backend != "auto"),
    ):
        if wanted and reason:
            raise UnsupportedError(
                f"{key} is of Transformer Engine's layers, and these are Megatron's own: {reason}. Leave it out"
            )
    _check_environment(config)
    if reason:
        return Make(engine=False)
    return Make(engine=True, grouped=config.moe_grouped_gemm is not False, fused_norms=model.lora is None)


def lacking_engine() -> str:
    """Why Transformer Engine cannot be used in this process; empty where it can."""
    if find_spec(ENGINE) is None:
        return f"Transformer Engine is not installed. It needs CUDA: {INSTALL}"
    try:
        importlib.import_module(f"{ENGINE}.pytorch")
    except Exception as error:  # of a library that was compiled for another torch or CUDA: whatever it raises
        return f"Transformer Engine cannot be imported ({type(error).__name__}: {error}). Compiled anew: {INSTALL}"
    from megatron.core.utils import get_te_version, is_te_min_version

    if not is_te_min_version(OLDEST):
        return f"Transformer Engine {get_te_version()} is older than Megatron wants: {INSTALL}"
    return ""


def _why_not(config: MegatronConfig, settings: Mapping[str, Any]) -> str:
    """What speaks against it, whether or not it is asked for."""
    if config.transformer_impl == "local":
        return "transformer_impl is local"
    lacking = lacking_engine()
    if lacking:
        if find_spec(ENGINE) is not None:
            logger.warning("%s; layers are Megatron's own", lacking)
        return lacking
    if settings.get("window_size") and config.context_parallel_size > 1:
        return "it has no attention within a window where ranks share sequences (context_parallel_size)"
    return ""


def _unsuited(model: ModelSpec, device: torch.device) -> str:
    """Why `auto` does without it."""
    if device.type != "cuda":
        return f"the device is {device}"
    if model.dtype != "bf16":
        return f"its attention is for bf16, and the model's dtype is {model.dtype}"
    return ""


def _check_environment(config: MegatronConfig) -> None:
    """Megatron wants three variables to be what the config says, or not set."""
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    for name, expected in zip(names, BACKENDS[config.attention_backend], strict=True):
        found = os.environ.get(name, expected)
        if found != expected:
            raise ModelError(
                f"{name} is {found} in the environment, and attention_backend: {config.attention_backend} makes it"
                f" {expected}. Leave the variable out, and name flash or fused as attention_backend; roles that share"
                " a process name the same"
            )
