"""`examples/moe` with and without router replay: accuracy, and the distance of the trainer's logprobs to the engine's.

    ./run bench router_replay [--engines hf_infer vllm] [--seeds 1 2 3] [--steps 40] [--results FILE]

Each seed trains one model by SFT, from which all its GRPO runs start. Runs whose results are known are skipped. A run
that was stopped has the steps that it did, and no accuracy at the end.

    fp32            the engine computes in fp32, like the trainer, with replay
    bf16, R3        the engine computes in bf16, with replay: the example as it is
    bf16, disable   the same without replay
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
from pathlib import Path
from typing import Any

from common import REPOSITORY, RESULTS, machine, write_result

VARIANTS: dict[str, tuple[str, ...]] = {
    "fp32": ("actor_infer.model_args.dtype=fp32",),
    "bf16, R3": (),
    "bf16, disable": ("router_replay.mode=disable", "guards.logprob_probe=off"),
}
"""Overrides by name. The example has an engine in bf16 and router replay, without which its logprob probe may fail."""
GAP = "actor/logprob_gap"
DISAGREEMENT = "actor/routing_disagreement"


def run(config: str, folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of every step, evaluations included."""
    import roll_core as roll

    with (folder / "log.txt").open("a", encoding="utf-8") as log, contextlib.redirect_stdout(log):
        return roll.run(REPOSITORY / "examples/moe" / config, [f"output_dir={folder}", *overrides], files=False).history


def measured(lines: list[dict[str, float]]) -> dict[str, Any]:
    """Number of steps, accuracy before and after a run, and the means of its metrics."""
    scores = {line["step"]: line["val/score/mean"] for line in lines if "val/score/mean" in line}
    steps = max(line["step"] for line in lines)
    found = {"steps": steps, "before": scores[min(scores)], "after": scores.get(steps)}
    found["logprob_gaps"] = [line[GAP] for line in lines if GAP in line]
    values = [line[DISAGREEMENT] for line in lines if DISAGREEMENT in line]
    return found | ({"routing_disagreement": statistics.fmean(values)} if values else {})


def table(runs: dict[str, dict[str, Any]]) -> str:
    """One row per engine and variant, and one per run."""
    lines = [
        "Accuracy on 500 held-out prompts, mean ± deviation over seeds (their number, if not all finished); the other"
        " columns are means over steps and seeds. `logprob_gap`: mean distance of the trainer's logprobs to the"
        " engine's on the tokens of rollouts, before an update, in nats; over the steps that all runs of a seed did."
        " `routing_disagreement`: share of the engine's experts that the trainer's routers would not have chosen.",
        "",
        "| engine | replay | seeds | after SFT | after GRPO | logprob_gap | routing_disagreement |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for engine in dict.fromkeys(key.split(", ")[0] for key in runs):
        for variant in VARIANTS:
            found = [each for key, each in runs.items() if key.startswith(f"{engine}, {variant}, seed ")]
            if found:
                dtype, _, mode = variant.partition(", ")
                gap = statistics.fmean(_gap(key, runs) for key in runs if key.startswith(f"{engine}, {variant}, seed "))
                cells = [_spread(found, "before"), _spread(found, "after"), f"{gap:.2g}"]
                cells.append(_mean(found, "routing_disagreement"))
                lines.append(f"| `{engine}`, {dtype} | {mode or 'R3'} | {len(found)} | {' | '.join(cells)} |")
    lines += ["", "| run | steps | after SFT | after GRPO | logprob_gap |", "|---|--:|--:|--:|--:|"]
    for key, each in sorted(runs.items()):
        after = "" if each["after"] is None else f"{each['after']:.3f}"
        lines.append(f"| {key} | {each['steps']} | {each['before']:.3f} | {after} | {_gap(key, runs):.2g} |")
    return "\n".join(lines)


def _gap(key: str, runs: dict[str, dict[str, Any]]) -> float:
    """Mean distance over the steps that all runs with the engine and seed of this one did."""
    engine, seed = key.split(", ")[0], key.split(", ")[-1]
    same = [each["logprob_gaps"] for name, each in runs.items() if name.startswith(engine) and name.endswith(seed)]
    return statistics.fmean(runs[key]["logprob_gaps"][: min(map(len, same))])


def _spread(runs: list[dict[str, Any]], name: str) -> str:
    values = [each[name] for each in runs if each[name] is not None]
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}" + (f" ({len(values)})" if len(values) < len(runs) else "")


def _mean(runs: list[dict[str, Any]], name: str) -> str:
    values = [each[name] for each in runs if name in each]
    return f"{statistics.fmean(values):.2g}" if values else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["hf_infer"], metavar="ENGINE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--models", type=Path, help="folder that keeps the SFT models")
    parser.add_argument("--results", type=Path, default=RESULTS / "router_replay.json", help="file of earlier runs")
    args = parser.parse_args()
    os.chdir(REPOSITORY)
    subprocess.run([sys.executable, "examples/quickstart/make_data.py"], check=True)
    runs: dict[str, dict[str, Any]] = json.loads(args.results.read_text())["runs"] if args.results.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in args.seeds:
            folder = (args.models or Path(temporary)) / str(seed)
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "moe-sft" / "latest" / "export").exists():
                run("sft.yaml", folder, f"seed={seed}", "eval_steps=0")
            for engine in args.engines:
                for variant in args.variants:
                    key = f"{engine}, {variant}, seed {seed}"
                    if runs.get(key, {}).get("steps") == args.steps:
                        continue
                    lines = run(
                        "grpo.yaml",
                        folder,
                        f"exp_name={key.replace(', ', '-').replace(' ', '-')}",
                        f"seed={seed}",
                        f"max_steps={args.steps}",
                        f"eval_steps={args.steps}",
                        "export_model=false",
                        f"actor_infer.strategy_args.strategy_name={engine}",
                        *VARIANTS[variant],
                    )
                    runs[key] = measured(lines) | {"cpu": machine()["cpu"]}
                    print(key, runs[key], flush=True)
                    args.results.parent.mkdir(parents=True, exist_ok=True)
                    args.results.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(table(runs))
    if args.results == RESULTS / "router_replay.json":
        write_result("router_replay", {"runs": runs}, table(runs))


if __name__ == "__main__":
    main()
