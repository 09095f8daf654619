"""Launch of SGLang's server: server arguments, environment variables and model files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_infer_sglang.config import IMAGE_TYPES, PLAIN_BACKEND
from roll_infer_sglang.engine_environment import engine_environment
from roll_infer_sglang.hooks import ADAPTER, base_name
from roll_infer_sglang.memory import HOST_TOKENS
from roll_infer_sglang.processes import LOADER, adapter_arguments
from roll_infer_sglang.registration import SAMPLING_BACKEND
from roll_infer_sglang.sampling import MEDIA_TOKENS
from roll_infer_sglang.server import ServerError, SglangServer
from roll_modeling.engine_config import ONE_SLOT
from roll_modeling.engine_files import EngineFiles, engine_files, interleaved_rope, released_keys
from roll_modeling.model_table import has_experts
from roll_modeling.routing import RoutingLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.data.processor import Processor
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_infer_sglang.config import SglangConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SPARE_TOKENS = 8
"""Maximum number of tokens of its context length that SGLang reserves."""
POSITIONS = 2048
"""SGLang's maximum sequence length, in tokens, of a model whose config has none."""
HEADS = ("num_attention_heads", "num_key_value_heads")
UNITS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
UNITS_OF_A_SLOT = 32
"""On a CPU SGLang pads each slot's shard of intermediate units to a multiple of this number."""
EXPERTS = {"moe_runner_backend": PLAIN_BACKEND, "disable_shared_experts_fusion": True}
"""Arguments of mixtures of experts, with which weights are stored in the form in which they are sent."""
ONE_TOKEN_MORE = ("cohere2", "cohere2_moe", "cwm", "ministral", "vaultgemma")
"""Types whose layers with a sliding window attend to one token more than in transformers: SGLang's attention does not
count the token itself, which its Cohere 2 and its Transformers backend do not consider."""
PRIORITIES = {"schedule_low_priority_values_first": True, "disable_priority_preemption": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedSglang:
    """A running server and its model files."""

    server: SglangServer
    files: EngineFiles
    limit: int
    """Maximum sequence length, in tokens."""
    layout: RoutingLayout | None
    """Expert layout of the model, if the server returns routed experts."""
    images: Processor | None
    """Processor of images; None if the server reads text alone."""


async def launch(settings: SglangConfig, model: ModelSpec, mesh: MeshInfo, num_slots: int) -> LaunchedSglang:
    """Start the server; returns when it is ready.

    Raises `ModelError`, `ConfigError`, and `UnsupportedError` for router replay with a dense model.
    """
    who = f"{mesh.role} rank {mesh.rank}"
    device = mesh.device.partition(":")[0]
    variables = engine_environment(
        device, os.environ, num_threads=mesh.num_threads, num_slots=num_slots, rank=mesh.rank
    )
    if model.lora is not None:
        variables[ADAPTER] = mesh.role
    server = SglangServer(who)
    with contextlib.ExitStack() as stack:
        files = await asyncio.to_thread(stack.enter_context, engine_files(model, "SGLang"))
        if device == "cpu" and num_slots > 1:
            check_sizes(files.text_config, num_slots, who)
        if has_experts(keys := files.text_config.to_dict()):
            try:
                settings.check_experts(keys, num_slots)
            except ValueError as error:
                raise ModelError(f"{who}: {error}") from error
        arguments = server_arguments(settings, model, mesh, files, num_slots)
        images = files.processor if arguments.get("enable_multimodal") else None
        if files.processor is not None:
            variables[MEDIA_TOKENS] = ",".join(map(str, files.processor.media_token_ids))
        layout = RoutingLayout.of(files.text_config) if model.router_replay else None
        try:
            await server.start(arguments, variables)
            info = await server.request("/server_info")
        except ServerError as error:
            await server.stop()
            raise ModelError(f"{who}: SGLang cannot start with this model and strategy_config: {error}") from error
        except BaseException:
            await server.stop()
            raise
    limit = min(arguments["context_length"] - SPARE_TOKENS, int(info["max_req_input_len"]))
    return LaunchedSglang(server=server, files=files, limit=limit, layout=layout, images=images)


def check_sizes(text_config: Any, num_slots: int, who: str) -> None:
    """Raise `ModelError` for a model whose matrices SGLang would pad with zeros on a CPU to get equal shards.

    Weight updates contain no padding, so they would not fit such a model.
    """
    divisors = dict.fromkeys(HEADS, num_slots) | dict.fromkeys(UNITS, num_slots * UNITS_OF_A_SLOT)
    for name, divisor in divisors.items():
        size = getattr(text_config, name, None)
        if size is not None and size % divisor:
            unit = f" × {UNITS_OF_A_SLOT}" if divisor > num_slots else ""
            raise ModelError(
                f"{who}: the model's {name} is {size}, not a multiple of {num_slots}{unit} (tp_size{unit}): on a CPU"
                " SGLang pads such a model with zeros, which weight updates do not contain; set another"
                " num_gpus_per_worker"
            )


def server_arguments(
    settings: SglangConfig, model: ModelSpec, mesh: MeshInfo, files: EngineFiles, num_slots: int
) -> dict[str, Any]:
    """Server arguments: the user's `strategy_config` and those that ROLL sets. Raises `ModelError`."""
    device, _, index = mesh.device.partition(":")
    longest = files.max_positions or POSITIONS
    limit = settings.context_length or longest
    if limit > longest:
        raise ModelError(
            f"{mesh.role} rank {mesh.rank}: strategy_config.context_length is {limit}; the model's maximum is"
            f" {longest}: remove it, or set max_position_embeddings in model_config_kwargs"
        )
    if model.lora is not None and num_slots > 1:
        raise ModelError(f"{mesh.role} rank {mesh.rank}: enable_lora: {ONE_SLOT}")
    sleeps = device != "cpu" and settings.sleep_level > 0
    return {
        **({"max_total_tokens": HOST_TOKENS} if device == "cpu" else {}),
        **(adapter_arguments(model.lora, device) if model.lora is not None else {}),
        **settings.engine_arguments(),
        **_file_arguments(files),
        "served_model_name": mesh.role if model.lora is None else base_name(mesh.role),
        "tp_size": num_slots,
        "context_length": limit + SPARE_TOKENS,
        "dtype": DTYPES[model.dtype],
        "random_seed": mesh.sampling_seed % 2**31,  # for requests without a seed; differs between starts and replicas
        "trust_remote_code": model.trust_remote_code,
        "device": device,
        "base_gpu_id": int(index or 0),
        "sampling_backend": SAMPLING_BACKEND,
        "sampling_defaults": "openai",  # the role's generating_args decide, not the model's files
        "enable_custom_logit_processor": True,
        "incremental_streaming_output": True,  # otherwise each partial output repeats all previous tokens
        "custom_weight_loader": [LOADER],
        "weight_version": "0",
        **({"enable_return_routed_experts": True} if model.router_replay else {}),
        **(_image_arguments(files) if files.text_config is not files.config else {}),
        **(EXPERTS if has_experts(files.text_config.to_dict()) else {}),
        **(PRIORITIES if settings.enable_priority_scheduling else {}),
        "enable_memory_saver": sleeps,
        "enable_weights_cpu_backup": sleeps and settings.sleep_level == 1,
        "log_level": settings.log_level or "warning",  # type: ignore[attr-defined]  # of `_EngineKeys`
    }


def _image_arguments(files: EngineFiles) -> dict[str, Any]:
    """Server arguments of a model with images, which may be used for text alone."""
    reads = files.processor is not None and files.config.model_type in IMAGE_TYPES
    return {
        "enable_multimodal": reads,
        "enable_precise_embedding_interpolation": True,  # positions of patches as transformers computes them
    }


def config_overrides(config: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of the stored config: those of the user, and keys with which SGLang computes as transformers does."""
    merged = released_keys(config) | dict(overrides)
    if config.model_type in ONE_TOKEN_MORE and (window := getattr(config, "sliding_window", None)):
        merged["sliding_window"] = window - 1
    elif config.model_type == "olmo3":  # SGLang's class of the config has rotary keys of one type of layers
        merged["rope_parameters"] = config.rope_parameters["full_attention"]
    elif config.model_type == "hrm_text":  # a prompt attends ahead in transformers only with token types
        merged["prefix_lm"] = False
    elif rope := interleaved_rope(config):
        merged["text_config"] = {**merged.get("text_config", {}), **rope}
        merged["rope_scaling"] = rope["rope_parameters"]  # SGLang reads it from the whole model's config
    return merged


def _file_arguments(files: EngineFiles) -> dict[str, Any]:
    """Server arguments with the paths of model and tokenizer."""
    file_arguments: dict[str, Any] = {"model_path": files.model}
    if overrides := config_overrides(files.config, files.overrides):
        file_arguments["json_model_override_args"] = json.dumps(overrides)
    return file_arguments | ({"tokenizer_path": files.tokenizer} if files.tokenizer else {"skip_tokenizer_init": True})
