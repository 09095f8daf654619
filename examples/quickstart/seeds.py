"""Run the quick start for several seeds and print a table of what came out.

python examples/quickstart/seeds.py [NUMBER_OF_SEEDS]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import make_data
from demo import HERE, REPOSITORY, accuracies


def main(count: int) -> None:
    """One row per seed, as Markdown."""
    make_data.main(HERE / "data")
    print("| seed | after SFT | after GRPO | seconds, both |")
    print("|---|---|---|---|")
    for seed in range(1, count + 1):
        with tempfile.TemporaryDirectory() as output:
            begun = time.perf_counter()
            for config in ("sft.yaml", "grpo.yaml"):
                pretrain = [f"pretrain={output}/quickstart-sft/latest/export"] if config == "grpo.yaml" else []
                path = str((HERE / config).relative_to(REPOSITORY))
                arguments = ["run", path, f"seed={seed}", f"output_dir={output}", *pretrain]
                subprocess.run(
                    [sys.executable, "-m", "roll_core", *arguments],
                    cwd=REPOSITORY,
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
            seconds = time.perf_counter() - begun
            sft, grpo = (accuracies(Path(output) / f"quickstart-{name}" / "latest")[-1] for name in ("sft", "grpo"))
            print(f"| {seed} | {sft:.3f} | {grpo:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
