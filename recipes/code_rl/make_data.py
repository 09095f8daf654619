"""Write programming problems with tests: `data/train.jsonl`, 374 rows, and `data/val.jsonl`, 90 rows.

    python recipes/code_rl/make_data.py

Downloads google-research-datasets/mbpp from the hub. Needs `pip install pyarrow`.
"""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = "google-research-datasets/mbpp"


def row(text: str, test_list: list[str]) -> dict[str, object]:
    """A chat that shows the first test, and all tests as `test_cases`."""
    content = f"{text}\nYour program must pass this test:\n{test_list[0]}\nReply with one block of Python."
    return {"messages": [{"role": "user", "content": content}], "test_cases": test_list}


def main(folder: Path) -> None:
    """Write both files."""
    import pyarrow.parquet
    from huggingface_hub import hf_hub_download

    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train"), ("validation", "val")):
        file = hf_hub_download(SOURCE, f"full/{split}-00000-of-00001.parquet", repo_type="dataset")
        raw = pyarrow.parquet.read_table(file, columns=["text", "test_list"]).to_pylist()
        written = "".join(json.dumps(row(**each)) + "\n" for each in raw)
        (folder / f"{name}.jsonl").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent / "data")
