"""Blocks of code and lists of names on the pages of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
RLVR_CONFIG = """\
pipeline: rlvr
pretrain: Qwen/Qwen3-0.6B
rollout_batch_size: 64
num_return_sequences_in_group: 8
max_steps: 1
actor_train:
  training_args: {per_device_train_batch_size: 1}
  data_args: {file_name: prompts.jsonl}
  strategy_args: {strategy_name: hf_train}
  device_mapping: [0]
actor_infer:
  strategy_args: {strategy_name: hf_infer}
  device_mapping: [0]
rewards:
  math: {reward: math_rule}
"""
"""A config that a part of one is merged into, and overrides are checked against."""


def code_of(page: str, language: str) -> list[str]:
    """The blocks of a page in a language, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def undocumented(metrics: Iterable[str]) -> list[str]:
    """Metrics of a run that docs/metrics.md does not list. `<name>` on the page stands for one or more words."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    listed = [
        re.compile(re.sub(r"<\w+>", ".+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">")))
        for name in re.findall(r"`([a-z_][\w<>/]*)`", text)
    ]

    def is_listed(metric: str) -> bool:
        name = metric.removeprefix("val/")
        short = name.partition("/")[2] if name.startswith(("actor/", "critic/", "train/")) else name
        return any(pattern.fullmatch(each) for pattern in listed for each in (metric, name, short))

    return sorted(metric for metric in metrics if not is_listed(metric))
