"""Who would sit where, what a run would refuse, and what it would wait for."""

import pytest

from roll_core.errors import PlacementError
from roll_core.plugins.targets import load_target
from roll_core.runtime.cluster.executors import executor_of
from roll_core.runtime.cluster.placement import place_roles
from roll_core.runtime.workers.build import slots_per_worker
from roll_testing.errors import mentions, raises_error
from roll_tools.placement import pipeline_plan

ACC = ("platform=acc", "executor=ray")
SIXTEEN = ("actor_train.device_mapping=list(range(0,16))", "actor_infer.device_mapping=[0]", "rollout_batch_size=32")


def test_places_and_executor_equal_those_of_a_run(loaded, registry, planned):
    overrides = (*ACC, "actor_train.device_mapping=list(range(0,8))", "actor_infer.device_mapping=list(range(4,8))")
    found, config = planned(*overrides).placement, loaded(*overrides).config
    roles = found.pipeline.roles
    expected = place_roles(
        {role.name: config.roles()[role.name] for role in roles},
        found.platform,
        8,
        slots_per_worker=slots_per_worker(roles, config, registry),
    )
    assert found.places == expected
    assert found.executor == executor_of(config, registry, expected)
    assert [place.slots for place in found.places["actor_infer"]] == [(4,), (5,), (6,), (7,)]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("+reference.strategy_args.strategy_name=hf_infer", "use_kl_loss=true"),
        ("+critic.strategy_args.strategy_name=hf_train", "adv_estimator=gae"),
    ],
)
def test_roles_are_those_of_the_pipeline(loaded, overrides):
    each = loaded(*overrides)
    pipeline = load_target(each.pipeline.target, owner="test")(each.config)
    assert tuple(pipeline.roles()) == pipeline_plan(each.pipeline, each.config).roles
    acting = {role for phase in pipeline_plan(each.pipeline, each.config).phases for role in phase.acts}
    assert acting == {role.name for role in pipeline.roles() if role.kind != "reward"}


def test_missing_slot_has_the_error_of_a_run(planned):
    found = planned(*ACC, *SIXTEEN)
    assert not found.starts
    (problem,) = found.placement.problems
    assert mentions(problem, "8 of 16", "actor_train", "slot 8", "8 slots", "0 to 7")


def test_a_replica_of_vllm_may_be_on_two_nodes(planned):
    config = "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {tensor_parallel_size: 16}}"
    cluster = ("platform=cuda", "executor=ray", "num_gpus_per_node=8")
    overrides = (*cluster, "actor_train.device_mapping=[0]", "actor_infer.device_mapping=list(range(0,16))", config)
    found = planned(*overrides, num_nodes=2).placement
    (leader,) = found.places["actor_infer"]
    (follower,) = leader.followers
    assert (leader.node, leader.slots, leader.device) == (0, tuple(range(8)), "cuda:0")
    assert (follower.node, follower.slots, follower.local_indices) == (1, tuple(range(8, 16)), tuple(range(8)))
    assert (found.nodes, found.problems) == ({0, 1}, ())
    (note,) = found.notes
    assert mentions(note, "GPU 8, 8")
    (problem,) = planned(*overrides, num_nodes=1).placement.problems
    assert mentions(problem, "actor_infer", "slot 8")


def test_another_node_places_every_role_and_start_awaits_both(planned):
    found = planned(*ACC, *SIXTEEN, num_nodes=2)
    assert found.starts
    (note,) = found.placement.notes
    assert mentions(note, "GPU 8, 8", 2, 120)


@pytest.mark.parametrize(
    ("overrides", "transport", "passed_over"),
    [
        ((), "shared", []),
        (("executor=ray", "num_gpus_per_node=1"), "shm", ["shared", "cuda_ipc"]),
        (("executor=ray", "num_gpus_per_node=1", "weight_transport=collective"), "collective", []),
        (("executor=ray", "num_gpus_per_node=1", "model_update_dir=/w"), "disk", ["shared", "cuda_ipc", "shm", "coll"]),
    ],
)
def test_weight_transport_is_named_with_rejected_alternatives(planned, overrides, transport, passed_over):
    found = planned(*overrides).placement.weights
    assert list(found) == [("actor_train", "actor_infer")]
    (choice,) = found.values()
    assert choice.provider.name == transport
    assert len(choice.passed_over) == len(passed_over)
    assert all(each.startswith(name) for each, name in zip(choice.passed_over, passed_over, strict=True))


def test_roles_without_a_transport_are_a_problem_with_reason(planned):
    found = planned("executor=ray", "num_gpus_per_node=1", "weight_transport=shared")
    assert not found.starts
    (problem,) = found.placement.problems
    assert "shared: " in problem


def test_nodes_of_a_cluster_are_not_requested(planned, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = planned(*ACC, "actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0]")
    assert found.starts
    assert "--nodes N" in found.placement.notes[0]


def test_more_slots_than_this_host_has_are_named(planned):
    found = planned(*ACC, "num_gpus_per_node=16", "actor_train.device_mapping=[9]", "actor_infer.device_mapping=[0]")
    (problem,) = found.placement.problems
    assert mentions(problem, "actor_train", "slot 9", "8", "acc", "num_gpus_per_node", "16")


def test_a_described_machine_has_more_slots_than_this_host(planned):
    sixteen = (*ACC, "num_gpus_per_node=16", "actor_train.device_mapping=[9]", "actor_infer.device_mapping=[0]")
    for machine in ({"num_nodes": 1}, {"slot_bytes": 80 << 30}, {"host_bytes": 80 << 30}):
        assert planned(*sixteen, **machine).starts


def test_a_described_machine_has_no_second_process(planned):
    two = ("platform=cuda", "executor=local", "num_gpus_per_node=2", "actor_train.device_mapping=[0,1]")
    (problem,) = planned(*two, slot_bytes=80 << 30).placement.problems
    assert mentions(problem, "actor_train", "2 workers", "executor")


def test_local_executor_limits_are_problems(planned):
    found = planned("executor=local", "num_gpus_per_node=2", "actor_train.device_mapping=[0,1]")
    (problem,) = found.placement.problems
    assert mentions(problem, "actor_train", "2 workers", "executor")


def test_absent_platform_is_planned_with_a_problem(planned, registry):
    found = planned("platform=cuda", "num_gpus_per_node=8", "actor_train.device_mapping=list(range(0,8))")
    assert mentions(found.placement.problems[0], "cuda")
    assert len(found.placement.places["actor_train"]) == 8
    assert planned(
        "platform=cuda", "num_gpus_per_node=8", "actor_train.device_mapping=list(range(0,8))", num_nodes=1
    ).starts


def test_without_slots_to_count_there_is_no_picture(planned):
    with raises_error(PlacementError, "num_gpus_per_node"):
        planned("platform=cuda")


def test_pipeline_without_a_plan_runs_its_roles_in_sequence(loaded):
    from dataclasses import replace

    each = loaded()
    silent = replace(each, pipeline=replace(each.pipeline, plan=""))
    found = pipeline_plan(silent.pipeline, silent.config)
    assert {role.name: role.kind for role in found.roles} == {
        "actor_train": "train",
        "actor_infer": "generate",
        "rewards.math": "reward",
    }
    assert [dict(phase.acts) for phase in found.phases] == [
        {"actor_train": "backward"},
        {"actor_train": "step"},
        {"actor_infer": "generate"},
    ]
