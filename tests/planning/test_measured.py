"""What was predicted beside what was measured."""

import json

from roll_core.runtime.cluster.memory_use import MemoryUse, by_process
from roll_tools.run_plan import PROCESS_BYTES, prediction
from roll_tools.saved_record import Prediction


def compared(plan, measured):
    """As the report of a run compares its two files."""
    found = Prediction.model_validate({} if plan is None else json.loads(json.dumps(prediction(plan))))
    return [row | found.of(row["roles"]) for row in by_process(measured)]


def use(pid, begun, peak, device=None):
    return MemoryUse(host="here", pid=pid, begun_bytes=begun, peak_bytes=peak, device_bytes=device)


def test_roles_of_one_process_share_a_row_of_their_peak_phase(planned):
    plan = planned()
    (row,) = compared(plan, {"actor_train": [use(7, 100, 900)], "actor_infer": [use(7, 300, 900)]})
    assert row["roles"] == ["actor_train", "actor_infer"]
    assert row["measured_bytes"] == 800
    assert row["device_measured_bytes"] is row["device_predicted_bytes"] is None
    assert row["predicted_bytes"] == max(load.num_bytes for load in plan.loads) - PROCESS_BYTES


def test_every_worker_of_its_own_is_a_row(planned):
    plan = planned("executor=ray", "num_gpus_per_node=2", "actor_train.device_mapping=[0,1]")
    rows = compared(
        plan, {"actor_train": [use(1, 0, 10), use(2, 0, 12)], "actor_infer": [use(3, 0, 5)], "none": [None]}
    )
    assert [(row["roles"], row["ranks"], row["measured_bytes"]) for row in rows] == [
        (["actor_train"], [0], 10),
        (["actor_train"], [1], 12),
        (["actor_infer"], [0], 5),
    ]
    assert rows[0]["predicted_bytes"] == rows[1]["predicted_bytes"] > rows[2]["predicted_bytes"] > 0


def test_accelerators_are_apart_from_the_host(planned):
    keys = ("platform=acc", "executor=ray", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]")
    plan = planned(*keys)
    (row, _) = compared(plan, {"actor_train": [use(1, 0, 10, 77)], "actor_infer": [use(2, 0, 5, 8)]})
    trainer = plan.memory[0]
    assert row["device_measured_bytes"] == 77
    assert row["device_predicted_bytes"] == trainer.num_bytes("backward", "device")
    assert row["predicted_bytes"] >= trainer.num_bytes("backward", "host") + 16 * trainer.parameters


def test_without_a_plan_what_was_measured_stands_alone(planned):
    text = "pipeline: sft\npretrain: nowhere/model\nsft_train: {data_args: {file_name: a.jsonl}, strategy_args:"
    text += " {strategy_name: hf_train}}\n"
    for plan in (None, planned(text=text)):
        (row,) = compared(plan, {"sft_train": [use(1, 0, 10)]})
        assert (row["measured_bytes"], row["predicted_bytes"]) == (10, None)
