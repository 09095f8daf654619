"""`./run demo`: make the quick start's data, train by SFT and then by GRPO, and print the accuracy after each.

    python examples/quickstart/demo.py [key=value ...]

The same with single commands:

    python examples/quickstart/make_data.py
    roll-core run examples/quickstart/sft.yaml examples/quickstart/grpo.yaml
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import make_data

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
NEXT = f"""
Next, in {REPOSITORY}:
    source .venv/bin/activate
    roll-core run examples/quickstart/grpo.yaml max_steps=40 exp_name=mine
    roll-core --help"""


def accuracies(run: Path) -> list[float]:
    """`val/score/mean` of each evaluation of a run, in order."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        found = [json.loads(line).get("val/score/mean") for line in lines]
    return [score for score in found if score is not None]


def main(overrides: list[str]) -> int:
    """Both runs; the exit code of the first that fails."""
    make_data.main(HERE / "data")
    configs = [str((HERE / name).relative_to(REPOSITORY)) for name in ("sft.yaml", "grpo.yaml")]
    code = roll_core("run", *configs, *overrides)
    if code:
        return code
    print()
    given = [each.removeprefix("output_dir=") for each in overrides if each.startswith("output_dir=")]
    output = REPOSITORY / (given[-1] if given else "output")
    for name, run_dir in (("SFT", "quickstart-sft"), ("GRPO", "quickstart-grpo")):
        scores = accuracies(output / run_dir / "latest")
        print(f"held-out accuracy after {name + ':':6} {scores[-1]:.3f}   (before: {scores[0]:.3f})")
    print(NEXT)
    return 0


def roll_core(*arguments: str) -> int:
    """Run `roll-core` to its end and return its exit code, also if the user or a scheduler stops it."""
    # A terminal sends Ctrl-C to both processes: this one waits until the run is closed and its report is written.
    signal.signal(signal.SIGINT, lambda *_: None)
    # `python -m` puts the repository on the path, where the reward's module is.
    run = subprocess.Popen([sys.executable, "-m", "roll_core", *arguments], cwd=REPOSITORY)
    signal.signal(signal.SIGTERM, lambda *_: run.terminate())
    code = run.wait()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
