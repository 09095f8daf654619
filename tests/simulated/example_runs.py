"""Examples on the CPU and on simulated devices, in one process: `example_runs.py PLATFORM RUN...` in an empty folder.

Writes `results.json`: for each run the metrics of its steps on either platform, or the error that ended it.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import sys
import traceback
from pathlib import Path

import torch

import roll_core as roll
from roll_core.runtime.records.tracking import repeatable

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS = 128
"""Rows of each data file that are kept: loading them all takes longer than the steps."""


def batch(role: str, size: int) -> str:
    return f"{role}.training_args.per_device_train_batch_size={size}"


SFT = (
    *("quickstart/sft", batch("sft_train", 16), "eval_steps=2", "num_gpus_per_node=2"),
    *("sft_train.device_mapping=[1]", "actor_infer.device_mapping=[1]"),
)
"""On the second device, whose copies are complete only if the host waits for that device."""
GRPO = (batch("actor_train", 16), "rollout_batch_size=8", "rewards.sorting.function=example_runs:share_of_digits")
AGENTIC = (batch("actor_train", 16), "rollout_batch_size=32")
FLOW = (batch("actor_train", 24), "rollout_batch_size=6", "num_images_per_prompt=4")
LORA = ("exp_name=lora", "actor_train.model_args.lora_target=all-linear", "actor_train.model_args.lora_rank=4")
BF16 = ("exp_name=bf16", "actor_train.model_args.dtype=bf16", "actor_infer.model_args.dtype=bf16")
RUNS = {
    "sft": (*SFT, "save_steps=1", "sft_train.strategy_args.strategy_config.async_save_ckpt=true"),
    "sft, resumed": (*SFT, "max_steps=3", "resume_from_checkpoint=true"),
    "grpo": ("quickstart/grpo", *GRPO),
    "grpo in bf16": ("quickstart/grpo", *GRPO, *BF16),
    "grpo with adapters": ("quickstart/grpo", *GRPO, *LORA),
    "dpo": ("preference/dpo", batch("actor_train", 16)),
    "reward_model": ("reward_model/reward", batch("reward_train", 16), "eval_steps=2"),
    "ppo": (
        *("reward_model/ppo", batch("actor_train", 16), batch("critic", 16)),
        *("rollout_batch_size=32", "critic_warmup=0"),
    ),
    "distill": (
        *("distill/on_policy", batch("actor_train", 16), "rollout_batch_size=64"),
        "pretrain=${output_dir}/quickstart-sft/latest/export",
    ),
    "distill off policy": (
        *("distill/off_policy", batch("actor_train", 16), "rollout_batch_size=64"),
        "pretrain=${output_dir}/quickstart-sft/latest/export",
    ),
    "agentic sft": ("agentic/sft", batch("sft_train", 8)),
    "agentic": ("agentic/agentic", *AGENTIC),
    "frozen_lake sft": ("frozen_lake/sft", batch("sft_train", 8)),
    "frozen_lake": ("frozen_lake/grpo", *AGENTIC),
    "tools sft": ("tools/sft", batch("sft_train", 8)),
    "tools": ("tools/grpo", *AGENTIC),
    "diffusion": ("diffusion/pretrain", batch("actor_train", 8)),
    "flow_grpo": ("diffusion/flow_grpo", *FLOW, "eval_steps=2"),
    "nft": ("diffusion/nft", *FLOW),
    "refl": ("diffusion/refl", *FLOW),
}
"""Config and overrides by name. Later runs start from the exports of earlier ones."""


def share_of_digits(prompt: str, response: str, **row: object) -> float:
    """Differs between responses of a model that has learned nothing."""
    return sum(letter.isdigit() for letter in response) / 8 + len(response) % 2


def main(device_platform: str, *names: str) -> None:
    write_data("quickstart", *(RUNS[name][0].split("/")[0] for name in names))
    found = {name: {platform: run(name, platform) for platform in ("cpu", device_platform)} for name in names}
    Path("results.json").write_text(json.dumps(found), encoding="utf-8")


def write_data(*examples: str) -> None:
    """Copy examples into this folder, and write the first rows of their data."""
    for example in dict.fromkeys(examples):
        folder = Path("examples") / example
        shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
        if (folder / "make_data.py").exists():
            sys.argv = ["make_data.py"]
            runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    for file in Path("examples").glob("*/data/*.jsonl"):
        file.write_text("".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:ROWS]), encoding="utf-8")


def run(name: str, platform: str) -> object:
    """Metrics of two steps, without those that depend on the clock; the traceback of a run that failed."""
    config, *overrides = RUNS[name]
    common = [f"platform={platform}", "executor=local", f"output_dir=output/{platform}", "max_steps=2"]
    if config.startswith("diffusion/") and not config.endswith("pretrain"):
        common.append("pretrain=${output_dir}/diffusion-pretrain/latest/export")
    screen = io.StringIO()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)
    try:
        with contextlib.redirect_stdout(screen):
            result = roll.run(f"examples/{config}.yaml", ["eval_steps=0", "save_steps=0", *common, *overrides])
    except Exception:
        return f"{screen.getvalue()}\n{traceback.format_exc()}"[-4000:]
    assert used_bytes() > 0 or platform == "cpu", f"{name} on {platform} used no device"
    return [repeatable(step) for step in result.history]


def used_bytes() -> int:
    """Peak on all devices."""
    return sum(torch.accelerator.max_memory_allocated(index) for index in range(torch.accelerator.device_count()))


if __name__ == "__main__":
    main(*sys.argv[1:])
