"""TRL's DPOTrainer on the work of benchmarks/dpo_step.py; runs in TRL's own environment and prints one JSON line.

python trl_dpo.py MODEL_DIRECTORY PAIRS.jsonl STEPS THREADS
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from steps import SETTINGS, Clock
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer


def main() -> None:
    """Train for one epoch per step, and print what a step took."""
    directory, file = sys.argv[1:3]
    steps, threads = map(int, sys.argv[3:5])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=len(rows),
            max_length=None,
            num_train_epochs=steps,
            learning_rate=1e-6,
            beta=0.1,
            **SETTINGS,
        )
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            ref_model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(directory),
            callbacks=[clock],
        )
        trainer.train()
        data = trainer.train_dataset
    tokens = sum(2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in data)
    print(json.dumps({"tokens": tokens, **clock.seconds()}))


if __name__ == "__main__":
    main()
