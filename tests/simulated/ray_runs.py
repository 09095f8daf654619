"""Runs of the quick start on simulated devices whose roles are processes of Ray: `ray_runs.py` in an empty folder.

Writes `results.json`: the metrics of each run's steps, and its weight transports, by name.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from example_runs import GRPO, batch, write_data

import roll_core as roll
from roll_core.runtime.records.record import read_record
from roll_core.runtime.records.tracking import repeatable
from roll_executor_ray.instance import RayInstance
from roll_platform_sim.platform import SimPlatform

TWO_RANKS = ("sft_train.device_mapping=[0, 1]", batch("sft_train", 8), "eval_steps=2")
PROVEN = (
    *("max_steps=1", "pretrain=output/cpu/quickstart-sft/latest/export"),
    *("guards.logprob_probe.every=1", "guards.logprob_gap.action=error"),
)
APART = ("actor_infer.device_mapping=[1]", "weight_transport=collective")


def main() -> None:
    write_data("quickstart")
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    found = {
        "one rank": run("sft", "cpu", batch("sft_train", 16), "eval_steps=2"),
        "grpo": run("grpo", "cpu", *GRPO, *PROVEN),
    }
    ray = RayInstance(SimPlatform())
    ray.open()
    try:
        found["two ranks"] = run("sft", "sim", *TWO_RANKS, "save_steps=1")
        checkpoint = Path("output/sim/quickstart-sft/001/checkpoints/step-1").resolve()
        found["two ranks, resumed"] = run("sft", "sim", *TWO_RANKS, f"resume_from_checkpoint={checkpoint}")
        found["shm"] = run("grpo", "sim", *GRPO, *PROVEN)
        found["disk"] = run("grpo", "sim", *GRPO, *PROVEN, "model_update_dir=weights")
        found["collective"] = run("grpo", "sim", *GRPO, *PROVEN, *APART)
    finally:
        ray.close()
    Path("results.json").write_text(json.dumps(found), encoding="utf-8")


def run(config: str, platform: str, *overrides: str) -> dict[str, Any]:
    """Metrics of a run that finished, without those of the transport itself."""
    common = (f"platform={platform}", f"output_dir=output/{platform}", "max_steps=2", "eval_steps=0", "save_steps=0")
    where = ("executor=local",) if platform == "cpu" else ("executor=ray", "num_gpus_per_node=2")
    screen = io.StringIO()
    try:
        with contextlib.redirect_stdout(screen):
            result = roll.run(f"examples/quickstart/{config}.yaml", [*common, *where, *overrides])
    except Exception as error:
        raise RuntimeError(screen.getvalue()) from error
    transports = read_record(result.run_dir.record)["weight_transports"]
    metrics = [repeatable(step) for step in result.history]
    for step in metrics:
        step.pop("weight_sync/copied_bytes", None)
    return {"metrics": metrics, "transports": transports}


if __name__ == "__main__":
    main()
