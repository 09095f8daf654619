"""Make pairs from the quick start's problems: the digits in order, and the teacher's usual mistake.

    python examples/preference/make_data.py [DIRECTORY]

The chosen response is right. The rejected one has the last two digits swapped, or all reversed if these are equal.

    train.jsonl   pairs for the problems of the quick start's train.jsonl
    val.jsonl     pairs for its val.jsonl, which are in no other file
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"


def wrong(right: str) -> str:
    """The teacher's mistake; the same text only if all digits are equal."""
    swapped = right[:-2] + right[-1] + right[-2]
    return swapped if swapped != right else right[::-1]


def main(directory: Path, problems: Path) -> None:
    """Write both files, and the quick start's to the directory `problems`."""
    sys.path.insert(0, str(QUICKSTART))
    import make_data as quickstart

    quickstart.main(problems)
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (problems / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        pairs = [row | {"chosen": row["ground_truth"], "rejected": wrong(row["ground_truth"])} for row in rows]
        quickstart.write(directory / f"{name}.jsonl", [pair for pair in pairs if pair["chosen"] != pair["rejected"]])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), Path(sys.argv[1]) / "quickstart")
    else:
        main(HERE / "data", QUICKSTART / "data")
