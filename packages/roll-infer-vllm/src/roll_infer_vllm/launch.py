"""Launch of vLLM's engine: engine arguments, environment variables and model files."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError, UnsupportedError
from roll_infer_vllm.engine_environment import engine_environment, environment
from roll_infer_vllm.engine_metrics import stat_logger
from roll_infer_vllm.memory import HOST_CACHE_BYTES
from roll_infer_vllm.processes import adapter_arguments
from roll_infer_vllm.registration import TRANSFER
from roll_infer_vllm.watchdog import PARENT
from roll_modeling.engine_config import check_arguments
from roll_modeling.engine_files import engine_files, interleaved_rope, released_keys
from roll_modeling.routing import RoutingLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_infer_vllm.config import VllmConfig
    from roll_infer_vllm.engine_metrics import VllmMetrics
    from roll_modeling.engine_files import EngineFiles

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
CPU_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Executor of one slot on a CPU: the model runs in the process of vLLM's engine core.

vLLM's name for it is `uni`. On a CPU vLLM replaces that name by `mp`, because it sets the number of threads in the
environment of a worker process. `engine_environment` sets it for the core's process, so no second process is needed.
"""

OTHER_MEDIA = {"video": 0, "audio": 0}
"""Media of `limit_mm_per_prompt` for which vLLM reserves no memory by default: prompts have only images."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedVllm:
    """A running engine, its arguments and its model files."""

    engine: AsyncLLM
    arguments: AsyncEngineArgs
    files: EngineFiles
    layout: RoutingLayout | None
    """Expert layout of the model, if the engine returns routed experts."""
    release_files: Callable[[], None]
    """Removes the temporary folder of `files`. Call it only after the engine has answered a call, and its server has
    started. The engine's process reads the model folder again after it has reported that it is ready
    (`EngineCoreProc._perform_handshakes`); vLLM 0.33's server reads the generation config."""


def launch(settings: VllmConfig, model: ModelSpec, mesh: MeshInfo, metrics: VllmMetrics) -> LaunchedVllm:
    """Start the engine; blocks until it is ready, on several nodes until the followers have started as well.

    Raises `ModelError`, `ConfigError`, and `UnsupportedError` for router replay with a dense model or without V2.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    with environment(_variables(settings, mesh)), ExitStack() as scratch:
        arguments, files, layout = _prepare(settings, model, mesh, scratch)
        with _start_errors(mesh):
            engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[stat_logger(metrics)])
        return LaunchedVllm(
            engine=engine,
            arguments=arguments,
            files=files,
            layout=layout,
            release_files=scratch.pop_all().close,
        )


def launch_follower(settings: VllmConfig, model: ModelSpec, mesh: MeshInfo) -> MultiprocExecutor:
    """Start the engine processes of a further node, as `vllm serve --headless` does; blocks until all nodes have.

    Raises the errors of `launch`.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with environment(_variables(settings, mesh)), ExitStack() as scratch:
        arguments, _, _ = _prepare(settings, model, mesh, scratch)
        with _start_errors(mesh):
            return MultiprocExecutor(arguments.create_engine_config(headless=True))


def _prepare(
    settings: VllmConfig, model: ModelSpec, mesh: MeshInfo, scratch: ExitStack
) -> tuple[AsyncEngineArgs, EngineFiles, RoutingLayout | None]:
    """Check the model and write its files to folders of `scratch`. Returns the arguments that all nodes have alike."""
    device, who = mesh.device.partition(":")[0], f"{mesh.role} rank {mesh.rank}"
    if mesh.part is not None:
        _check_several_nodes(settings, model, who)
    engine_args = _engine_arguments(settings, device)
    files = scratch.enter_context(engine_files(model, "vLLM"))
    if device == "cpu":
        _check_heads(files.head_sizes, who)
    _check_experts(settings, files, who)
    if settings.quantization:
        _check_fp8(settings, files, model, device, who)
    layout = None
    if model.router_replay:
        layout = RoutingLayout.of(files.text_config)
        _check_second_runner(who)
    num_workers = settings.slots_per_worker() // settings.data_parallel_size
    arguments = _arguments(model, files, engine_args, num_workers, mesh)
    if settings.data_parallel_size > 1:
        _prepare_data_parallel(who)
    return arguments, files, layout


def _engine_arguments(settings: VllmConfig, device: str) -> dict[str, Any]:
    engine_args = settings.engine_arguments()
    engine_args["max_logprobs"] = -1  # `GenerateRequest.prompt_topk` may be any number of the vocabulary
    engine_args["limit_mm_per_prompt"] = {**OTHER_MEDIA, **engine_args.get("limit_mm_per_prompt", {})}
    if device == "cpu":
        engine_args.setdefault("enforce_eager", True)
        if "gpu_memory_utilization" not in engine_args:
            engine_args.setdefault("kv_cache_memory_bytes", HOST_CACHE_BYTES)
    elif settings.sleep_level:
        engine_args["enable_sleep_mode"] = True  # vLLM rejects it on a CPU; there we release the KV cache ourselves
    return engine_args


def _variables(settings: VllmConfig, mesh: MeshInfo) -> dict[str, str]:
    """Environment variables of the engine processes of this node."""
    device, part = mesh.device.partition(":")[0], mesh.part
    variables = engine_environment(
        device,
        os.environ,
        num_threads=mesh.num_threads,
        num_slots=settings.slots_per_worker() // (part.num_nodes if part else 1),
        compiles=not _engine_arguments(settings, device).get("enforce_eager", False),
    )
    if part is not None and "VLLM_HOST_IP" not in os.environ:
        variables["VLLM_HOST_IP"] = part.address  # by default that of the route to the internet
    return {**variables, PARENT: str(os.getpid())}


@contextmanager
def _start_errors(mesh: MeshInfo) -> Iterator[None]:
    """Context manager that raises `ModelError` in place of the errors with which vLLM does not start."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, NotImplementedError, ImportError) as error:
        who = f"{mesh.role} rank {mesh.rank}"
        raise ModelError(f"{who}: vLLM cannot start with this model and strategy_config: {error}") from error


def _check_several_nodes(settings: VllmConfig, model: ModelSpec, who: str) -> None:
    """Raise `UnsupportedError` for what was not tried with a replica over several nodes."""
    problem = settings.several_nodes_problem()
    if model.router_replay:
        problem = "router_replay.mode R3 is not tested with a replica over several nodes: write mode: disable"
    if problem:
        raise UnsupportedError(f"{who}: {problem}, or use slots of one node")


def _check_heads(head_sizes: set[int], who: str) -> None:
    """Raise `ModelError` for a head size that vLLM does not support on a CPU.

    vLLM itself starts with such a model, but crashes at the first request.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    for size in sorted(head_sizes.difference(sizes)):
        raise ModelError(
            f"{who}: the model has attention heads of size {size}; on a CPU vLLM supports"
            f" {', '.join(map(str, sizes))}: use another model, or strategy hf_infer, which supports any size"
        )


def _check_experts(settings: VllmConfig, files: EngineFiles, who: str) -> None:
    """Raise `ModelError` if expert parallelism does not suit the model, which `check` may not have read."""
    try:
        settings.check_experts(files.text_config.to_dict())
    except ValueError as error:
        raise ModelError(f"{who}: {error}") from error


def _prepare_data_parallel(who: str) -> None:
    """Bind the life of vLLM's coordinator to the worker. Raises `UnsupportedError` for vLLM 0.31."""
    from roll_infer_vllm.coordinator import watch_coordinator
    from roll_infer_vllm.versions import has_data_parallel

    if not has_data_parallel():
        raise UnsupportedError(f"{who}: data_parallel_size above 1 needs vLLM 0.32: update vLLM, or remove the key")
    watch_coordinator()


def _check_second_runner(who: str) -> None:
    """Raise `UnsupportedError` if vLLM will not use its second model runner (V2): only V2 returns routed experts."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    needs = f"{who}: router_replay.mode R3 needs vLLM's second model runner (V2)"
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise UnsupportedError(f"{needs}; remove VLLM_USE_V2_MODEL_RUNNER=0 from system_envs, or write mode: disable")
    if not HAS_TRITON:
        raise UnsupportedError(
            f"{needs}, which needs Triton, and the installed Triton does not support this device: write mode: disable,"
            " or use strategy hf_infer"
        )


def _check_fp8(settings: VllmConfig, files: EngineFiles, model: ModelSpec, device: str, who: str) -> None:
    try:
        settings.check_model(files.text_config.to_dict())
    except ValueError as error:
        raise ModelError(f"{who}: quantization: {settings.quantization}: {error}") from error
    if device != "cpu" and model.dtype != "bf16":
        raise ModelError(
            f"{who}: model_args.dtype is {model.dtype}; on {device} quantization: {settings.quantization} computes in"
            " bf16: set model_args.dtype: bf16 for this role"
        )


def _arguments(
    model: ModelSpec, files: EngineFiles, engine_args: Mapping[str, Any], num_workers: int, mesh: MeshInfo
) -> AsyncEngineArgs:
    """Engine arguments; each data-parallel rank has `num_workers` workers."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    who = f"{mesh.role} rank {mesh.rank}"
    single = CPU_EXECUTOR if mesh.device.partition(":")[0] == "cpu" else "uni"
    derived: dict[str, Any] = {
        **_file_arguments(files),
        **(adapter_arguments(model.lora) if model.lora is not None else {}),
        "hf_overrides": config_overrides(files.config),
        "dtype": DTYPES[model.dtype],
        "seed": mesh.sampling_seed % 2**31,  # for requests without a seed; differs between starts and replicas
        "trust_remote_code": model.trust_remote_code,
        "generation_config": "vllm",
        "distributed_executor_backend": "mp" if num_workers > 1 else single,
        "worker_extension_cls": "roll_infer_vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": TRANSFER},
        "enable_return_routed_experts": model.router_replay,
        # Two processes have this cache. An update clears one after the other: a request between them would lose images.
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # pixels are those of the run's processor
        "disable_log_stats": True,  # disables only vLLM's own loggers, not our stat logger
    }
    if (part := mesh.part) is not None:
        derived |= {"nnodes": part.num_nodes, "node_rank": part.node_rank}
        derived |= {"master_addr": part.master_addr, "master_port": part.master_port}
    check_arguments("vLLM", engine_args, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
    try:
        return AsyncEngineArgs(**engine_args, **derived)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{who}: vLLM rejects strategy_config: {error}") from error


def config_overrides(config: Any) -> dict[str, Any]:
    """Config keys with which vLLM computes as transformers does."""
    if config.model_type in ("cohere2", "cohere2_moe") and config.sliding_window:
        return {"sliding_window": config.sliding_window - 1}  # vLLM adds 1, and transformers does not
    if rope := interleaved_rope(config):
        return {"text_config": rope}
    return released_keys(config)


def _file_arguments(files: EngineFiles) -> dict[str, Any]:
    """Engine arguments with the paths of model, config and tokenizer."""
    arguments: dict[str, Any] = {"model": files.model}
    if files.overrides:
        arguments["hf_config_path"] = str(files.scratch / "config")
        files.config.save_pretrained(arguments["hf_config_path"])
    if not files.tokenizer:
        return {**arguments, "skip_tokenizer_init": True}
    if files.tokenizer == files.model or not Path(files.tokenizer).is_dir():
        return {**arguments, "tokenizer": files.tokenizer}
    # vLLM looks for a config next to the tokenizer, and retries with warnings for two seconds if there is none.
    beside = files.scratch / "tokenizer"
    shutil.copytree(files.tokenizer, beside)
    files.config.save_pretrained(beside)
    return {**arguments, "tokenizer": str(beside)}
