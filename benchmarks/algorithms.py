"""Every policy loss and advantage estimator on a small task: final accuracy, and steps to a goal.

    ./run bench algorithms [--seeds 3] [--only gspo frozen_lake/gigpo] [--modes synchronous]
                           [--learning-rates 1e-3 3e-4] [--minutes 10] [--models FOLDER]

Each method has its published defaults and starts from the same SFT model of its seed. Policy losses use `grpo`'s
advantages, and estimators the `ppo` loss. Nothing but the learning rate differs between methods of a task: of several
rates, the table has the one with the best accuracy over seeds.

    quickstart      all methods but those of turns; two optimizer steps per batch. `gdpo` sees two components of the
                    reward, whose value is the same.
    frozen_lake     estimators that credit turns, beside `grpo`; one optimizer step per batch

    synchronous     trainer and engine take turns
    off-policy      every group is trained on two steps after it was started (`async_generation_ratio: 2`)

Runs whose results are known are skipped, so an interrupted benchmark continues; `--minutes` starts no run after that
time, and `--models` keeps the SFT models for the next call. A run that fails is a row, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common import REPOSITORY, RESULTS, machine, write_result

from roll_core.builtin.plugin import roll_advantage_estimators, roll_policy_losses
from roll_pipeline_agentic.plugin import roll_advantage_estimators as turn_estimators


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An example with data, supervised fine-tuning and reinforcement learning."""

    name: str
    about: str
    sft: str
    """`exp_name` of `sft.yaml`, whose model the methods start from."""
    steps: int
    eval_steps: int
    goal: float
    learning_rate: str
    critic_accumulation: int
    """Micro-batches of the critic's optimizer step, so that it trains as often as the policy."""

    @property
    def folder(self) -> Path:
        """Folder of the example."""
        return REPOSITORY / "examples" / self.name


QUICKSTART = Task(
    name="quickstart",
    about="Accuracy on held-out problems",
    sft="quickstart-sft",
    steps=80,
    eval_steps=5,
    goal=0.9,
    learning_rate="1e-3",
    critic_accumulation=2,
)
FROZEN_LAKE = Task(
    name="frozen_lake",
    about="Share of 512 held-out episodes that reach the goal",
    sft="frozen-lake-sft",
    steps=60,
    eval_steps=10,
    goal=0.75,
    learning_rate="5e-4",
    critic_accumulation=1,
)
TASKS = (QUICKSTART, FROZEN_LAKE)
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "off-policy": ("async_generation_ratio=2", "num_gpus_per_node=2", "actor_infer.device_mapping=[1]"),
}
CRITIC = "critic: ..."
"""Stands for `critic_keys` in tables."""
COMPONENTS = (
    "rewards.sorting.function=examples.quickstart.rewards:sorted_in_parts",
    "adv_options.weights={in_order: 1, same_digits: 1}",
)
RECIPES: dict[str, tuple[str, ...]] = {
    "gae": ("whiten_advantages=true", CRITIC),
    "gdpo": COMPONENTS,
    "reinforce": ("norm_mean_type=batch", "norm_std_type=batch"),
    "pass_at_k": ("adv_options.k=4",),
    "dr_grpo": ("adv_estimator=reinforce", "norm_mean_type=group", "loss_agg_mode=seq-mean-token-sum-norm"),
    "dapo": ("pg_clip_high=0.28", "loss_agg_mode=token-mean", "max_len_mask=true"),
}
"""Keys of a method besides `pg_variant` or `adv_estimator`, and recipes that are settings of others."""


def methods(task: Task) -> dict[str, tuple[str, ...]]:
    """Overrides by name of a method: registered policy losses, without aliases, estimators, and recipes."""
    if task is FROZEN_LAKE:
        turns = {each.name: each for each in turn_estimators()}
        found = {name: (f"adv_estimator={name}",) for name in ("grpo", *turns)}
        found["turn_gae"] += RECIPES["gae"]
        return found
    losses = {(each.target, each.config): each.name for each in reversed(list(roll_policy_losses()))}
    found = {name: (f"pg_variant={name}",) for name in reversed(losses.values())}
    for estimator in roll_advantage_estimators():
        found[estimator.name] = (f"adv_estimator={estimator.name}",)
    for name, keys in RECIPES.items():
        found[name] = (*found.get(name, ()), *keys)
    return found


def named(task: Task) -> dict[str, tuple[str, ...]]:
    """Overrides by name of a method in results: tasks but the first are part of the name."""
    prefix = "" if task is QUICKSTART else f"{task.name}/"
    return {f"{prefix}{name}": keys for name, keys in methods(task).items()}


def critic_keys(task: Task) -> tuple[str, ...]:
    """A critic like the policy."""
    return (
        "critic.model_args.dtype=fp32",
        "critic.model_args.disable_gradient_checkpointing=true",
        "critic.training_args.learning_rate=1e-3",
        "critic.training_args.per_device_train_batch_size=128",
        f"critic.training_args.gradient_accumulation_steps={task.critic_accumulation}",
        "critic.strategy_args.strategy_name=hf_train",
        "critic.device_mapping=[0]",
        "critic.infer_batch_size=512",
    )


def run(task: Task, config: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of every step."""
    import roll_core as roll

    with (folder / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        return roll.run(task.folder / config, [f"output_dir={folder}", *overrides], files=False).history


def measured(lines: list[dict[str, float]], goal: float) -> dict[str, Any]:
    """Final accuracy, and the first evaluated step at which it reaches the goal."""
    scores = {line["step"]: line["val/score/mean"] for line in lines if "val/score/mean" in line}
    steps = [step for step, score in scores.items() if score >= goal]
    return {"accuracy": scores[max(scores)], "steps": min(steps, default=None)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Per task, one row per method: its keys, its learning rate, and two columns per mode, at its best rate."""
    cpus = Counter(each["cpu"] for each in found.values() if "cpu" in each)
    lines = ["Processors (runs): " + ", ".join(f"{cpu} ({n})" for cpu, n in cpus.items()) + ".", ""] if cpus else []
    lines += [f"- {mode}: {'`' + ' '.join(keys) + '`' if keys else 'no further keys'}" for mode, keys in MODES.items()]
    for task in TASKS:
        runs = {key: each for key, each in found.items() if key.split(", ")[0] in named(task)}
        if runs:
            lines += ["", *_table_of(task, runs)]
    return "\n".join(lines)


def _table_of(task: Task, found: dict[str, dict[str, Any]]) -> list[str]:
    known = named(task)
    runs: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for key, each in found.items():
        name, mode, rate = key.split(", ")[:3]
        runs.setdefault(name, {}).setdefault(mode, {}).setdefault(rate, []).append(each)
    head = "".join(f" {mode}: score | steps to {task.goal} |" for mode in MODES)
    rates = sorted({rate for modes in runs.values() for each in modes.values() for rate in each}, key=float)
    options = "" if rates == [f"{float(task.learning_rate):g}"] else f" --learning-rates {' '.join(rates)}"
    lines = [
        f"## {task.name}",
        "",
        f"`./run bench algorithms{options}` runs for each seed and method:",
        "",
        f"    roll-core run examples/{task.name}/sft.yaml seed=SEED",
        f"    roll-core run examples/{task.name}/grpo.yaml seed=SEED eval_steps={task.eval_steps} KEYS",
        "",
        f"{task.about} after the last step, mean ± deviation over seeds (their number), and the mean step at which it"
        f" first reaches {task.goal} (seeds that reach it), evaluated every {task.eval_steps} steps.",
        "",
        f"| method | keys | learning rate |{head}",
        f"|---|---|--:|{'--:|' * 2 * len(MODES)}",
    ]
    for name in sorted(known.keys() | runs):
        modes = runs.get(name, {})
        chosen = {mode: max(of_mode.items(), key=lambda item: _mean(item[1])) for mode, of_mode in modes.items()}
        cells = [_cells(chosen[mode][1]) if mode in chosen else "not run | " for mode in MODES]
        own = dict.fromkeys(rate for rate, _ in chosen.values())
        keys = " ".join(known.get(name, ()))
        lines.append(f"| `{name.rpartition('/')[2]}` | `{keys}` | {', '.join(own)} | {' | '.join(cells)} |")
    return lines


def _mean(runs: list[dict[str, Any]]) -> float:
    return statistics.fmean(each.get("accuracy", 0.0) for each in runs)


def _cells(runs: list[dict[str, Any]]) -> str:
    """Accuracy and steps of a method in one mode."""
    accuracy = [each["accuracy"] for each in runs if "accuracy" in each]
    steps = [each["steps"] for each in runs if each.get("steps") is not None]
    failed = f"; {len(runs) - len(accuracy)} failed" if len(accuracy) < len(runs) else ""
    spread = f" ± {statistics.stdev(accuracy):.3f}" if len(accuracy) > 1 else ""
    found = f"{statistics.fmean(accuracy):.3f}{spread} " if accuracy else ""
    reached = f"{statistics.fmean(steps):.0f} ({len(steps)})" if steps else "not reached"
    return f"{found}({len(accuracy)}{failed}) | {reached}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {name: (task, keys) for task in TASKS for name, keys in named(task).items()}
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(known), default=list(known), metavar="METHOD")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--learning-rates", nargs="+", help="by default that of the example")
    parser.add_argument("--steps", type=int, help="by default as many as the example")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--models", type=Path, help="folder that keeps the SFT models")
    parser.add_argument("--results", type=Path, default=RESULTS / "algorithms.json", help="file of earlier runs")
    args = parser.parse_args()
    os.chdir(REPOSITORY)
    for task in {known[name][0] for name in args.only}:
        subprocess.run([sys.executable, str(task.folder / "make_data.py")], check=True)
    found: dict[str, dict[str, Any]] = json.loads(args.results.read_text())["runs"] if args.results.is_file() else {}
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        for seed, name, mode in product(range(1, args.seeds + 1), args.only, args.modes):
            task, keys = known[name]
            steps = args.steps or task.steps
            for rate in args.learning_rates or [task.learning_rate]:
                key = f"{name}, {mode}, {float(rate):g}, seed {seed}, {steps} steps"
                if key in found or time.monotonic() > deadline:
                    continue
                folder = (args.models or Path(temporary)) / str(seed)
                if not (folder / task.sft / "latest" / "export").exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    run(task, "sft.yaml", folder, f"seed={seed}")
                critic = critic_keys(task) if CRITIC in keys else ()
                try:
                    lines = run(
                        task,
                        "grpo.yaml",
                        folder,
                        f"exp_name={name}-{mode}-{rate}".replace("+", "p").replace("/", "-"),
                        f"seed={seed}",
                        f"max_steps={steps}",
                        f"eval_steps={task.eval_steps}",
                        "export_model=false",
                        f"actor_train.training_args.learning_rate={rate}",
                        *MODES[mode],
                        *(each for each in keys if each != CRITIC),
                        *critic,
                    )
                    found[key] = measured(lines, task.goal) | {"cpu": machine()["cpu"]}
                except KeyboardInterrupt:  # SIGTERM too: no result of the method
                    raise
                except Exception as error:
                    found[key] = {"error": f"{type(error).__name__}: {error}"}
                print(key, found[key], flush=True)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                args.results.write_text(json.dumps({"runs": found}, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    if args.results == RESULTS / "algorithms.json":
        write_result("algorithms", {"runs": found}, table(found))


if __name__ == "__main__":
    main()
