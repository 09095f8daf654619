"""Converts a config into the executor's `GroupSpec`s: each role's model, optimizer settings, places and environment.

Imports of heavy modules are local to functions: `roll-core plan` uses this module too and loads nothing heavy.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core.config.loading import strategy_config
from roll_core.config.weight_transports import within_one_process
from roll_core.data.modelscope import modelscope_id
from roll_core.errors import ConfigError, ConfigProblem, ContractError, UnsupportedError
from roll_core.openmp import wanted_threads
from roll_core.runtime.cluster.platform import values_of
from roll_core.spec.config import ModelArguments, RewardConfig, StrategyConfig
from roll_core.spec.diagnostics import RoleEnvironment
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_core.spec.platform import HOST_BACKEND
from roll_core.spec.providers import (
    InferProvider,
    OptimizerProvider,
    RewardProvider,
    TrainCapabilities,
    TrainProvider,
    replays_experts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors.base import GroupSpec, Survival
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.config import RunConfig, TrainingArguments, WorkerConfig
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.platform import Platform
    from roll_core.spec.train import TrainingSpec

WORKERS = {
    "train": "roll_core.runtime.workers.train:TrainWorker",
    "score": "roll_core.runtime.workers.train:TrainWorker",
    "generate": "roll_core.runtime.workers.infer:InferWorker",
    "reward": "roll_core.runtime.workers.reward:RewardWorker",
}
FOLLOWER = "roll_core.runtime.workers.infer:FollowerWorker"
COLLECTIVE_TIMEOUT_S = 600.0


def role_config(config: RunConfig, name: str) -> WorkerConfig:
    """Config of a role by its dotted name. Raises `ContractError` for a role that the config does not have."""
    roles = config.roles()
    if name not in roles:
        raise ContractError(f"the pipeline's roles() has {name!r}, but the config's roles are {', '.join(roles)}")
    return roles[name]


def model_spec(role: RoleSpec, config: RunConfig, tokenizer: Path) -> ModelSpec:
    """Model of a role: its own, that of its `model_from` role, or the run's `pretrain`.

    Raises `ConfigError` if none of them names a model.
    """
    model_args = source = role_config(config, role.name).model_args
    if model_args.model_name_or_path is None and model_args.random_init is None and role.model_from:
        source = role_config(config, role.model_from).model_args
    path = source.path(config.pretrain)
    if not path and source.random_init is None:
        hint = "give model_name_or_path or random_init here, or pretrain for all roles"
        raise _incomplete(config.exp_name, f"{role.name}.model_args", "names no model", hint)
    # The model of a reward has its own vocabulary, unless its weights are random.
    own_tokenizer = role.kind in ("score", "generate") and role.task == "reward" and bool(path)
    # The role trains the policy or generates with its weights.
    generates_policy = role.kind == "generate" and role.model_from == config.policy_role
    return ModelSpec(
        task="causal_lm" if role.kind == "generate" else role.task,
        library=role.library,
        path=path,
        modelscope_id=modelscope_id(path),
        random_init=source.random_init,
        config_overrides=source.model_config_kwargs,
        dtype=model_args.dtype,
        attn_implementation=model_args.attn_implementation,
        gradient_checkpointing=role.kind == "train" and not model_args.disable_gradient_checkpointing,
        seed=config.seed,
        new_head=role.kind == "train",
        tokenizer="" if own_tokenizer or role.library else str(tokenizer),
        trust_remote_code=model_args.trust_remote_code,
        freeze=tuple(model_args.freeze),
        lora=lora_spec(model_args),
        router_replay=config.replays_experts and (generates_policy or role.name == config.policy_role),
    )


def _incomplete(where: str, key: str, message: str, hint: str) -> ConfigError:
    return ConfigError([ConfigProblem(where=where, key=key, message=message, hint=hint, code="ROLL-C011")])


def separate_processes_reason(roles: Sequence[RoleSpec], config: RunConfig, registry: Registry) -> str:
    """Reason why some engine cannot receive its trainer's weights within one process; empty if all can."""
    names = {role.name for role in roles}
    for role in roles:
        if role.kind != "generate" or role.model_from not in names:
            continue
        trainer, engine = (provider_of(name, config, registry) for name in (role.model_from, role.name))
        if isinstance(trainer, TrainProvider) and isinstance(engine, InferProvider):
            directory, transport = config.model_update_dir, config.weight_transport
            if why := within_one_process(registry, trainer, engine, directory=directory, transport=transport):
                return f"{role.name}: {why}"
    return ""


def served_adapters(role: RoleSpec, config: RunConfig, registry: Registry) -> LoraSpec | None:
    """LoRA adapters that a generating role receives unmerged; None if it receives whole weights.

    Raises `UnsupportedError` if `model_from` cannot send adapters alone. `roll-core check` refuses that only for the
    `policy_role`, because it does not know the role plan.
    """
    engine = provider_of(role.name, config, registry)
    if not isinstance(engine, InferProvider) or not _settings(role.name, config, engine).serves_adapters():
        return None
    args = role_config(config, role.model_from).model_args if role.model_from else None
    lora = lora_spec(args) if args is not None else None
    trainer = provider_of(role.model_from, config, registry) if role.model_from else None
    exports = isinstance(trainer, TrainProvider) and trainer.capabilities.adapter_export
    if lora is None or not exports or any(getattr(args, key) for key in ModelArguments.merged_only()):
        raise UnsupportedError(
            f"{role.name}: strategy_config requests unmerged adapters, but {role.model_from or 'no role'} sends none:"
            f" train lora_target there without {', '.join(ModelArguments.merged_only())}, with a strategy that exports"
            " adapters"
        )
    return lora


def _settings(name: str, config: RunConfig, provider: TrainProvider | InferProvider) -> StrategyConfig:
    worker = role_config(config, name)
    options = worker.strategy_args.strategy_config if worker.strategy_args else {}
    return strategy_config(provider, options, owner=provider.name)


def lora_spec(args: ModelArguments) -> LoraSpec | None:
    """LoRA adapters that a role trains; None if it trains the full model."""
    if not args.trains_adapters or not args.lora_rank:
        return None
    return LoraSpec(
        targets=args.lora_targets(),
        rank=args.lora_rank,
        alpha=args.lora_alpha or 2.0 * args.lora_rank,
        rank_pattern=args.rank_pattern,
        alpha_pattern=args.alpha_pattern,
        use_rslora=args.use_rslora,
        use_dora=args.use_dora,
        parameters=args.parameter_targets(),
        extra_modules=args.extra_modules(),
        load_in_4bit=args.load_in_4bit,
        export=args.lora_export,
    )


def training_spec(
    args: TrainingArguments, role: RoleSpec, max_grad_norm: float, optimizer: OptimizerProvider
) -> TrainingSpec:
    """Optimizer settings of a role, with the warm-up in steps."""
    from roll_core.spec.train import TrainingSpec

    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * role.num_steps)
    return TrainingSpec(
        learning_rate=args.learning_rate,
        optimizer=optimizer.target,
        optimizer_kwargs=args.optimizer_kwargs,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_epsilon,
        lr_scheduler_type=args.lr_scheduler_type,
        lr_scheduler_kwargs=args.lr_scheduler_kwargs,
        warmup_steps=warmup,
        num_steps=max(role.num_steps, 1),
        ema_decay=role.ema_decay,
        ema_ramp=role.ema_ramp,
        ema_per_batch=role.ema_per_batch,
        max_grad_norm=max_grad_norm,
    )


def group_specs(
    roles: Sequence[RoleSpec],
    config: RunConfig,
    registry: Registry,
    platform: Platform,
    places: Mapping[str, tuple[Place, ...]],
    tokenizer: Path,
) -> list[GroupSpec]:
    """Specifications of all roles for the executor, one per role."""
    from roll_core.runtime.cluster.executors.base import GroupSpec

    specs = []
    environments = role_environments(config, registry)
    for role in roles:
        worker = role_config(config, role.name)
        if role.kind != worker.kind:
            raise ContractError(
                f"the pipeline's roles() has {role.name} with kind {role.kind!r}, but its config has kind"
                f" {worker.kind!r}: use RoleSpec(kind={worker.kind!r})"
            )
        provider = provider_of(role.name, config, registry)
        if isinstance(provider, RewardProvider):
            args: dict[str, Any] = {"config": worker.model_dump(mode="json")}
            env: dict[str, str] = {}
        else:
            args = _model_args(role, worker, provider, config, registry, platform, tokenizer)
            on_slots = any(place.slots for place in places[role.name])
            args["backend"] = platform.collective_backend if on_slots else HOST_BACKEND
            env = values_of(_settings(role.name, config, provider).worker_environment())
        env |= {**config.system_envs, **worker.system_envs}
        spec = GroupSpec(
            role=role.name,
            kind=role.kind,
            target=WORKERS[role.kind],
            args={"role": role.name, "provider": provider, "owner": registry.owner(provider), **args},
            places=_with_wanted_threads(places[role.name], env),
            env=env,
            environment=environments.get(role.name),
            timeout_s=config.rpc_timeout,
            survives=_survives(role),
        )
        specs.append(spec)
        if followers := [follower for place in places[role.name] for follower in place.followers]:
            name = follower_group(role.name)
            followed = _with_wanted_threads(followers, env)
            specs.append(replace(spec, role=name, target=FOLLOWER, args={**spec.args, "role": name}, places=followed))
    return specs


def follower_group(role: str) -> str:
    """Name of the group of workers on further nodes of a role's replicas."""
    return f"{role}.followers"


def roles_over_nodes(roles: Sequence[RoleSpec], config: RunConfig, registry: Registry) -> set[str]:
    """Roles whose workers may have slots on several nodes."""
    over_nodes = set()
    for role in roles:
        provider = provider_of(role.name, config, registry)
        if not isinstance(provider, InferProvider) or not provider.follower:
            continue
        if not _settings(role.name, config, provider).several_nodes_problem():
            over_nodes.add(role.name)
    return over_nodes


def role_environments(config: RunConfig, registry: Registry) -> dict[str, RoleEnvironment]:
    """Python environments of the roles that have one of their own. Raises `UnknownProviderError`."""
    environments = {}
    for name, role in config.roles().items():
        if role.environment is not None:
            provider = provider_of(name, config, registry)
            package = registry.package(provider)
            environments[name] = RoleEnvironment(config=role.environment, package=package, needs=provider.needs)
    return environments


def _with_wanted_threads(places: Sequence[Place], env: Mapping[str, str]) -> tuple[Place, ...]:
    """Copies of `places` that use `OMP_NUM_THREADS` as thread count, if the role or the user's environment sets it."""
    if not (num_threads := wanted_threads(os.environ | env)):
        return tuple(places)
    changed = [replace(place, wanted_threads=num_threads) for place in places]
    return tuple(replace(place, num_threads=place.threads_of(place.num_threads)) for place in changed)


def _survives(role: RoleSpec) -> Survival:
    """Worker exits that a role survives. An engine can be restarted even if no replica is left."""
    if role.kind == "generate":
        return "always"
    return "while_others_live" if role.kind == "reward" else "never"


def slots_per_worker(roles: Sequence[RoleSpec], config: RunConfig, registry: Registry) -> dict[str, int]:
    """Slots per worker (tensor × pipeline parallel), for strategies that compute them from their configuration."""
    by_role: dict[str, int] = {}
    for role in roles:
        provider = provider_of(role.name, config, registry)
        if isinstance(provider, RewardProvider):
            continue
        slots = _settings(role.name, config, provider).slots_per_worker()
        if slots is not None:
            by_role[role.name] = slots
    return by_role


def offloads(role: RoleSpec, config: RunConfig, registry: Registry, platform: Platform) -> bool:
    """True if a role offloads its movable parts while other roles use its slots.

    If slots have no memory of their own, engines still sleep, which frees memory. Offloading there would only copy.
    """
    worker, provider = role_config(config, role.name), provider_of(role.name, config, registry)
    is_configured = config.is_offload_states if worker.is_offload_states is None else worker.is_offload_states
    if isinstance(provider, InferProvider):
        return is_configured and provider.capabilities.sleeps
    offload = isinstance(provider, TrainProvider) and provider.capabilities.offload
    return is_configured and offload and not platform.slots_share_cores


def provider_of(name: str, config: RunConfig, registry: Registry) -> TrainProvider | InferProvider | RewardProvider:
    """Provider of the strategy or the reward that a role's config names. Raises `ConfigError` if it names none."""
    worker = role_config(config, name)
    if isinstance(worker, RewardConfig) and worker.kind == "reward":
        return registry.find(RewardProvider, worker.reward)
    if worker.strategy_args is None:
        raise _incomplete(name, f"{name}.strategy_args", "is missing", "give a strategy_name")
    kind: type[TrainProvider | InferProvider] = InferProvider if worker.kind == "generate" else TrainProvider
    return registry.find(kind, worker.strategy_args.strategy_name)


def _model_args(
    role: RoleSpec,
    worker: WorkerConfig,
    provider: TrainProvider | InferProvider,
    config: RunConfig,
    registry: Registry,
    platform: Platform,
    tokenizer: Path,
) -> dict[str, Any]:
    model = model_spec(role, config, tokenizer)
    if (served := served_adapters(role, config, registry)) is not None:
        model = replace(model, lora=served)
    _check_support(role, worker, provider, model, platform)
    common = {
        "strategy_config": worker.strategy_args.strategy_config if worker.strategy_args else {},
        "model": model,
        "timeout_s": min(config.rpc_timeout, COLLECTIVE_TIMEOUT_S),
    }
    if role.kind == "generate":
        return common
    from roll_core.runtime.workers.train import BatchLimits

    trained = role.kind == "train"
    return common | {
        "training": training_spec(
            worker.training_args,
            role,
            config.max_grad_norm,
            registry.find(OptimizerProvider, worker.training_args.optimizer),
        )
        if trained
        else None,
        "limits": BatchLimits(
            train_sequences=worker.training_args.per_device_train_batch_size,
            infer_sequences=worker.infer_batch_size,
            train_tokens=worker.max_tokens_per_microbatch_in_train if worker.use_dynamic_batching_in_train else None,
            infer_tokens=worker.max_tokens_per_microbatch_in_infer if worker.use_dynamic_batching_in_infer else None,
        ),
        "deterministic": config.deterministic,
    }


def _check_support(
    role: RoleSpec, worker: WorkerConfig, provider: TrainProvider | InferProvider, model: ModelSpec, platform: Platform
) -> None:
    """Raise `UnsupportedError` before anything starts if the platform or the pipeline's role plan needs something that
    the strategy does not support. `StrategyCheck` has checked the rest."""
    strategy = f"{role.name}: strategy {provider.name}"
    capabilities = provider.capabilities
    if provider.platforms and platform.name not in provider.platforms:
        supported = ", ".join(provider.platforms)
        raise UnsupportedError(f"{strategy} supports platforms {supported}, but this run's platform is {platform.name}")
    if model.router_replay and not replays_experts(provider):
        does = "return the experts of each token" if role.kind == "generate" else "replay the engine's experts"
        raise UnsupportedError(f"{strategy} does not {does} (router_replay.mode)")
    if why := platform.supports(model.dtype):
        raise UnsupportedError(f"{role.name}: model_args.dtype {model.dtype}: {why}")
    if role.library and not (isinstance(capabilities, TrainCapabilities) and capabilities.module_programs):
        raise UnsupportedError(f"{strategy} runs no module programs, which models of {role.library} need")
    if role.ema_decay is not None and not (isinstance(capabilities, TrainCapabilities) and capabilities.ema):
        raise UnsupportedError(
            f"{strategy} keeps no moving average of the parameters (ema_decay), which the pipeline needs"
        )
    tasks = getattr(capabilities, "tasks", None)
    if tasks is not None and role.task not in tasks:
        raise UnsupportedError(f"{strategy} supports tasks {', '.join(tasks)}, but the role needs {role.task}")
    if worker.weight_format != "dtype":
        asks = f"{role.name}: strategy_config requests weights in {worker.weight_format}"
        if why := platform.supports("fp8"):
            raise UnsupportedError(f"{asks}: {why}")
        if not role.model_from:
            raise UnsupportedError(f"{asks}, but no role publishes weights to it")
