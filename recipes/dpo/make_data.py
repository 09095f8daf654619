"""Write pairs of responses: `data/train.jsonl` and `data/val.jsonl`.

    python recipes/dpo/make_data.py

Downloads trl-lib/ultrafeedback_binarized from the hub. Needs `pip install pyarrow`.
"""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = "trl-lib/ultrafeedback_binarized"


def main(folder: Path) -> None:
    """Write both files. Chosen and rejected are chats that begin with the same prompt. Equal ones are dropped."""
    import pyarrow.parquet
    from huggingface_hub import hf_hub_download

    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train"), ("test", "val")):
        file = hf_hub_download(SOURCE, f"data/{split}-00000-of-00001.parquet", repo_type="dataset")
        pairs = pyarrow.parquet.read_table(file, columns=["chosen", "rejected"]).to_pylist()
        text = "".join(json.dumps(each) + "\n" for each in pairs if each["chosen"] != each["rejected"])
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent / "data")
