"""Write conversations: `data/train.jsonl` and `data/val.jsonl`.

    python recipes/sft/make_data.py

Downloads trl-lib/Capybara from the hub. Needs `pip install pyarrow`.
"""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = "trl-lib/Capybara"


def main(folder: Path) -> None:
    """Write both files."""
    import pyarrow.parquet
    from huggingface_hub import hf_hub_download

    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train"), ("test", "val")):
        file = hf_hub_download(SOURCE, f"data/{split}-00000-of-00001.parquet", repo_type="dataset")
        chats = pyarrow.parquet.read_table(file).column("messages").to_pylist()
        text = "".join(json.dumps({"messages": each}) + "\n" for each in chats)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent / "data")
