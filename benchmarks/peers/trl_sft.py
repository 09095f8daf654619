"""TRL's SFTTrainer on the work of benchmarks/sft_step.py; runs in TRL's own environment and prints one JSON line.

python trl_sft.py MODEL_DIRECTORY ROWS.json SEQUENCES_PER_STEP STEPS THREADS
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """CPU and wall seconds at the beginning of each step and at the end."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.marks.append((time.process_time(), time.perf_counter()))

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self.marks.append((time.process_time(), time.perf_counter()))


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
            gradient_accumulation_steps=1,
            max_length=max(len(each) for each in tokens),
            max_steps=steps,
            learning_rate=1e-4,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[clock]
        )
        trainer.train()
    pairs = list(zip(clock.marks, clock.marks[1:], strict=False))
    print(json.dumps({"cpu_s": [b[0] - a[0] for a, b in pairs], "wall_s": [b[1] - a[1] for a, b in pairs]}))


if __name__ == "__main__":
    main()
