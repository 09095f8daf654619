"""Pretrain a small flow model on drawn shapes, improve it by three algorithms, and print the rewards.

    python examples/diffusion/demo.py [key=value ...]

The same with single commands:

    python examples/diffusion/make_data.py
    roll-core run examples/diffusion/pretrain.yaml examples/diffusion/refl.yaml
    roll-core run examples/diffusion/flow_grpo.yaml examples/diffusion/nft.yaml
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import make_data

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
ALGORITHMS = ("refl", "flow_grpo", "nft")


def scores(run: Path) -> list[dict[str, float]]:
    """Metrics of each evaluation of a run, in order."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        return [found for found in map(json.loads, lines) if "val/score/mean" in found]


def main(overrides: list[str]) -> int:
    """All four runs; the exit code of the first that fails."""
    make_data.main(HERE / "data")
    given = [each.removeprefix("output_dir=") for each in overrides if each.startswith("output_dir=")]
    output = REPOSITORY / (given[-1] if given else "output")
    export = output / "diffusion-pretrain" / "latest" / "export"
    for name in ("pretrain", *ALGORITHMS):
        source = [] if name == "pretrain" else [f"pretrain={export}"]
        # `python -m` puts the repository on the path, where the rewards' module is.
        command = [sys.executable, "-m", "roll_core", "run", f"examples/diffusion/{name}.yaml", *source, *overrides]
        code = subprocess.run(command, cwd=REPOSITORY).returncode
        if code:
            return code
    print(f"\n{'':12}reward   label   distance to a drawing")
    for name in ("pretrain", *ALGORITHMS):
        last = scores(output / f"diffusion-{name.replace('_', '-')}" / "latest")[-1]
        reward, label, drawn = (last[f"val/score/{key}mean"] for key in ("", "label/", "drawn/"))
        print(f"{name:12}{reward:6.3f}  {label:6.3f}  {-drawn:6.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
