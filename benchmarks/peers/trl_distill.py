"""TRL's DistillationTrainer on the work of benchmarks/distill_step.py; runs in TRL's own environment, prints JSON.

python trl_distill.py STUDENT_DIRECTORY TEACHER_DIRECTORY STEPS PROMPTS NEW_TOKENS
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from datasets import Dataset
from steps import SETTINGS, Clock, sums
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer


def main() -> None:
    """Train, and print what a step took."""
    student, teacher, steps, prompts, new_tokens = *sys.argv[1:3], *map(int, sys.argv[3:6])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(student)
    rows = Dataset.from_list(sums(prompts * steps))
    lengths: list[int] = []

    class Counted(DistillationTrainer):
        """Notes the lengths of the responses."""

        def _generate_and_score_completions(self, inputs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = super()._generate_and_score_completions(inputs)
            lengths.extend(found["completion_mask"].sum(dim=1).tolist())
            return found

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = DistillationConfig(
            output_dir=folder,
            per_device_train_batch_size=prompts,
            max_completion_length=new_tokens,
            max_steps=steps,
            learning_rate=1e-7,
            beta=1.0,
            temperature=1.0,
            **SETTINGS,
        )
        trainer = Counted(
            model=AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32),
            teacher_model=AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32),
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    counts = {"mean_length": sum(lengths) / len(lengths), "samples": len(lengths)}
    print(json.dumps({**clock.seconds(), **counts}))


if __name__ == "__main__":
    main()
