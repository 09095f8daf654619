"""Every policy loss and advantage estimator on the quick start's task: final accuracy, and steps to 0.9.

    ./run bench algorithms [--seeds 3] [--only gspo rloo] [--modes synchronous] [--learning-rates 1e-3 3e-4]

Each method has its published defaults and starts from the same SFT model of its seed. Policy losses use `grpo`'s
advantages, and estimators the `ppo` loss; a batch has two optimizer steps. Nothing but the learning rate differs
between methods: of several rates, the table has the one with the best accuracy over seeds.

    synchronous     trainer and engine take turns
    off-policy      generation runs two steps ahead of training (`async_generation_ratio: 2`)

Runs whose results are known are skipped, so an interrupted benchmark continues. A run that fails is a row, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from common import REPOSITORY, RESULTS, write_result

from roll_core.builtin.plugin import roll_advantage_estimators, roll_policy_losses

QUICKSTART = REPOSITORY / "examples" / "quickstart"
EVAL_STEPS, GOAL = 5, 0.9
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "off-policy": (
        "async_generation_ratio=2",
        "executor=ray",
        "num_gpus_per_node=2",
        "actor_infer.device_mapping=[1]",
    ),
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


def run(config: str, folder: Path, *overrides: str) -> str:
    """`roll-core run` in a process of its own. Returns its error, or nothing."""
    command = [sys.executable, "-m", "roll_core", "run", f"examples/quickstart/{config}", f"output_dir={folder}"]
    done = subprocess.run([*command, *overrides], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
    return (errors or [f"exit code {done.returncode}"])[-1].strip() if done.returncode else ""


def measured(run_dir: Path) -> dict[str, Any]:
    """Final accuracy, and the first evaluated step at which it reaches the goal."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    scores = {line["step"]: line["val/score/mean"] for line in lines if "val/score/mean" in line}
    steps = [step for step, score in scores.items() if score >= GOAL]
    return {"accuracy": scores[max(scores)], "steps": min(steps, default=None)}


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row per method, one pair of columns per mode, at each one's best learning rate."""
    rows: dict[str, dict[str, list[str]]] = {}
    for name, mode in sorted({tuple(key.split(", ")[:2]) for key in found}):
        by_rate: dict[str, list[dict[str, Any]]] = {}
        for key, each in found.items():
            if key.startswith(f"{name}, {mode}, "):
                by_rate.setdefault(key.split(", ")[2], []).append(each)
        rate, runs = max(
            by_rate.items(), key=lambda item: statistics.fmean(each.get("accuracy", 0.0) for each in item[1])
        )
        done = [each for each in runs if "accuracy" in each]
        accuracy = [each["accuracy"] for each in done]
        steps = [each["steps"] for each in done if each["steps"] is not None]
        failed = "" if len(done) == len(runs) else f"; {len(runs) - len(done)} of {len(runs)} failed"
        spread = f" ± {statistics.stdev(accuracy):.3f}" if len(accuracy) > 1 else ""
        reached = f"{statistics.fmean(steps):.0f} ({len(steps)} of {len(runs)})" if steps else "not reached"
        cells = [f"{statistics.fmean(accuracy):.3f}{spread} ({rate}){failed}" if done else "failed", reached]
        rows.setdefault(name, {})[mode] = cells
    lines = [
        f"Quick start's task: accuracy after the last step (learning rate), and mean steps to {GOAL}, evaluated every"
        f" {EVAL_STEPS} steps, over the seeds that reach it.\n",
        f"| method | {' | '.join(f'{mode}: accuracy | steps to {GOAL}' for mode in MODES)} |",
        f"|---|{'--:|' * 2 * len(MODES)}",
    ]
    for name, of_modes in rows.items():
        cells = [cell for mode in MODES for cell in of_modes.get(mode, ["not run", ""])]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = methods()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=sorted(known), default=list(known), metavar="METHOD")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--learning-rates", nargs="+", default=["1e-3"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--results", type=Path, default=RESULTS / "algorithms.json", help="file of earlier runs")
    args = parser.parse_args()
    sys.path.append(str(QUICKSTART))
    import make_data

    make_data.main(QUICKSTART / "data")
    found: dict[str, dict[str, Any]] = json.loads(args.results.read_text())["runs"] if args.results.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(1, args.seeds + 1):
            folder = Path(temporary) / str(seed)
            for name, mode, rate in product(args.only, args.modes, args.learning_rates):
                key = f"{name}, {mode}, {float(rate):g}, seed {seed}, {args.steps} steps"
                if key in found:
                    continue
                if not folder.exists() and (error := run("sft.yaml", folder, f"seed={seed}")):
                    sys.exit(f"SFT of seed {seed} failed: {error}")
                exp_name = f"{name}-{mode}-{rate}".replace("+", "p")
                error = run(
                    "grpo.yaml",
                    folder,
                    f"exp_name={exp_name}",
                    f"seed={seed}",
                    f"max_steps={args.steps}",
                    f"eval_steps={EVAL_STEPS}",
                    "export_model=false",
                    f"actor_train.training_args.learning_rate={rate}",
                    *MODES[mode],
                    *known[name],
                )
                found[key] = {"error": error} if error else measured(folder / exp_name / "latest")
                print(key, found[key], flush=True)
                args.results.parent.mkdir(parents=True, exist_ok=True)
                args.results.write_text(json.dumps({"runs": found}, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    if args.results == RESULTS / "algorithms.json":
        write_result("algorithms", {"runs": found}, table(found))


if __name__ == "__main__":
    main()
