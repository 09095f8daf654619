"""Clock and settings that the TRL trainers of the benchmarks share."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


class Clock(TrainerCallback):
    """CPU and wall seconds at the beginning of each step and at the end."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.marks.append((time.process_time(), time.perf_counter()))

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        self.marks.append((time.process_time(), time.perf_counter()))

    def seconds(self) -> dict[str, list[float]]:
        """CPU and wall seconds of each step."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        return {"cpu_s": [b[0] - a[0] for a, b in pairs], "wall_s": [b[1] - a[1] for a, b in pairs]}


def sums(number: int) -> list[dict[str, str]]:
    """Rows with sums as prompts, those of `grpo_step`."""
    return [{"prompt": f"{i % 100:02d}+{(7 * i) % 100:02d}=" * 2} for i in range(number)]
