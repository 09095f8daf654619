"""`./run demo`: make the quick start's data, train by SFT, go on by GRPO, and say how good the model was after each.

    python examples/quickstart/demo.py [key=value ...]

The same by hand:

    python examples/quickstart/make_data.py
    roll-core run examples/quickstart/sft.yaml examples/quickstart/grpo.yaml
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def accuracies(run: Path) -> list[float]:
    """`val/score/mean` of each evaluation of a run, in order."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        found = [json.loads(line).get("val/score/mean") for line in lines]
    return [score for score in found if score is not None]


def main(overrides: list[str]) -> int:
    """Both runs; the exit code of the first that fails."""
    subprocess.run([sys.executable, str(HERE / "make_data.py")], cwd=REPOSITORY, check=True)
    configs = [str((HERE / name).relative_to(REPOSITORY)) for name in ("sft.yaml", "grpo.yaml")]
    # `python -m` puts the repository on the path, where the reward's module is.
    run = subprocess.run([sys.executable, "-m", "roll_core", "run", *configs, *overrides], cwd=REPOSITORY, check=False)
    if run.returncode:
        return run.returncode
    print()
    for name, run_dir in (("SFT", "quickstart-sft"), ("GRPO", "quickstart-grpo")):
        scores = accuracies(REPOSITORY / "output" / run_dir / "latest")
        print(f"held-out accuracy after {name + ':':6} {scores[-1]:.3f}   (before: {scores[0]:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
