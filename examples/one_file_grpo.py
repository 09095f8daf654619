"""GRPO in one file: ROLL's strategies as a library, without config, runtime or plugins.

    python examples/one_file_grpo.py

A model with random weights learns, from rewards alone, to repeat the digit that it is shown: "7>" becomes "7>77777777".
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from roll_core.algorithms.advantages import grpo
from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import pack, sample_of, sequence_of, totals
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.algorithms import AdvantageInput
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, Sample, SamplingParams
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy

STEPS, PROMPTS, ANSWERS, LENGTH = 60, 16, 8, 8


def reward(sample: Sample, digit_id: int) -> float:
    """Share of the answer's tokens that are the digit."""
    return float(np.mean(sample.response_ids == digit_id)) * len(sample.response_ids) / LENGTH


async def train(steps: int = STEPS, seed: int = 0) -> list[float]:
    """Run it; the mean reward of each step."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789>"), [], Path(folder))
        model = ModelSpec(
            random_init={
                "model_type": "qwen3",
                "hidden_size": 64,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            tokenizer=folder,
            seed=seed,
        )
        trainer = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=5e-3, num_steps=steps, max_grad_norm=1.0))
        trainer.build(model, MeshInfo(role="trainer"))
        engine = HFInferStrategy(HFInferConfig())
        await engine.start(model, MeshInfo(role="engine"))

    rng = random.Random(seed)
    rewards = []
    try:
        for step in range(steps):
            # The engine takes the trainer's weights: in one process that is the same memory.
            weights = list(trainer.export_weights())
            await engine.update_weights(step, make_manifest(step, weights), weights, shared=True)

            # Each prompt is answered by a group of samples.
            digits = [rng.randrange(10) for _ in range(PROMPTS)]
            prompts = [np.array(tokenizer.encode(f"{digit}>")) for digit in digits]
            params = SamplingParams(max_new_tokens=LENGTH, seed=seed * steps + step)
            requests = [
                GenerateRequest(
                    id=str(i), prompt_ids=p, params=replace(params, seed=params.seed * PROMPTS + i), n=ANSWERS
                )
                for i, p in enumerate(prompts)
            ]
            completions = await asyncio.gather(*(engine.generate(request) for request in requests))

            # Samples become sequences, scores become advantages.
            samples = [
                sample_of(output, id=f"{c.id}/{i}", group_id=c.id, prompt_ids=prompts[int(c.id)])
                for c in completions
                for i, output in enumerate(c.outputs)
            ]
            sequences = [sequence_of(sample, group=int(sample.group_id)) for sample in samples]
            scores_S = torch.tensor([reward(s, int(s.prompt_ids[0])) for s in samples])
            groups_S = torch.tensor([sequence.group for sequence in sequences])
            mask_T = torch.from_numpy(np.concatenate([sequence.loss_mask for sequence in sequences]))
            lengths = [len(sequence) for sequence in sequences]
            segments_T = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor(lengths))
            credit = grpo(AdvantageInput(scores_S=scores_S, mask_T=mask_T, segments_T=segments_T, groups_S=groups_S))
            advantages = np.split(credit.advantages_T.numpy(), np.cumsum(lengths)[:-1])
            batch = [replace(s, advantages=a) for s, a in zip(sequences, advantages, strict=True)]

            # One optimizer step. Microbatches may be cut as one likes: the gradient is the same.
            micros = pack(batch, max_sequences=32, totals=totals(batch, max_length=LENGTH))
            trainer.forward_backward(micros, policy_objective())
            trainer.optimizer_step()
            rewards.append(float(scores_S.mean()))
            print(f"step {step + 1:3d}  mean reward {rewards[-1]:.3f}")
    finally:
        await engine.stop()
        trainer.close()
    return rewards


if __name__ == "__main__":
    asyncio.run(train())
