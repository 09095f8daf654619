"""Places on nodes that are faked by Ray's logical resources: three of them, with eight devices each."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PlacementError
from roll_core.runtime.cluster.executors.base import GroupSpec, WorkerCall
from roll_core.runtime.cluster.placement import place_roles
from roll_core.spec.config import InferWorkerConfig, RewardConfig, TrainWorkerConfig, WorkerConfig
from roll_executor_ray.executor import RayExecutor
from roll_executor_ray.reservation import Reservation
from roll_testing.errors import raises_error

pytestmark = [pytest.mark.ray, pytest.mark.slow]
Run = Callable[[Coroutine[Any, Any, Any]], Any]
HERE = str(Path(__file__).parents[3] / "tests" / "executors")


class FakeAccelerators(CpuPlatform):
    name = "fake"
    device_type = "acc"
    resource_name = "GPU"
    visible_devices = "CUDA_VISIBLE_DEVICES"
    slots_share_cores = False

    def device_count(self) -> int:
        return 8

    def device(self, local_index: int) -> str:
        return f"acc:{local_index}"


class UnknownVendor(FakeAccelerators):
    name = "unknown"
    resource_name = "ACME"
    visible_devices = "ACME_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines on one event loop, while a cluster of three nodes is there."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.syspath_prepend(HERE)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in settings.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 2, "num_gpus": 8, "object_store_memory": 100 * 1024**2}
        head = node | {"include_dashboard": False, "resources": {UnknownVendor.resource_name: 4}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(**node)
        ray.init(address=cluster.address, logging_level="warning")
        yield runner.run
        ray.shutdown()
        cluster.shutdown()


def specs(roles: dict[str, WorkerConfig], platform: CpuPlatform | None = None, **more: Any) -> list[GroupSpec]:
    places = place_roles(roles, platform or FakeAccelerators(), 8)
    return [
        GroupSpec(role=role, kind=config.kind, target="executor_workers:Recorder", places=places[role], **more)
        for role, config in roles.items()
    ]


def train(mapping: Any) -> TrainWorkerConfig:
    return TrainWorkerConfig(device_mapping=mapping)


def infer(mapping: Any, per_worker: int | None = None) -> InferWorkerConfig:
    return InferWorkerConfig(device_mapping=mapping, num_gpus_per_worker=per_worker)


def reserve(run: Run, wanted: list[GroupSpec], seconds: float = 60) -> Reservation:
    reservation = Reservation(FakeAccelerators(), 8, seconds)
    try:
        run(reservation.take(wanted))
    finally:
        reservation.release()
    return reservation


EXAMPLES: dict[str, tuple[dict[str, WorkerConfig], dict[int, int]]] = {
    "16 to train, 8 more to infer": (
        {"actor_train": train("list(range(0,16))"), "actor_infer": infer("list(range(16,24))")},
        {0: 8, 1: 8, 2: 8},
    ),
    "8 shared": (
        {"actor_infer": infer("list(range(0,8))"), "actor_train": train("list(range(0,8))")},
        {0: 8},
    ),
    "half a node each": (
        {"actor_train": train("list(range(0,4))"), "actor_infer": infer("list(range(4,8))")},
        {0: 8},
    ),
    "workers without slots": ({"code_sandbox": RewardConfig(reward="r", world_size=8)}, {0: 0}),
    "the complete example": (
        {
            "actor_train": train("list(range(0,16))"),
            "actor_infer": infer("list(range(0,12))", 2),
            "rewards.code_sandbox": RewardConfig(reward="r", world_size=8),
        },
        {0: 8, 1: 8},
    ),
    "a few slots of two nodes": ({"actor_train": train([0, 1, 2, 9])}, {0: 3, 1: 2}),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_slots_of_the_examples_are_there_and_known_by_their_ids(run: Run, name: str) -> None:
    roles, slots = EXAMPLES[name]
    nodes = reserve(run, specs(roles)).nodes
    assert {node: len(reserved.device_ids) for node, reserved in nodes.items()} == slots
    assert len({reserved.bundle for reserved in nodes.values()}) == len(slots)
    for reserved in nodes.values():
        assert len(set(reserved.device_ids)) == len(reserved.device_ids)


def test_workers_of_a_slot_share_a_node_and_see_one_device(run: Run) -> None:
    roles: dict[str, WorkerConfig] = {
        "actor_train": train([1, 9]),
        "actor_infer": infer([8, 9, 0, 1], 2),
        "rewards.sandbox": RewardConfig(reward="r", world_size=2),
    }

    async def look() -> dict[str, list[tuple[str, str, str]]]:
        async with RayExecutor(FakeAccelerators(), 8) as executor:
            groups = await executor.start(specs(roles))
            return {role: await WorkerCall(group, "node_and_devices").all() for role, group in groups.items()}

    found = run(look())
    first, second = found["actor_train"]
    assert first[0] != second[0], "slots 1 and 9 are on different nodes"
    assert [node for node, _, _ in found["actor_infer"]] == [second[0], first[0]]
    assert [node for node, _, _ in found["rewards.sandbox"]] == [first[0], second[0]]
    assert [devices for _, devices, _ in found["actor_train"]] == ["1", "1"]
    assert [devices for _, devices, _ in found["actor_infer"]] == ["0,1", "0,1"]
    assert [devices for _, devices, _ in found["rewards.sandbox"]] == ["", ""]
    assert {device for role in ("actor_train", "actor_infer") for _, _, device in found[role]} == {"acc:0"}


def test_missing_slot_error_names_role_slot_and_cluster(run: Run) -> None:
    with raises_error(PlacementError, "actor_infer", "slot 24", "24 slots (0 to 23)", "3 nodes"):
        reserve(run, specs({"actor_train": train([0]), "actor_infer": infer("list(range(16,32))")}))


def test_nodes_with_fewer_devices_than_the_config_says_are_shown(run: Run) -> None:
    roles: dict[str, WorkerConfig] = {"actor_train": train([7, 15, 9])}
    places = place_roles(roles, FakeAccelerators(), 16)
    wanted = [GroupSpec(role="actor_train", kind="train", target="unused:Unused", places=places["actor_train"])]
    reservation = Reservation(FakeAccelerators(), 16, 60)
    with raises_error(PlacementError, "slot 15", "15", "node 0", "GPU", "8"):
        run(reservation.take(wanted))


def test_slots_held_by_another_job_fail_after_the_deadline(run: Run) -> None:
    async def take_twice() -> None:
        first = Reservation(FakeAccelerators(), 8, 60)
        second = Reservation(FakeAccelerators(), 8, 1.0)
        try:
            await first.take(specs({"a": train("list(range(0,24))")}))
            with raises_error(PlacementError, "GPU", "1", "8", "0", "24"):
                await second.take(specs({"b": train("list(range(0,8))")}))
        finally:
            second.release()
            first.release()

    run(take_twice())


def test_runs_share_a_node_of_an_unknown_vendor(run: Run) -> None:
    async def take_both() -> list[tuple[str, ...]]:
        platform = UnknownVendor()
        places = place_roles({"a": train([0, 1])}, platform, 4)
        wanted = [GroupSpec(role="a", kind="train", target="unused:Unused", places=places["a"])]
        runs = [Reservation(platform, 4, 60) for _ in range(2)]
        try:
            for reservation in runs:
                await reservation.take(wanted)
            return [reservation.nodes[0].device_ids for reservation in runs]
        finally:
            for reservation in runs:
                reservation.release()

    assert run(take_both()) == [("0", "1"), ("2", "3")]
    assert run(take_both()) == [("0", "1"), ("2", "3")]


def test_cores_of_several_nodes_are_slots_too(run: Run) -> None:
    platform = CpuPlatform()

    async def take() -> Reservation:
        reservation = Reservation(platform, 8, 60)
        try:
            await reservation.take(specs({"a": train([0, 7, 8])}, platform))
        finally:
            reservation.release()
        return reservation

    assert sorted(run(take()).nodes) == [0, 1]
