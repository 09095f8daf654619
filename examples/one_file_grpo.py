"""GRPO in one file, with ROLL's strategies as a library: `python examples/one_file_grpo.py`.

A model with random weights learns, from rewards alone, to repeat the digit that it is shown: "7>" becomes "7>77777777".
"""

import asyncio
import random
import tempfile
from pathlib import Path

from roll_core.algorithms.advantages import grpo
from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import count_totals, pack
from roll_core.data.tokenizers import make_tokenizer
from roll_core.pipelines.experience import Experience
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, Sample, SamplingParams
from roll_infer_hf.engine import HFInferConfig, HFInferStrategy
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy

STEPS, PROMPTS, ANSWERS, LENGTH = 60, 16, 8, 8
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
MODEL = {"model_type": "qwen3", **SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}


def reward(sample: Sample) -> float:
    """Share of the answer's tokens that are the digit of the prompt."""
    return float((sample.response_ids == sample.prompt_ids[0]).sum()) / LENGTH


async def train(steps: int = STEPS, seed: int = 0) -> list[float]:
    """Run it; the mean reward of each step."""
    trainer = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=5e-3, num_steps=steps, max_grad_norm=1.0))
    engine = HFInferStrategy(HFInferConfig())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet="0123456789>"), [], Path(folder))
        model = ModelSpec(random_init=MODEL, tokenizer=folder, seed=seed)
        trainer.build(model, MeshInfo(role="trainer"))
        await engine.start(model, MeshInfo(role="engine"))
    rng, rewards = random.Random(seed), []
    for step in range(steps):
        # The engine takes the trainer's weights: in one process that is the same memory.
        weights = list(trainer.export_weights())
        await engine.update_weights(step, make_manifest(step, weights), weights, shared=True)
        # Each prompt is answered by a group of samples.
        requests = []
        for index in range(PROMPTS):
            (ids,) = tokenizer(f"{rng.randrange(10)}>", return_tensors="np").input_ids
            params = SamplingParams(max_new_tokens=LENGTH, seed=(seed * steps + step) * PROMPTS + index)
            requests.append(GenerateRequest(id=str(index), prompt_ids=ids, params=params, n=ANSWERS))
        completions = await asyncio.gather(*map(engine.generate, requests))
        # Rewards become advantages. The gradient does not depend on how the batch is cut into microbatches.
        experience = Experience.of_completions(requests, completions, reward)
        experience = experience.with_flat(advantages=grpo(experience.advantage_input()).advantages_T)
        batch = experience.sequences
        trainer.forward_backward(pack(batch, max_sequences=32, totals=count_totals(batch, LENGTH)), policy_objective())
        trainer.optimizer_step()
        rewards.append(float(experience.scores_S.mean()))
        print(f"step {step + 1:3d}  mean reward {rewards[-1]:.3f}")
    await engine.stop()
    trainer.close()
    return rewards


if __name__ == "__main__":
    asyncio.run(train())
