"""Episodes on Ray: as on `local`; two FSDP2 ranks and two replicas; kills; episodes in flight at checkpoints."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.runtime.rollout.recording import array_from
from roll_core.runtime.weights.publisher import WeightPublisher

if TYPE_CHECKING:
    from conftest import AgenticRuns

    from roll_core.runtime.run.loop import RunResult

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

GROUPS = 2
"""Groups of a batch."""


def config(runs: AgenticRuns, **given: Any) -> dict[str, Any]:
    """Two ranks and two replicas; replies are long, so that weights change in the middle of turns."""
    made = runs.config(
        executor="ray",
        num_gpus_per_node=4,
        async_generation_ratio=1.0,
        max_steps=6,
        response_length=160,
        max_tokens_per_step=40,
        record_rollouts=True,
        **given,
    )
    made["actor_train"] |= {"strategy_args": {"strategy_name": "fsdp2_train"}, "device_mapping": [0, 1]}
    made["actor_train"]["training_args"]["per_device_train_batch_size"] = 4
    made["actor_infer"]["device_mapping"] = [2, 3]
    return made


def trained(result: RunResult) -> list[dict[str, Any]]:
    """All groups that a run trained on, by step."""
    files = sorted((result.run_dir.path / "rollouts").glob("step-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()[1:]]


def test_local_and_ray_have_the_same_numbers(runs: AgenticRuns) -> None:
    """The same tokens, rewards and gradients. Engine batches differ by the times of replies, in the last bits."""
    found = []
    for executor in ("local", "ray"):
        given = {"exp_name": executor, "executor": executor, "max_steps": 3, "seeded_rollouts": True}
        result = runs.ok(runs.config(record_rollouts=True, **given))
        turns = [
            (group["id"], sample["reward"]["value"], [turn["sampled_ids"] for turn in sample["rollout"]["turns"]])
            for group in trained(result)
            for sample in group["samples"]
        ]
        keys = ("actor/grad_norm", "env/guess/score/mean", "env/guess/turns/mean", "tokens/generated")
        found.append((turns, [[line[key] for key in keys] for line in runs.metrics(result)]))
    (local, local_metrics), (ray, ray_metrics) = found
    assert len(local) == 3 * 8
    assert local == ray
    np.testing.assert_allclose(ray_metrics, local_metrics, rtol=1e-4)
    assert any(line[0] > 0 for line in local_metrics)


def test_ranks_train_while_episodes_continue(runs: AgenticRuns) -> None:
    result = runs.ok(config(runs))
    lines = runs.metrics(result)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert max(line["rollout/staleness/max"] for line in lines) == 1
    assert all(line["tokens/generated"] > 0 for line in lines)
    assert all(line["rollout/forks"] == 0 for line in lines)
    groups = trained(result)
    assert [group["id"] for group in groups] == [f"guess/{position}" for position in range(6 * GROUPS)]
    # A step has a gradient exactly if the episodes of one of its groups have different rewards.
    differ = [len({sample["reward"]["value"] for sample in group["samples"]}) > 1 for group in groups]
    steps = [any(differ[first : first + GROUPS]) for first in range(0, len(differ), GROUPS)]
    assert [line["actor/grad_norm"] > 0 for line in lines] == steps
    assert any(steps)


def test_replica_killed_before_a_publish_loses_no_episode(runs: AgenticRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publish fails on the rank that sends; the next one is collective over both ranks again."""
    publish, attempts = WeightPublisher.publish, []

    async def publish_with_an_accident(self: Any, version: int, **given: Any) -> Any:
        if version == 2 and 2 not in attempts:  # the episodes of the next batch are running
            os.kill(self._infer.members[1].pid, signal.SIGKILL)
        attempts.append(version)
        return await publish(self, version, **given)

    monkeypatch.setattr(WeightPublisher, "publish", publish_with_an_accident)
    result = runs.ok(config(runs))
    assert attempts.count(2) == 2
    lines = runs.metrics(result)
    assert lines[-1]["rollout/lost_replicas"] == 1
    assert max(line["rollout/staleness/max"] for line in lines) == 1
    assert sum(line.get("env/guess/failures", 0) for line in lines) == 0
    groups = trained(result)
    assert [group["id"] for group in groups] == [f"guess/{position}" for position in range(6 * GROUPS)]
    assert all(len(group["samples"]) == 4 for group in groups)


def test_a_resumed_run_trains_on_each_episode_once(runs: AgenticRuns) -> None:
    """The checkpoint of step 3 has the episodes that were running; the resumed run continues them."""
    whole = runs.ok(config(runs, exp_name="whole", save_steps=3))
    saved = whole.run_dir.checkpoints / "step-3"
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))
    kept = state["pipeline_state"]["rollouts"]["guess"]["kept"]
    assert len(kept) == GROUPS
    resumed = runs.ok(config(runs, exp_name="resumed", resume_from_checkpoint=str(saved)))
    assert [group["id"] for group in trained(resumed)] == [f"guess/{position}" for position in range(6 * GROUPS)]
    assert "rollout/restarted_groups" not in runs.metrics(resumed)[-1]
    # Tokens that were sampled before the checkpoint are those that are trained on.
    by_id = {group["id"]: group for group in trained(resumed)}
    for slot in kept:
        group = by_id[f"guess/{slot['position']}"]
        for key, outputs in slot.get("calls", {}).items():
            episode, _, turn = map(int, key.split("/"))
            (output,) = outputs
            if output is not None:
                before = array_from(output["token_ids"]).tolist()
                sampled = array_from(group["samples"][episode]["rollout"]["turns"][turn]["sampled_ids"]).tolist()
                assert sampled[: len(before)] == before
