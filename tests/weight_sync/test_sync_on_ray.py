import asyncio

import pytest
from sync_workers import same_values

from roll_core.builtin.cpu import CpuPlatform
from roll_core.config.weight_transports import choose_transport
from roll_core.errors import CorruptTensorError, WorkerDiedError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.executors.base import GroupSpec, Place, WorkerCall
from roll_core.runtime.weights.plan import SyncPlan, role_facts
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_executor_ray.executor import RayExecutor
from roll_testing.errors import raises_error


@pytest.mark.ray
@pytest.mark.slow(ci=True)
def test_publishes_between_ray_workers():
    async def scenario():
        specs = [
            GroupSpec(
                role=role,
                kind=kind,
                target=f"sync_workers:{worker}",
                places=tuple(Place(rank=rank, world_size=size) for rank in range(size)),
                timeout_s=60,
            )
            for role, kind, worker, size in (
                ("actor_train", "train", "TrainWorker", 1),
                ("actor_infer", "generate", "InferWorker", 2),
            )
        ]
        async with RayExecutor(CpuPlatform(), 2) as executor:
            groups = await executor.start(specs)
            train, infer = groups["actor_train"], groups["actor_infer"]
            for declared in (("shared", "shm", "collective"), ("collective",)):
                sides = [role_facts(group, declared) for group in (train, infer)]
                transport = choose_transport(load_registry(), *sides).provider
                assert transport.name == {3: "shm", 1: "collective"}[len(declared)]
                publisher = WeightPublisher(
                    train, infer, SyncPlan(transport=transport, bucket_bytes=64 << 10, deadline_s=20)
                )
                await WorkerCall(train, "begin").all()
                await WorkerCall(infer, "begin").all()
                await publisher.publish(0)
                await WorkerCall(train, "step").all(0.5)
                await publisher.publish(1)
                (sent,) = await WorkerCall(train, "values").all()
                for held in await WorkerCall(infer, "values").all():
                    assert all(same_values(held[name], sent[name]) for name in sent)
                await WorkerCall(infer, "set_fault").at(1, "flip:half")
                with raises_error(CorruptTensorError, "actor_infer rank 1", "half"):
                    await publisher.publish(1)
            await WorkerCall(infer, "set_fault").at(0, "die:left")
            with raises_error(WorkerDiedError, "actor_infer rank 0"):
                await publisher.publish(1)

    asyncio.run(scenario())
