"""Results of a training step and of generation. As a program it prints them as JSON, without roll-kernels."""

import asyncio
import json
import sys

if __name__ == "__main__":
    sys.modules["roll_kernels"] = None

import numpy as np
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_core.spec.weights import copy_digested
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_modeling import kernels
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.models import QWEN3
from roll_weight_transports.digests import use_compiled_digests

MODEL = QWEN3 | {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 307, "initializer_range": 0.1}
TRAINING = TrainingSpec(learning_rate=1e-3, num_steps=10)
LENGTHS = (5, 70, 33, 1)


def sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 300, length) for length in LENGTHS]
    return [TrainSequence(id=str(i), tokens=ids, loss_mask=np.arange(len(ids)) > 0) for i, ids in enumerate(tokens)]


def trained(spec: ModelSpec) -> dict[str, object]:
    strategy = HFTrainStrategy(HFTrainConfig(), TRAINING)
    strategy.build(spec, MeshInfo(role="student", num_threads=1))
    (micro,) = pack(sequences(), max_tokens=1024)
    outputs = strategy.forward(micro, WantedOutputs(logprobs=True, entropy=True))
    strategy.forward_backward([micro], sft_objective())
    stats = strategy.optimizer_step()
    after = strategy.forward(micro, WantedOutputs(logprobs=True))
    strategy.close()
    return {
        "logprobs": outputs.logprobs_T.tolist(),
        "entropies": outputs.entropy_T.tolist(),
        "grad_norm": stats.grad_norm,
        "logprobs_after": after.logprobs_T.tolist(),
    }


async def generated(spec: ModelSpec) -> dict[str, object]:
    engine = HFInferStrategy(HFInferConfig())
    await engine.start(spec, MeshInfo(role="actor_infer", num_threads=1))
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    requests = [
        GenerateRequest(id=str(i), prompt_ids=np.arange(3, 3 + length), params=params)
        for i, length in enumerate(LENGTHS)
    ]
    completions = await asyncio.gather(*[engine.generate(request) for request in requests])
    await engine.stop()
    outputs = [completion.outputs[0] for completion in completions]
    return {
        "tokens": [output.token_ids.tolist() for output in outputs],
        "response_logprobs": np.concatenate([output.logprobs for output in outputs]).tolist(),
    }


def results() -> dict[str, object]:
    spec = ModelSpec(random_init=MODEL, dtype="fp32", seed=5)
    source = torch.arange(70_000, dtype=torch.float32)
    has_kernels = kernels.elementwise is not None
    assert use_compiled_digests() == has_kernels
    digest = copy_digested(torch.empty_like(source), source)
    return trained(spec) | asyncio.run(generated(spec)) | {"digest": digest, "has_kernels": has_kernels}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(results()))
