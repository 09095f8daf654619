"""Which rows an optimizer step of SFT learns."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np

from roll_core.pipelines.config import SFTConfig
from roll_core.pipelines.sft import SFTPipeline
from roll_core.spec.pipeline import UpdateResult
from roll_core.types import TrainSequence


def visited(num_rows: int, num_steps: int, **given) -> list[int]:
    """Rows in the order in which steps of four take them."""
    found: list[int] = []

    async def update(sequences, loss):
        found.extend(int(each.id) for each in sequences)
        return UpdateResult(metrics={}, num_steps=1, num_skipped=0, num_tokens=1)

    mask = np.array([False, True])
    rows = [TrainSequence(id=str(i), tokens=np.array([1, 2]), loss_mask=mask) for i in range(num_rows)]
    model = SimpleNamespace(sequences_per_step=4, capabilities=SimpleNamespace(topk=False), update=update)
    run = SimpleNamespace(
        sequences=lambda *args, **options: rows,
        train_role=lambda name: model,
        stage=lambda name: nullcontext(),
        log=lambda metrics: None,
        guard=lambda *args: None,
        step=0,
    )
    role = {"data_args": {"file_name": "rows.jsonl"}, "training_args": {"per_device_train_batch_size": 4}}
    pipeline = SFTPipeline(SFTConfig.model_validate({"pipeline": "sft", "sft_train": role} | given))
    pipeline.prepare(run)
    for run.step in range(num_steps):
        asyncio.run(pipeline.step(run))
    return found


def test_rows_are_shuffled_per_epoch_or_in_file_order():
    shuffled = visited(12, 6)
    assert sorted(shuffled[:12]) == sorted(shuffled[12:]) == list(range(12))
    assert shuffled[:12] != shuffled[12:]
    assert visited(12, 6, shuffle=False) == [*range(12), *range(12)]
