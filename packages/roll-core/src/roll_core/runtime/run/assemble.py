"""Start the roles of a run: slots, executor, workers, and the role objects that the pipeline calls.

roles() -> place_roles -> executor.start(group_specs) -> GroupTrainRole | GroupInferRole | RewardRole -> ActiveRun
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.executors import executor_of, make_executor
from roll_core.runtime.cluster.memory_use import forget_peak
from roll_core.runtime.cluster.placement import place_roles, slots_per_node
from roll_core.runtime.rollout.model_rewards import (
    EngineRewardRole,
    ModelInput,
    ModelRewardRole,
    model_input,
    reply_encoder,
)
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.replicas import HealthTimeouts
from roll_core.runtime.rollout.requests import stop_finder
from roll_core.runtime.rollout.scoring import RewardRole, RewardRouter
from roll_core.runtime.run.followers import Followers
from roll_core.runtime.run.roles import GroupInferRole, GroupTrainRole
from roll_core.runtime.run.weight_sync import WeightSyncController
from roll_core.runtime.workers.build import (
    follower_group,
    group_specs,
    model_spec,
    offloads,
    provider_of,
    role_config,
    roles_over_nodes,
    separate_processes_reason,
    slots_per_worker,
)
from roll_core.runtime.workers.strategy import model_vocab_size
from roll_core.spec.config import EngineRewardConfig, ModelRewardConfig, RewardConfig
from roll_core.spec.providers import InferProvider, RewardProvider, TrainProvider

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from roll_core.config.secrets import Redactor
    from roll_core.data.encode import Encoder
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.cluster.executors.base import Executor
    from roll_core.runtime.records.record import RunRecord
    from roll_core.runtime.rollout.scoring import AnyRewardRole
    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.spec.pipeline import Pipeline
    from roll_core.spec.platform import Platform

log = logging.getLogger(__name__)

PROGRESS_S = 2.0
"""Maximum seconds between progress reports of a replica. Tokens after its last report are regenerated if it exits."""
POLLS_OF_LIFE = 10
"""Minimum number of health checks of a busy replica within `replica_timeout`."""


async def start_roles(
    run: ActiveRun,
    pipeline: Pipeline[Any],
    platform: Platform,
    record: RunRecord,
    redactor: Redactor,
    stack: AsyncExitStack,
) -> Executor:
    """Start every role in the order of `Pipeline.roles` and add it to `run`. `stack` closes the roles."""
    config, registry, tokenizer = run.config, run.registry, run.run_dir.tokenizer
    roles = pipeline.roles()
    configs = {role.name: role_config(config, role.name) for role in roles}
    inputs: dict[str, ModelInput] = {}
    encoders: dict[str, Encoder] = {}
    for role in roles:
        if isinstance(worker := configs[role.name], ModelRewardConfig):
            inputs[role.name] = model_input(role.name, worker, run.tokenizer)
        elif isinstance(worker, EngineRewardConfig):
            encoders[role.name] = reply_encoder(role.name, worker, config.pretrain, run.tokenizer)
    per_node = slots_per_node(platform, config.num_gpus_per_node)
    places = place_roles(
        configs,
        platform,
        per_node,
        slots_per_worker=slots_per_worker(roles, config, registry),
        configured=config.roles(),
        over_nodes=roles_over_nodes(roles, config, registry),
    )
    apart = separate_processes_reason(roles, config, registry)
    chosen = executor_of(config, registry, places, apart)
    if apart and chosen.in_process:
        raise UnsupportedError(f"{apart}: executor {chosen.name} has one process; remove executor")
    executor = await stack.enter_async_context(
        make_executor(chosen, registry.owner(chosen), platform, slots_per_node=per_node)
    )
    record.update(executor=chosen.name)
    forget_peak()
    log.info("executor %s on platform %s", chosen.name, platform.name)
    groups = await executor.start(group_specs(roles, config, registry, platform, places, tokenizer))
    record.update(environments={role: dict(versions) for role, versions in executor.fingerprints.items()})
    rewards: dict[str, AnyRewardRole] = {}
    for role in roles:
        worker, group = configs[role.name], groups[role.name]
        domain = role.name.partition(".")[2]
        if isinstance(worker, RewardConfig) and worker.kind == "reward":
            rewards[domain] = reward = RewardRole(role.name, worker, group, redactor)
            await reward.start()
            continue
        if not role.library:
            # A model can sample every row of its embedding, which is often padded beyond the tokenizer's ids.
            rows = model_vocab_size(model_spec(role, config, tokenizer)) or 0
            run.vocab_sizes[role.name] = max(rows, len(run.tokenizer))
        provider = provider_of(role.name, config, registry)
        can_offload = offloads(role, config, registry, platform)
        if isinstance(provider, InferProvider):
            poll_s = config.replica_timeout / POLLS_OF_LIFE
            run.infer_roles[role.name] = engine = GroupInferRole(
                role.name,
                worker,
                group,
                followers=Followers(group, groups[follower_group(role.name)])
                if follower_group(role.name) in groups
                else None,
                leases=run.leases,
                sleeps=can_offload,
                receives_weights=bool(role.model_from),
                capabilities=provider.capabilities,
                queue=partial(
                    RequestQueue,
                    routing=config.router_args.router_name,
                    max_running=config.max_running_requests,
                    progress_s=poll_s if chosen.in_process else min(PROGRESS_S, poll_s),
                    timeouts=HealthTimeouts(token_s=config.replica_timeout, result_s=config.rpc_timeout),
                    find_stop=stop_finder(lambda ids: str(run.tokenizer.decode(ids, skip_special_tokens=True))),
                    media=provider.capabilities.media,
                ),
                restart=partial(run.publish_weights, "", role.name) if role.model_from else None,
            )
            await run.leases.start(engine)
            if isinstance(worker, EngineRewardConfig):
                function, owner = _function_of(worker, registry)
                rewards[domain] = EngineRewardRole(
                    role.name,
                    worker,
                    encoders[role.name],
                    function,
                    owner=owner,
                    generate=engine.generate_beside,
                    seed=config.seed if provider.capabilities.seeds else None,
                )
        elif isinstance(provider, TrainProvider):
            run.train_roles[role.name] = trainer = GroupTrainRole(
                role.name,
                worker,
                group,
                trains=role.kind == "train",
                leases=run.leases,
                offloads=can_offload,
                beside_engine=isinstance(worker, ModelRewardConfig),
                averages=role.ema_decay is not None,
                averages_per_batch=role.ema_per_batch,
                capabilities=provider.capabilities,
            )
            await run.leases.start(trainer)
            if isinstance(worker, ModelRewardConfig):
                function, owner = _function_of(worker, registry)
                rewards[domain] = ModelRewardRole(
                    trainer, worker, inputs[role.name], function, owner=owner, ready=run.generated
                )
    for engine in run.infer_roles.values():
        engine.scorers = [name for name in inputs if engine.slots & run.train_roles[name].slots]
    if rewards:
        run.rewards = RewardRouter(rewards, {domain: reward.config.tag_included for domain, reward in rewards.items()})
    stack.push_async_callback(run.close)
    run.sync_weights = WeightSyncController(run, roles, registry, record, in_process=chosen.in_process).publish
    return executor


def _function_of(config: RewardConfig, registry: Registry) -> tuple[Any, str]:
    """The function of a reward that is a role with a model, and its owner."""
    provider = registry.find(RewardProvider, config.reward)
    owner = registry.owner(provider)
    return load_target(provider.target, owner=owner)(config), owner
