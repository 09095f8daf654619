"""TRL's SFTTrainer on the work of benchmarks/sft_step.py; runs in TRL's own environment and prints one JSON line.

python trl_sft.py MODEL_DIRECTORY ROWS.json SEQUENCES_PER_STEP STEPS THREADS
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
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train, and print what a step took."""
    directory, rows_file = sys.argv[1:3]
    sequences, steps, threads = map(int, sys.argv[3:6])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = json.loads(Path(rows_file).read_text(encoding="utf-8"))
    rows = Dataset.from_list([{"input_ids": each} for each in tokens * steps])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=sequences,
            max_length=max(len(each) for each in tokens),
            max_steps=steps,
            learning_rate=1e-4,
            **SETTINGS,
        )
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[clock]
        )
        trainer.train()
    print(json.dumps(clock.seconds()))


if __name__ == "__main__":
    main()
