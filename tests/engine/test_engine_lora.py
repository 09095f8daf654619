"""The engine beside a trainer of adapters in one process: merged weights become its own, frozen ones are shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roll_core.builtin.hf.config import HFTrainConfig
from roll_core.builtin.hf.train import HFTrainStrategy
from roll_core.data.pack import pack
from roll_core.runtime.weight_sync import SyncPlan, WeightSender
from roll_core.spec.model import LoraSpec, MeshInfo
from roll_core.spec.train import LossOutput, TrainingSpec, Want
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence

TOKENS = np.arange(3, 40)


class Likelihood:
    """Minus the sum of logprobs."""

    want = Want(logprobs=True)

    def __call__(self, outputs, micro):
        return LossOutput(loss=-outputs.logprobs_T[micro.loss_mask_T].mean())


@pytest.fixture
def trainer(tiny_spec):
    lora = LoraSpec(targets=("q_proj", "o_proj", "up_proj", "down_proj"), rank=4, alpha=8.0)
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.03, num_steps=100))
    spec = type(tiny_spec)(random_init=tiny_spec.random_init, dtype="fp32", seed=tiny_spec.seed, lora=lora)
    strategy.build(spec, MeshInfo(role="actor_train", num_threads=1))
    yield strategy
    strategy.close()


def step(trainer):
    row = TrainSequence(id="row", tokens=TOKENS, loss_mask=np.arange(len(TOKENS)) > 0)
    trainer.forward_backward(pack([row]), Likelihood())
    trainer.optimizer_step()
    return trainer.forward(pack([row])[0], Want(logprobs=True)).logprobs_T.numpy()


async def scored(engine, name):
    params = SamplingParams(max_new_tokens=1, seed=0)
    request = GenerateRequest(id=name, prompt_ids=TOKENS, params=params, prompt_logprobs=True)
    return (await engine.generate(request)).prompt_logprobs


async def publish(engine, trainer, version):
    sender = WeightSender(trainer, role="actor_train", rank=0)
    offer = sender.prepare(SyncPlan(version=version, transport="shared", num_receivers=1, dtype="F32"))
    await engine.update_weights(version, offer.manifest, iter(offer.tensors), shared=True)
    return offer


def test_the_engine_computes_what_the_trainer_does_after_every_publish(with_engine, trainer):
    async def act(engine):
        for version in (1, 2, 3):
            expected = step(trainer)
            await publish(engine, trainer, version)
            found = await scored(engine, f"version {version}")
            np.testing.assert_allclose(found[1:], expected[1:], atol=1e-5)

    with_engine(act)


def test_steps_after_a_publish_change_nothing_in_the_engine(with_engine, trainer):
    async def act(engine):
        step(trainer)
        await publish(engine, trainer, 1)
        held = {name: each.clone() for name, each in engine._model.named_parameters()}
        before = await scored(engine, "before")
        for _ in range(3):
            step(trainer)
        assert all(torch.equal(each, held[name]) for name, each in engine._model.named_parameters())
        np.testing.assert_array_equal(await scored(engine, "after"), before)

    with_engine(act)


def test_only_the_frozen_weights_are_one_with_the_trainers(with_engine, trainer):
    async def act(engine):
        step(trainer)
        offer = await publish(engine, trainer, 1)
        live = {each.data_ptr() for each in trainer.model.parameters()}
        held = dict(engine._model.named_parameters())
        shared = {name for name, _ in offer.tensors if held[name].data_ptr() in live}
        merged = {"q_proj", "o_proj", "up_proj", "down_proj"}
        beside = {"k_proj", "v_proj", "gate_proj"}  # their siblings are new, and siblings lie side by side
        names = {name for name in held if name.split(".")[-2] not in merged | beside}
        assert shared == names
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= shared

    with_engine(act)
