"""What the ranks of `test_replicas.py` do: functions for `roll_testing.ranks.RankHost`."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import balance, count_totals, pack
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.types import TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.losses import SpoiltLoss
from roll_testing.programs import raised


def sequence(tokens, masked_from):
    """Its loss mask begins at `masked_from`."""
    length = len(tokens)
    return TrainSequence(id=str(tokens), tokens=np.asarray(tokens), loss_mask=np.arange(length) >= masked_from)


def run(rank, world_size, port, model, sequences, folder, lora):
    """Two steps on this rank's share; returns the first gradient, the weights, and what was measured."""
    torch.set_num_threads(1)
    sequences = [sequence(*each) for each in sequences]
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-2, num_steps=9, max_grad_norm=1.0))
    mesh = MeshInfo(role="student", rank=rank, world_size=world_size, master_port=port, num_threads=1, timeout_s=60)
    # Ranks that draw other weights get rank 0's.
    spec = ModelSpec(random_init=model, seed=3 + rank, lora=lora)
    strategy.build(spec, mesh)
    share = [sequences[i] for i in balance(sequences, world_size)[rank]]
    micros = pack(share, totals=count_totals(sequences), max_sequences=2)
    strategy.forward_backward(micros, sft_objective())
    gradient = strategy.optimizer.flat_grad.clone()
    strategy.replicas.sum(gradient)
    stats = [strategy.optimizer_step()]
    saved = folder / "state" / f"rank-{rank}"
    saved.mkdir(parents=True)
    strategy.save(saved)
    strategy.forward_backward(micros, sft_objective())
    stats.append(strategy.optimizer_step())
    strategy.load(saved)
    strategy.forward_backward(micros, sft_objective())
    stats.append(strategy.optimizer_step())
    weights = torch.cat([each.flatten() for _, each in strategy.export_weights()])
    strategy.close()
    return {
        "gradient": gradient.tolist(),
        "weights": weights.tolist(),
        "stats": [dataclasses.asdict(each) for each in stats],
    }


def lose_one(rank, world_size, port, model, sequences, spoilt):
    """What the gradients raise where the loss of one sequence is NaN."""
    torch.set_num_threads(1)
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-2, num_steps=9))
    mesh = MeshInfo(role="student", rank=rank, world_size=world_size, master_port=port, num_threads=1, timeout_s=60)
    strategy.build(ModelSpec(random_init=model, seed=3), mesh)
    batch = [sequence(*each) for each in sequences]
    share = [batch[i] for i in balance(batch, world_size)[rank]]
    micros = pack(share, totals=count_totals(batch), max_sequences=1)
    error = raised(lambda: strategy.forward_backward(micros, SpoiltLoss(sequence=spoilt)))
    strategy.close()
    return error
