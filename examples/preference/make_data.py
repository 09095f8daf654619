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


def main(directory: Path) -> None:
    """Write both files."""
    sys.path.insert(0, str(QUICKSTART))
    import make_data as quickstart

    quickstart.main(QUICKSTART / "data")
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        lines = (QUICKSTART / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        pairs = [row | {"chosen": row["ground_truth"], "rejected": wrong(row["ground_truth"])} for row in rows]
        quickstart.write(directory / f"{name}.jsonl", [pair for pair in pairs if pair["chosen"] != pair["rejected"]])


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "data")
