"""Write GSM8K's problems with their final answers: `data/train.jsonl`, 7,473 rows, and `data/val.jsonl`, 1,319 rows.

    python recipes/gsm8k/make_data.py

Downloads openai/gsm8k from the hub (about 3 MB). Needs `pip install pyarrow`.
"""

from __future__ import annotations

import json
from pathlib import Path

INSTRUCTION = "Think step by step. Write the final answer in \\boxed{}."


def row(question: str, answer: str) -> dict[str, object]:
    """A chat, and the number after `####`."""
    messages = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}]
    return {"messages": messages, "ground_truth": answer.rpartition("####")[2].strip().replace(",", "")}


def main(folder: Path) -> None:
    """Write both files."""
    import pyarrow.parquet
    from huggingface_hub import hf_hub_download

    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train"), ("test", "val")):
        file = hf_hub_download("openai/gsm8k", f"main/{split}-00000-of-00001.parquet", repo_type="dataset")
        rows = [row(**each) for each in pyarrow.parquet.read_table(file).to_pylist()]
        text = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent / "data")
