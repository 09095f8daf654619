"""Every policy loss and advantage estimator on the quick start's task: final accuracy, and steps to 0.9.

    ./run bench algorithms [--seeds 3] [--only gspo rloo] [--modes synchronous] [--learning-rates 1e-3 3e-4]
                           [--minutes 10] [--models FOLDER]

Each method has its published defaults and starts from the same SFT model of its seed. Policy losses use `grpo`'s
advantages, and estimators the `ppo` loss; a batch has two optimizer steps. Nothing but the learning rate differs
between methods: of several rates, the table has the one with the best accuracy over seeds.

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
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from common import REPOSITORY, RESULTS, machine, write_result

from roll_core.builtin.plugin import roll_advantage_estimators, roll_policy_losses

QUICKSTART = REPOSITORY / "examples" / "quickstart"
EVAL_STEPS, GOAL = 5, 0.9
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "off-policy": ("async_generation_ratio=2", "num_gpus_per_node=2", "actor_infer.device_mapping=[1]"),
}
CRITIC = (
    "critic.model_args.dtype=fp32",
    "critic.model_args.disable_gradient_checkpointing=true",
    "critic.training_args.learning_rate=1e-3",
    "critic.training_args.per_device_train_batch_size=128",
    "critic.training_args.gradient_accumulation_steps=2",
    "critic.strategy_args.strategy_name=hf_train",
    "critic.device_mapping=[0]",
    "critic.infer_batch_size=512",
)
RECIPES: dict[str, tuple[str, ...]] = {
    "gae": (*CRITIC, "whiten_advantages=true"),
    "reinforce": ("norm_mean_type=batch", "norm_std_type=batch"),
    "pass_at_k": ("adv_options.k=4",),
    "dr_grpo": ("adv_estimator=reinforce", "norm_mean_type=group", "loss_agg_mode=seq-mean-token-sum-norm"),
    "dapo": ("use_pg_clip_range=true", "pg_clip_high=0.28", "loss_agg_mode=token-mean", "max_len_mask=true"),
}
"""Keys of a method besides `pg_variant` or `adv_estimator`, and recipes that are settings of others."""
OTHER_TASKS = {"gdpo"}
"""Estimators that need a reward of several components."""


def methods() -> dict[str, tuple[str, ...]]:
    """Overrides by name of a method: registered policy losses, without aliases, estimators, and recipes."""
    losses = {(each.target, each.config): each.name for each in reversed(list(roll_policy_losses()))}
    found = {name: (f"pg_variant={name}",) for name in reversed(losses.values())}
    for estimator in roll_advantage_estimators():
        if not estimator.needs_turns and estimator.name not in OTHER_TASKS:
            found[estimator.name] = (f"adv_estimator={estimator.name}",)
    for name, keys in RECIPES.items():
        found[name] = (*found.get(name, ()), *keys)
    return found


def run(config: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of every step."""
    import roll_core as roll

    with (folder / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        return roll.run(QUICKSTART / config, [f"output_dir={folder}", *overrides], files=False).history


def measured(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Final accuracy, and the first evaluated step at which it reaches the goal."""
    scores = {line["step"]: line["val/score/mean"] for line in lines if "val/score/mean" in line}
    steps = [step for step, score in scores.items() if score >= GOAL]
    return {"accuracy": scores[max(scores)], "steps": min(steps, default=None)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row per method: its keys, its learning rate, and two columns per mode, at the best learning rate there."""
    known = methods()
    runs: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for key, each in found.items():
        name, mode, rate = key.split(", ")[:3]
        runs.setdefault(name, {}).setdefault(mode, {}).setdefault(rate, []).append(each)
    head = "".join(f" {mode}: accuracy | steps to {GOAL} |" for mode in MODES)
    cpus = Counter(each["cpu"] for each in found.values() if "cpu" in each)
    rates = sorted({rate for modes in runs.values() for each in modes.values() for rate in each}, key=float)
    lines = [
        f"`./run bench algorithms --learning-rates {' '.join(rates)}`, which runs for each seed and method:",
        "",
        "    roll-core run examples/quickstart/sft.yaml seed=SEED",
        f"    roll-core run examples/quickstart/grpo.yaml seed=SEED eval_steps={EVAL_STEPS} KEYS",
        "",
        *(f"- {mode}: {'`' + ' '.join(keys) + '`' if keys else 'no further keys'}" for mode, keys in MODES.items()),
        "",
        *(["Processors (runs): " + ", ".join(f"{cpu} ({n})" for cpu, n in cpus.items()) + ".", ""] if cpus else []),
        f"Accuracy on held-out problems after the last step, mean ± deviation over seeds (their number), and the mean"
        f" step at which it first reaches {GOAL} (seeds that reach it), evaluated every {EVAL_STEPS} steps.",
        "",
        f"| method | keys | learning rate |{head}",
        f"|---|---|--:|{'--:|' * 2 * len(MODES)}",
    ]
    for name in sorted(known.keys() | runs):
        modes = runs.get(name, {})
        chosen = {mode: max(of_mode.items(), key=lambda item: _mean(item[1])) for mode, of_mode in modes.items()}
        cells = [_cells(chosen[mode][1]) if mode in chosen else "not run | " for mode in MODES]
        own = dict.fromkeys(rate for rate, _ in chosen.values())
        keys = [key for key in known.get(name, ()) if key not in CRITIC] + ["critic: ..."] * (name == "gae")
        lines.append(f"| `{name}` | `{' '.join(keys)}` | {', '.join(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    known = methods()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(known), default=list(known), metavar="METHOD")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--learning-rates", nargs="+", default=["1e-3"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--models", type=Path, help="folder that keeps the SFT models")
    parser.add_argument("--results", type=Path, default=RESULTS / "algorithms.json", help="file of earlier runs")
    args = parser.parse_args()
    os.chdir(REPOSITORY)
    sys.path.append(str(QUICKSTART))
    import make_data

    make_data.main(QUICKSTART / "data")
    found: dict[str, dict[str, Any]] = json.loads(args.results.read_text())["runs"] if args.results.is_file() else {}
    deadline = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as temporary:
        for seed, name, mode, rate in product(range(1, args.seeds + 1), args.only, args.modes, args.learning_rates):
            key = f"{name}, {mode}, {float(rate):g}, seed {seed}, {args.steps} steps"
            if key in found or time.monotonic() > deadline:
                continue
            folder = (args.models or Path(temporary)) / str(seed)
            if not (folder / "quickstart-sft" / "latest" / "export").exists():
                folder.mkdir(parents=True, exist_ok=True)
                run("sft.yaml", folder, f"seed={seed}")
            try:
                lines = run(
                    "grpo.yaml",
                    folder,
                    f"exp_name={name}-{mode}-{rate}".replace("+", "p"),
                    f"seed={seed}",
                    f"max_steps={args.steps}",
                    f"eval_steps={EVAL_STEPS}",
                    "export_model=false",
                    f"actor_train.training_args.learning_rate={rate}",
                    *MODES[mode],
                    *known[name],
                )
                found[key] = measured(lines) | {"cpu": machine()["cpu"]}
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
