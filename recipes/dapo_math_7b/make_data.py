"""Write competition problems with their answers: `data/train.jsonl` and AIME 2024 as `data/val.jsonl`.

    python recipes/dapo_math_7b/make_data.py

Downloads BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024 from the hub. Needs `pip install pyarrow`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCES = {
    "train": ("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet"),
    "val": ("BytedTsinghua-SIA/AIME-2024", "data/aime-2024.parquet"),
}


def rows(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chats with the answer. The data sets repeat each problem, so repeated ones are dropped."""
    found = {json.dumps(each["prompt"]): each for each in raw}.values()
    return [{"messages": each["prompt"], "ground_truth": each["reward_model"]["ground_truth"]} for each in found]


def main(folder: Path) -> None:
    """Write both files."""
    import pyarrow.parquet
    from huggingface_hub import hf_hub_download

    folder.mkdir(exist_ok=True)
    for name, (source, file) in SOURCES.items():
        table = pyarrow.parquet.read_table(hf_hub_download(source, file, repo_type="dataset"))
        text = "".join(json.dumps(each) + "\n" for each in rows(table.select(["prompt", "reward_model"]).to_pylist()))
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent / "data")
