"""The engine beside `hf_train`: the same logprobs, and no copy between them."""

import asyncio

import numpy as np
import pytest

from roll_core.data.pack import pack
from roll_core.spec.model import MeshInfo
from roll_core.spec.train import LossOutput, TrainingSpec, WantedOutputs
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy


class Likelihood:
    """Minus the sum of logprobs: any loss that changes every weight would do."""

    want = WantedOutputs(logprobs=True)

    def __call__(self, outputs, micro):
        return LossOutput(loss=-outputs.logprobs_T[micro.loss_mask_T].mean())


@pytest.fixture
def trainer(tiny_spec):
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.01))
    strategy.build(tiny_spec, MeshInfo(role="actor_train", num_threads=1))
    yield strategy
    strategy.close()


def as_sequence(name, prompt, output):
    tokens = np.concatenate([prompt, output.token_ids])
    return TrainSequence(id=name, tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))


def test_shared_weights_give_the_trainers_logprobs_at_each_step(with_engine, trainer):
    prompts = [np.arange(3, 3 + length) for length in (2, 9, 17)]

    async def generate(engine, prefix):
        params = SamplingParams(max_new_tokens=15, temperature=0.8, seed=2, ignore_eos=True)
        return await asyncio.gather(
            *[
                engine.generate(GenerateRequest(id=f"{prefix}{i}", prompt_ids=each, params=params, n=2))
                for i, each in enumerate(prompts)
            ]
        )

    def compare(completions):
        pairs = [(p, output) for p, c in zip(prompts, completions, strict=True) for output in c.outputs]
        micros = pack([as_sequence(str(i), *pair) for i, pair in enumerate(pairs)])
        trained = trainer.forward(micros[0], WantedOutputs(logprobs=True, temperature=0.8)).logprobs_T.numpy()
        mine = np.concatenate([np.concatenate([np.zeros(len(p)), output.logprobs]) for p, output in pairs])
        drawn = micros[0].loss_mask_T.numpy()
        np.testing.assert_allclose(mine[drawn], trained[drawn], atol=1e-5)
        return micros

    async def act(engine):
        micros = compare(await generate(engine, "a"))
        trainer.forward_backward(micros, Likelihood())
        trainer.optimizer_step()
        tensors = list(trainer.export_weights())
        await engine.update_weights(1, make_manifest(1, tensors), tensors, shared=True)
        compare(await generate(engine, "b"))
        held = dict(engine._model.named_parameters())
        return {name for name, tensor in tensors if held[name].data_ptr() != tensor.data_ptr()}

    assert with_engine(act) == set()
