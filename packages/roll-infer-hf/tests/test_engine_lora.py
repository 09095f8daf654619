"""The engine beside a trainer of adapters in one process: it takes merged weights, of which frozen ones are shared, or
the adapter as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from roll_core.data.pack import pack
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.transfer import WeightSender
from roll_core.spec.model import LoraSpec, MeshInfo, ModelSpec
from roll_core.spec.train import LossOutput, TrainingSpec, WantedOutputs
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_modeling.model import load_model
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from roll_testing.publishing import transport_record

TOKENS = np.arange(3, 40)


class Likelihood:
    """Minus the sum of logprobs."""

    want = WantedOutputs(logprobs=True)

    def __call__(self, outputs, micro):
        return LossOutput(loss=-outputs.logprobs_T[micro.loss_mask_T].mean())


LORA = LoraSpec(
    targets=("q_proj", "o_proj", "up_proj", "down_proj"),
    rank=4,
    alpha=8.0,
    rank_pattern={"up_proj": 2},
    alpha_pattern={"q_proj": 6.0},
)
"""Of matrices that the engine multiplies with their siblings as one, some and not others have an adapter."""


@pytest.fixture
def lora_spec(tiny_spec):
    return replace(tiny_spec, lora=LORA)


@pytest.fixture
def trainer(lora_spec):
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.03, num_steps=100))
    strategy.build(lora_spec, MeshInfo(role="actor_train", num_threads=1))
    yield strategy
    strategy.close()


def step(trainer):
    row = TrainSequence(id="row", tokens=TOKENS, loss_mask=np.arange(len(TOKENS)) > 0)
    trainer.forward_backward(pack([row]), Likelihood())
    trainer.optimizer_step()
    return trainer.forward(pack([row])[0], WantedOutputs(logprobs=True)).logprobs_T.numpy()


async def scored(engine, name):
    params = SamplingParams(max_new_tokens=1, seed=0)
    request = GenerateRequest(id=name, prompt_ids=TOKENS, params=params, prompt_logprobs=True)
    return (await engine.generate(request)).prompt_logprobs


async def publish(engine, trainer, version, *, adapters=False):
    sender = WeightSender(trainer, role="actor_train", rank=0)
    shared = transport_record("shared")
    plan = SyncPlan(version=version, transport=shared, num_receivers=1, dtype="F32", adapters=adapters)
    handle = sender.prepare(plan)
    receipt = await engine.update_weights(version, handle.manifest, iter(handle.tensors), shared=True)
    assert receipt.digests.keys() == {entry.name for entry in handle.manifest.tensors}
    return handle


def test_engine_equals_trainer_after_every_publish(with_engine, trainer):
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
        handle = await publish(engine, trainer, 1)
        live = {each.data_ptr() for each in trainer.model.parameters()}
        held = dict(engine._model.named_parameters())
        shared = {name for name, _ in handle.tensors if held[name].data_ptr() in live}
        merged = {"q_proj", "o_proj", "up_proj", "down_proj"}
        beside = {"k_proj", "v_proj", "gate_proj"}  # their siblings are new, and siblings lie side by side
        names = {name for name in held if name.split(".")[-2] not in merged | beside}
        assert shared == names
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= shared

    with_engine(act)


@pytest.mark.parametrize("settings", [{}, {"pack_weights": False}, {"kernels": "torch"}], ids=str)
def test_a_served_adapter_gives_the_logprobs_of_merged_weights(with_engine, trainer, lora_spec, settings):
    expected, adapters_alone = [], []

    async def merged(engine):
        return [await published(engine, version, adapters=False) for version in (1, 2)]

    async def served(engine):
        before = await scored(engine, "base")
        return before, [await published(engine, version, adapters=True) for version in (2, 3)]

    async def published(engine, version, *, adapters):
        expected.append(step(trainer))
        handle = await publish(engine, trainer, version, adapters=adapters)
        adapters_alone.append(all(".lora_" in name for name, _ in handle.tensors))
        return await scored(engine, f"version {version}")

    with_engine(merged)
    base, found = with_engine(served, spec=lora_spec, enable_lora=True, **settings)
    assert adapters_alone == [False, False, True, True]
    untrained = load_model(replace(lora_spec, lora=None))
    with torch.no_grad():
        logits = untrained(torch.from_numpy(TOKENS)[None]).logits[0].log_softmax(-1)
    following = torch.from_numpy(TOKENS)[1:, None]
    np.testing.assert_allclose(base[1:], logits[:-1].gather(1, following)[:, 0], atol=1e-5)
    for one, other in zip(found, expected[2:], strict=True):
        np.testing.assert_allclose(one[1:], other[1:], atol=1e-5)


def test_running_requests_go_on_under_the_adapter_that_comes(with_engine, half_drawn, trainer, lora_spec):
    async def act(engine):
        params = SamplingParams(max_new_tokens=60, seed=0, ignore_eos=True)
        request = GenerateRequest(id="long", prompt_ids=TOKENS[:5], params=params)
        [task] = await half_drawn(engine, [request])
        step(trainer)
        await publish(engine, trainer, 1, adapters=True)
        output = (await task).outputs[0]
        whole = np.concatenate([TOKENS[:5], output.token_ids])
        again = GenerateRequest(
            id="again", prompt_ids=whole, params=SamplingParams(max_new_tokens=0), prompt_logprobs=True
        )
        return output, (await engine.generate(again)).prompt_logprobs[5:]

    output, under_the_new = with_engine(act, spec=lora_spec, enable_lora=True, kv_after_update="recompute")
    changed = int(output.versions.argmax())
    assert 0 < changed < 60
    np.testing.assert_allclose(output.logprobs[changed:], under_the_new[changed:], atol=1e-5)
    assert np.abs(output.logprobs[:changed] - under_the_new[:changed]).max() > 1e-3


def test_woken_engine_adds_the_next_adapter_to_its_base_model(with_engine, trainer, lora_spec):
    async def act(engine):
        step(trainer)
        await publish(engine, trainer, 1, adapters=True)
        await engine.sleep()
        with raises_error(RuntimeError, "weights"):
            await scored(engine, "asleep")
        expected = step(trainer)
        await publish(engine, trainer, 2, adapters=True)
        np.testing.assert_allclose((await scored(engine, "awake"))[1:], expected[1:], atol=1e-5)

    with_engine(act, spec=lora_spec, enable_lora=True)


def test_transposed_architectures_serve_adapters(with_engine):
    spec = ModelSpec(
        random_init={
            "model_type": "gpt2",
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "vocab_size": 97,
            "n_positions": 64,
            "initializer_range": 0.3,
        },
        dtype="fp32",
        seed=5,
        lora=LoraSpec(targets=("c_attn", "mlp.c_proj"), rank=3, alpha=6.0),
    )
    trainer = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.03, num_steps=100))
    trainer.build(spec, MeshInfo(role="actor_train", num_threads=1))

    async def act(engine):
        before = await scored(engine, "base")
        for version in (1, 2):
            expected = step(trainer)
            await publish(engine, trainer, version, adapters=True)
            found = await scored(engine, f"version {version}")
            np.testing.assert_allclose(found[1:], expected[1:], atol=1e-5)
        assert np.abs(found[1:] - before[1:]).max() > 0.1

    with_engine(act, spec=spec, enable_lora=True)
    trainer.close()
