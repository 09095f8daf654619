from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PlacementError
from roll_core.plugins.registry import load_registry
from roll_core.runtime.cluster.executors import executor_of
from roll_core.runtime.cluster.executors.base import GroupSpec
from roll_core.runtime.cluster.placement import Place, check_local, place_roles, slots_of, slots_per_node
from roll_core.spec.config import (
    InferWorkerConfig,
    RewardConfig,
    RunConfig,
    ScoreWorkerConfig,
    TrainWorkerConfig,
    WorkerConfig,
)
from roll_executor_ray.reservation import Reservation
from roll_testing.errors import raises_error


class EightAccelerators(CpuPlatform):
    name = "eight"
    device_type = "acc"
    resource_name = "GPU"
    visible_devices = "ACC_VISIBLE"
    slots_share_cores = False

    def device_count(self) -> int:
        return 8

    def device(self, local_index: int) -> str:
        return f"acc:{local_index}"


def place(roles: Mapping[str, WorkerConfig], per_node: int = 8, **more: object) -> dict[str, tuple[Place, ...]]:
    return place_roles(roles, EightAccelerators(), per_node, cores=64, **more)  # type: ignore[arg-type]


def train(mapping: object) -> TrainWorkerConfig:
    return TrainWorkerConfig(device_mapping=mapping)  # type: ignore[arg-type]


def infer(mapping: object, per_worker: int | None = None) -> InferWorkerConfig:
    return InferWorkerConfig(device_mapping=mapping, num_gpus_per_worker=per_worker)  # type: ignore[arg-type]


# -- the examples of ROLL's documentation of resources


def test_train_on_16_and_infer_on_8_takes_three_nodes() -> None:
    places = place({"actor_train": train("list(range(0,16))"), "actor_infer": infer("list(range(16,24))")})
    assert [p.slots for p in places["actor_train"]] == [(s,) for s in range(16)]
    assert [p.node for p in places["actor_train"]] == [0] * 8 + [1] * 8
    assert [p.node for p in places["actor_infer"]] == [2] * 8
    assert [p.local_indices for p in places["actor_infer"]] == [(i,) for i in range(8)]
    assert slots_of(places["actor_train"]).isdisjoint(slots_of(places["actor_infer"]))


def test_roles_on_the_same_eight_slots_are_colocated() -> None:
    places = place({"actor_infer": infer("list(range(0,8))"), "actor_train": train("list(range(0,8))")})
    assert slots_of(places["actor_train"]) == slots_of(places["actor_infer"]) == set(range(8))
    assert {p.node for workers in places.values() for p in workers} == {0}


def test_halves_of_a_node_are_disaggregated() -> None:
    places = place({"actor_train": train("list(range(0,4))"), "actor_infer": infer("list(range(4,8))")})
    assert slots_of(places["actor_train"]).isdisjoint(slots_of(places["actor_infer"]))
    assert [p.device for p in places["actor_infer"]] == ["acc:4", "acc:5", "acc:6", "acc:7"]


def test_cpu_role_has_world_size_workers_without_slots() -> None:
    places = place({"rewards.code_sandbox": RewardConfig(reward="r", world_size=8)})
    assert [(p.rank, p.world_size, p.slots, p.device) for p in places["rewards.code_sandbox"]] == [
        (rank, 8, (), "cpu") for rank in range(8)
    ]


def test_complete_example_of_the_documentation() -> None:
    places = place(
        {
            "actor_train": train("list(range(0,16))"),
            "actor_infer": infer("list(range(0,12))", 2),
            "rewards.code_sandbox": RewardConfig(reward="r", world_size=8),
        }
    )
    assert {role: len(workers) for role, workers in places.items()} == {
        "actor_train": 16,
        "actor_infer": 6,
        "rewards.code_sandbox": 8,
    }
    assert [p.slots for p in places["actor_infer"]] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)]
    assert [p.node for p in places["actor_infer"]] == [0, 0, 0, 0, 1, 1]
    assert [p.local_indices for p in places["actor_infer"]][4:] == [(0, 1), (2, 3)]
    assert slots_of(places["actor_infer"]) < slots_of(places["actor_train"])
    assert [p.node for p in places["rewards.code_sandbox"]] == [0, 1] * 4


def test_replicas_over_nodes_have_a_place_on_each() -> None:
    """Two replicas, each on a half of two nodes, beside trainers on the first node."""
    roles = {"actor_infer": infer([0, 1, 8, 9, 2, 3, 10, 11], 4), "actor_train": train([0, 1])}
    first, second = place(roles, over_nodes={"actor_infer"})["actor_infer"]
    assert [(part.node, part.slots, part.local_indices) for part in (*first.parts, *second.parts)] == [
        (0, (0, 1), (0, 1)),
        (1, (8, 9), (0, 1)),
        (0, (2, 3), (2, 3)),
        (1, (10, 11), (2, 3)),
    ]
    assert [(each.rank, each.world_size) for each in (first, second)] == [(0, 2), (1, 2)]
    assert [(each.rank, each.world_size) for part in (first, second) for each in part.followers] == [(0, 2), (1, 2)]
    assert slots_of([second]) == {2, 3, 10, 11}
    assert [part.num_threads for part in first.parts] == [32, 32]  # half of the cores on each node, which has 64


@pytest.mark.parametrize("mapping", [[6, 7, 8], [0, 8, 1, 9]])
def test_uneven_or_mixed_nodes_of_a_replica_are_refused(mapping: list[int]) -> None:
    with raises_error(PlacementError, "actor_infer rank 0", "num_gpus_per_node"):
        place({"actor_infer": infer(mapping, len(mapping))}, over_nodes={"actor_infer"})


def test_missing_node_is_named_with_role_and_slot() -> None:
    """Slots 0, 15, 23 and 31 are on four nodes, of which there are three."""
    places = place({"actor_train": train([0, 15, 23, 31])})["actor_train"]
    wanted = [GroupSpec(role="actor_train", kind="train", target="unused:Unused", places=places)]
    reservation = Reservation(EightAccelerators(), 8, 60)
    needs = reservation._slots_needed(wanted)
    with raises_error(PlacementError, "actor_train", "slot 31", "24"):
        reservation._check_existence(wanted, needs, [{"GPU": 8.0}] * 3)
    reservation._check_existence(wanted, needs, [{"GPU": 8.0}] * 4)


# -- arithmetic


def test_local_rank_counts_a_roles_ranks_on_each_node() -> None:
    places = place({"actor_train": train([8, 0, 9, 1])})["actor_train"]
    assert [(p.node, p.local_rank) for p in places] == [(1, 0), (0, 0), (1, 1), (0, 1)]


def test_strategy_that_needs_two_slots_each_gets_them() -> None:
    places = place({"actor_infer": infer("list(range(0,4))")}, slots_per_worker={"actor_infer": 2})
    assert [p.slots for p in places["actor_infer"]] == [(0, 1), (2, 3)]


def test_worker_whose_slots_lie_on_two_nodes_is_refused() -> None:
    with raises_error(PlacementError, "actor_infer rank 1", "slots 7", "8", "nodes 0", "1"):
        place({"actor_infer": infer([5, 6, 7, 8], 2)})


def test_a_node_has_as_many_slots_as_given() -> None:
    places = place({"actor_train": train([0, 4])}, per_node=4)["actor_train"]
    assert [(p.node, p.local_indices) for p in places] == [(0, (0,)), (1, (0,))]


@given(st.lists(st.integers(0, 31), min_size=1, unique=True))
def test_slots_of_a_role_are_those_of_its_mapping(slots: list[int]) -> None:
    assert slots_of(place({"a": train(slots)})["a"]) == set(slots)


@given(st.lists(st.lists(st.integers(0, 15), min_size=1, unique=True), min_size=1, max_size=3), st.integers(1, 128))
def test_concurrent_workers_use_no_more_threads_than_cores(mappings: list[list[int]], cores: int) -> None:
    roles = {f"r{index}": ScoreWorkerConfig(device_mapping=tuple(each)) for index, each in enumerate(mappings)}
    places = place_roles(roles, EightAccelerators(), 8, cores=cores)
    used = {slot for each in mappings for slot in each}
    for node in (0, 1):
        on_node = [slot for slot in used if slot // 8 == node]
        for workers in places.values():
            threads = [p.num_threads for p in workers if p.node == node]
            assert all(count >= 1 for count in threads)
            if len(on_node) <= cores:
                assert sum(threads) <= cores


# -- slots that are shares of a host's cores


def test_colocated_roles_on_a_laptop_take_turns_with_all_cores() -> None:
    roles = {"actor_train": train([0]), "actor_infer": infer([0]), "reference": ScoreWorkerConfig(device_mapping=(0,))}
    places = place_roles(roles, CpuPlatform(), 2, cores=2)
    assert {p.num_threads for workers in places.values() for p in workers} == {2}
    assert {p.device for workers in places.values() for p in workers} == {"cpu"}


def test_workers_on_a_laptop_share_its_cores() -> None:
    places = place_roles({"actor_train": train([0, 1])}, CpuPlatform(), 2, cores=2)
    assert [p.num_threads for p in places["actor_train"]] == [1, 1]


def test_models_without_device_mapping_share_first_cpu_slots() -> None:
    places = place_roles({"a": TrainWorkerConfig(), "b": InferWorkerConfig()}, CpuPlatform(), 4, cores=4)
    assert slots_of(places["a"]) == slots_of(places["b"]) == {0}
    assert [p.num_threads for p in places["a"]] == [4]


def test_reward_workers_use_no_slot_and_one_thread() -> None:
    roles = {"a": TrainWorkerConfig(), "rewards.m": RewardConfig(reward="r", world_size=3)}
    places = place_roles(roles, CpuPlatform(), 2, cores=4)
    assert [(p.slots, p.num_threads) for p in places["rewards.m"]] == [((), 1)] * 3
    assert places["a"][0].num_threads == 4


def test_num_gpus_per_node_allows_more_slots_than_cores() -> None:
    places = place_roles({"a": train("list(range(0,8))")}, CpuPlatform(), 8, cores=2)
    assert [p.num_threads for p in places["a"]] == [1] * 8


def test_roles_not_started_keep_their_share_of_cores() -> None:
    """A replay has no engine, but must add its sums in the recorded run's order, so with as many threads."""
    roles = {"actor_train": train([0, 1]), "actor_infer": infer([2, 3])}
    recorded = place_roles(roles, CpuPlatform(), 4, cores=16)
    replay = place_roles({"actor_train": roles["actor_train"]}, CpuPlatform(), 4, cores=16, configured=roles)
    assert replay == {"actor_train": recorded["actor_train"]}
    assert [p.num_threads for p in replay["actor_train"]] == [4, 4]


def test_slots_of_roles_that_are_not_started_need_not_exist() -> None:
    roles = {"actor_train": train([0]), "actor_infer": infer([8, 9])}
    replay = place_roles({"actor_train": roles["actor_train"]}, CpuPlatform(), 1, cores=4, configured=roles)
    assert [(p.node, p.num_threads) for p in replay["actor_train"]] == [(0, 4)]


def test_slot_beyond_the_cores_names_the_key_to_set() -> None:
    places = place_roles({"a": train([5])}, CpuPlatform(), 2, cores=2)["a"]
    with raises_error(PlacementError, "slot 5", "num_gpus_per_node", "6"):
        check_local("a", "train", places, CpuPlatform(), 2)


def test_worker_gets_its_share_of_another_hosts_cores() -> None:
    assert Place(rank=0, world_size=2, slots=(0,), slots_in_use=2).threads_of(96) == 48
    assert Place(rank=0, world_size=1, slots=(0, 1), slots_in_use=8).threads_of(64) == 16
    assert Place(rank=0, world_size=1).threads_of(64) == 1


def test_a_node_has_as_many_slots_as_the_platform_counts() -> None:
    assert slots_per_node(EightAccelerators(), None) == 8
    assert slots_per_node(EightAccelerators(), 4) == 4


# -- which executor


def run_config(executor: str) -> RunConfig:
    return RunConfig(pipeline="p", executor=executor)


def executor(name: str, places: dict[str, tuple[Place, ...]], apart: str = "") -> str:
    return executor_of(run_config(name), load_registry(), places, apart).name


def test_auto_is_local_where_every_role_has_one_worker() -> None:
    assert executor("auto", place({"a": train([0]), "b": infer([0, 1], 2)})) == "local"


def test_auto_is_not_local_if_weights_cannot_sync_in_process() -> None:
    assert executor("auto", place({"a": train([0])}), "no transport") == "ray"


def test_auto_is_not_local_where_some_role_has_two_workers() -> None:
    assert executor("auto", place({"a": train([0]), "rewards.m": RewardConfig(reward="r", world_size=2)})) == "ray"


def test_auto_is_not_local_for_a_worker_on_another_node() -> None:
    assert executor("auto", place({"a": train([8])})) == "ray"


def test_executor_of_the_config_is_taken_as_it_is() -> None:
    assert executor("ray", place({"a": train([0])})) == "ray"
    assert executor("local", place({"a": train([0, 1])})) == "local"
