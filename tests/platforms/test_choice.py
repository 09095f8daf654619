"""Which platform a run gets, and what its workers get from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_core.builtin.cpu import CpuPlatform
from roll_core.errors import PlacementError, PluginError
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.runtime.cluster.executors.local import environment_of_all
from roll_core.runtime.cluster.placement import place_roles, slots_per_node
from roll_core.runtime.cluster.platform import select_platform, values_of
from roll_core.spec.config import TrainWorkerConfig
from roll_core.spec.platform import EnvVar, Platform, Probe
from roll_core.spec.providers import PlatformProvider
from roll_testing.errors import mentions, raises_error


class Board(CpuPlatform):
    """An accelerator of which this host has two."""

    name = "board"
    slots_share_cores = False
    found = True

    def probe(self) -> Probe:
        return Probe(found=self.found, why="two boards" if self.found else "no board in the slot")

    def device_count(self) -> int:
        return 2 if self.found else 0

    def environment(self, kind: str, local_indices: Any) -> tuple[EnvVar, ...]:
        return (
            EnvVar(name="BOARD_CACHE", value="small", reason="a large one is slow"),
            EnvVar(name="BOARD_ORDER", value="slot", reason="others count otherwise", required=True),
        )


class AbsentBoard(Board):
    name = "absent"
    found = False


class BrokenBoard(Board):
    name = "broken"

    def probe(self) -> Probe:
        raise OSError("libboard.so: wrong ELF class")


Offer = Callable[..., Registry]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """`offer(cls=priority, ...)`: a registry with platforms of these classes."""

    def make(**priorities: int) -> Registry:
        import roll_core.runtime.cluster.platform as module

        classes: dict[str, type[Platform]] = {
            "board": Board, "absent": AbsentBoard, "broken": BrokenBoard, "other": Board, "cpu": CpuPlatform
        }  # fmt: skip
        monkeypatch.setattr(module, "load_target", lambda target, owner: classes[target.partition(":")[2]])
        records = tuple(
            PlatformProvider(name=name, target=f"boards:{name}", summary="", priority=priority)
            for name, priority in priorities.items()
        )
        plugin = Plugin(
            package="boards", version="1", entry_point="boards", target="boards", state="loaded", providers=records
        )
        return Registry([plugin])

    return make


def test_the_highest_priority_of_those_that_are_here_wins(offer: Offer) -> None:
    assert select_platform(offer(cpu=0, board=10, absent=20), None).name == "board"


def test_platforms_of_equal_priority_raise(offer: Offer) -> None:
    with raises_error(PlacementError, "board", "other", "platform:"):
        select_platform(offer(board=10, other=10, cpu=0), None)


def test_missing_platform_that_was_requested_raises_with_advice(offer: Offer) -> None:
    with pytest.raises(PlacementError) as caught:
        select_platform(offer(cpu=0, absent=10), "absent")
    assert mentions(str(caught.value), "absent", "board")
    assert "\n" not in str(caught.value)


def test_broken_platform_does_not_stop_runs_on_others(offer: Offer, caplog: pytest.LogCaptureFixture) -> None:
    assert select_platform(offer(cpu=0, broken=10), None).name == "cpu"
    assert mentions(caplog.text, "libboard.so", "ELF")
    with raises_error(PluginError, "ELF"):
        select_platform(offer(cpu=0, broken=10), "broken")


def test_on_a_cluster_it_need_not_be_where_the_driver_is(offer: Offer) -> None:
    assert select_platform(offer(cpu=0, absent=10), "absent", elsewhere=True).name == "absent"


def test_host_without_slots_requires_their_number() -> None:
    roles = {"actor_train": TrainWorkerConfig(device_mapping=[0, 9])}
    with raises_error(PlacementError, "num_gpus_per_node"):
        slots_per_node(AbsentBoard(), None)
    places = place_roles(roles, AbsentBoard(), slots_per_node(AbsentBoard(), 8))["actor_train"]
    assert [(place.node, place.local_indices) for place in places] == [(0, (0,)), (1, (1,))]


def test_user_environment_is_passed_on_unless_workers_override() -> None:
    environ = {"BOARD_CACHE": "large", "BOARD_ORDER": "age", "OTHER": "1"}
    assert values_of(Board().environment("train", (0,)), environ) == {"BOARD_CACHE": "large", "BOARD_ORDER": "slot"}
    assert values_of(Board().environment("train", (0,)), {}) == {"BOARD_CACHE": "small", "BOARD_ORDER": "slot"}


def test_the_config_wins_over_the_platform() -> None:
    from roll_core.runtime.cluster.executors.base import GroupSpec

    places = place_roles({"a": TrainWorkerConfig(device_mapping=[0])}, Board(), 1)["a"]
    spec = GroupSpec(role="a", kind="train", target="x:X", places=places, env={"BOARD_ORDER": "mine"})
    assert environment_of_all([spec], Board()) == {"BOARD_ORDER": "mine", "BOARD_CACHE": "small"}


def test_a_worker_sees_its_devices_under_every_name() -> None:
    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_executor_ray.executor import RayExecutor

    class TwoNames(Board):
        visible_devices = "BOARD_VISIBLE"
        also_visible_devices = ("OLD_BOARD_VISIBLE",)

    (place,) = place_roles({"a": TrainWorkerConfig(device_mapping=[1])}, TwoNames(), 2)["a"]
    spec = GroupSpec(role="a", kind="train", target="x:X", places=(place,), env={"BOARD_VISIBLE": "all"})
    env = RayExecutor(TwoNames(), 2)._identity(spec, place, ["7"])
    assert (env["BOARD_VISIBLE"], env["OLD_BOARD_VISIBLE"]) == ("7", "7")


def test_a_role_without_slots_talks_as_hosts_do() -> None:
    from roll_core.pipelines.config import SFTConfig
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.workers.build import group_specs
    from roll_core.spec.pipeline import RoleSpec

    class OwnBackend(Board):
        collective_backend = "board_ccl"

    def backend(**keys: Any) -> str:
        role = {"data_args": {"file_name": "x"}, "strategy_args": {"strategy_name": "hf_train"}, **keys}
        config = SFTConfig.model_validate({"pipeline": "sft", "pretrain": "model", "sft_train": role})
        roles = [RoleSpec(name="sft_train", kind="train", num_steps=1)]
        places = place_roles(config.roles(), OwnBackend(), 2)
        (spec,) = group_specs(roles, config, load_registry(), OwnBackend(), places, Path("tokenizer"))
        found: str = spec.args["backend"]
        return found

    assert backend(device_mapping=[0, 1]) == "board_ccl"
    assert backend(world_size=2) == "gloo"


@pytest.mark.parametrize(
    ("exported", "of_the_run", "threads"), [("", "", 2), ("1", "", 1), ("6,2", "", 6), ("1", "3", 3), ("some", "", 2)]
)
def test_the_users_number_of_threads_counts_on_every_host(
    monkeypatch: pytest.MonkeyPatch, exported: str, of_the_run: str, threads: int
) -> None:
    from roll_core.pipelines.config import SFTConfig
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.workers.build import group_specs
    from roll_core.spec.pipeline import RoleSpec

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if exported:
        monkeypatch.setenv("OMP_NUM_THREADS", exported)
    role = {"data_args": {"file_name": "x"}, "strategy_args": {"strategy_name": "hf_train"}, "world_size": 2}
    keys: dict[str, Any] = {"pipeline": "sft", "pretrain": "model", "sft_train": role}
    if of_the_run:
        keys["system_envs"] = {"OMP_NUM_THREADS": of_the_run}
    config = SFTConfig.model_validate(keys)
    places = place_roles(config.roles(), Board(), 2, cores=4)
    roles = [RoleSpec(name="sft_train", kind="train", num_steps=1)]
    (spec,) = group_specs(roles, config, load_registry(), Board(), places, Path("tokenizer"))
    assert {place.num_threads for place in spec.places} == {threads}
    assert {place.threads_of(8) for place in spec.places} == {threads if threads != 2 else 4}


def test_user_environment_overrides_strategy_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from roll_core.pipelines.config import SFTConfig
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.workers.build import group_specs
    from roll_core.spec.pipeline import RoleSpec
    from roll_strategy_hf.config import HFTrainConfig

    wanted = [EnvVar(name=name, value="wanted", reason="a test") for name in ("FREE", "EXPORTED", "OF_THE_RUN")]
    wanted.append(EnvVar(name="NEEDED", value="wanted", reason="a test", required=True))
    monkeypatch.setattr(HFTrainConfig, "worker_environment", lambda self: tuple(wanted), raising=True)
    for name in ("EXPORTED", "NEEDED"):
        monkeypatch.setenv(name, "exported")
    role = {"data_args": {"file_name": "x"}, "strategy_args": {"strategy_name": "hf_train"}, "world_size": 2}
    keys = {"pipeline": "sft", "pretrain": "model", "sft_train": role, "system_envs": {"OF_THE_RUN": "set"}}
    config = SFTConfig.model_validate(keys)
    roles = [RoleSpec(name="sft_train", kind="train", num_steps=1)]
    places = place_roles(config.roles(), Board(), 2)
    (spec,) = group_specs(roles, config, load_registry(), Board(), places, Path("tokenizer"))
    assert spec.env == {"FREE": "wanted", "EXPORTED": "exported", "NEEDED": "wanted", "OF_THE_RUN": "set"}
