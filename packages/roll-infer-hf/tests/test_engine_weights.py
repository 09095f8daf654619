"""Replacing the weights of a running engine."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from roll_core.errors import CorruptTensorError, MissingTensorError, StaleWeightsError, UnexpectedTensorError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.weights import digest, make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_modeling.layout import adjacent, make_adjacent
from roll_modeling.model import load_model
from roll_testing.bounds import BOUNDS
from roll_testing.errors import raises_error


def request(name, prompt, **params):
    params = {"ignore_eos": True, "max_new_tokens": 12, "seed": 4, **params}
    return GenerateRequest(id=name, prompt_ids=np.array(prompt), params=SamplingParams(**params), prompt_logprobs=True)


@pytest.fixture
def trainer(tiny_spec):
    model = load_model(tiny_spec)
    make_adjacent(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(9)) * 0.1)
    return model


def exported(model):
    return list(model.named_parameters())


def scored(model, tokens):
    ids = torch.tensor(np.array(tokens)).unsqueeze(0)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits, dim=-1)
    return logprobs[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy()


def assert_of(model, prompt, completion):
    expected = scored(model, [*prompt, *completion.outputs[0].token_ids])
    np.testing.assert_allclose(completion.outputs[0].logprobs, expected[len(prompt) - 1 :], atol=1e-5)
    np.testing.assert_allclose(completion.prompt_logprobs[1:], expected[: len(prompt) - 1], atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_new_requests_use_only_the_new_weights(with_engine, trainer, shared):
    prompt = list(range(30))

    async def act(engine):
        await engine.generate(request("before", prompt))
        receipt = await engine.update_weights(3, make_manifest(3, exported(trainer)), exported(trainer), shared=shared)
        return receipt, await engine.generate(request("after", prompt))

    receipt, after = with_engine(act)
    assert_of(trainer, prompt, after)
    assert set(after.outputs[0].versions.tolist()) == {3}
    assert receipt.digests == {name: digest(each) for name, each in exported(trainer)}
    assert (receipt.version, receipt.role, receipt.rank) == (3, "actor_infer", 3)


def test_fp16_weights_are_loaded_and_computed_with(with_engine, trainer, tiny_spec):
    halves = [(name, each.detach().half()) for name, each in exported(trainer)]
    prompt = list(range(30))

    async def act(engine):
        receipt = await engine.update_weights(1, make_manifest(1, halves), iter(halves))
        return receipt, await engine.generate(request("half", prompt))

    receipt, completion = with_engine(act, replace(tiny_spec, dtype="fp16"))
    assert receipt.digests == {name: digest(each) for name, each in halves}
    trainer.load_state_dict(dict(halves), strict=False)
    expected = scored(trainer, [*prompt, *completion.outputs[0].token_ids])[len(prompt) - 1 :]
    np.testing.assert_allclose(completion.outputs[0].logprobs, expected, atol=BOUNDS["fp16"].outputs)


def test_shared_tensors_are_aliased_and_copied_ones_are_not(with_engine, trainer):
    async def act(engine):
        manifest = make_manifest(1, exported(trainer))
        held = dict(engine._model.named_parameters())
        await engine.update_weights(1, manifest, exported(trainer))
        apart = all(held[name].data_ptr() != each.data_ptr() for name, each in exported(trainer))
        await engine.update_weights(1, manifest, exported(trainer), shared=True)
        same = all(held[name].data_ptr() == each.data_ptr() for name, each in exported(trainer))
        fused = engine._core.runner._layers[0].qkv.weight
        return apart, same, fused.data_ptr() == trainer.model.layers[0].self_attn.q_proj.weight.data_ptr()

    assert with_engine(act) == (True, True, True)


def test_copy_after_a_shared_update_spares_the_trainers_memory(with_engine, trainer, tiny_spec):
    before = {name: each.detach().clone() for name, each in exported(trainer)}
    other = load_model(tiny_spec)

    async def act(engine):
        await engine.update_weights(1, make_manifest(1, exported(trainer)), exported(trainer), shared=True)
        await engine.update_weights(2, make_manifest(2, exported(other)), exported(other))
        return await engine.generate(request("a", [4, 5]))

    assert_of(other, [4, 5], with_engine(act))
    assert all(torch.equal(before[name], each) for name, each in exported(trainer))


def test_a_step_of_the_trainer_is_seen_at_the_next_publish(with_engine, trainer):
    async def act(engine):
        await engine.update_weights(1, make_manifest(1, exported(trainer)), exported(trainer), shared=True)
        await engine.generate(request("a", [4, 5]))
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.mul_(1.1)
        await engine.update_weights(2, make_manifest(2, exported(trainer)), exported(trainer), shared=True)
        return await engine.generate(request("b", [4, 5]))

    assert_of(trainer, [4, 5], with_engine(act))


def test_scattered_live_tensors_are_used_correctly(with_engine, tiny_spec):
    scattered = load_model(tiny_spec.__class__(random_init=tiny_spec.random_init, dtype="fp32", seed=77))
    layer = scattered.model.layers[0].self_attn
    assert adjacent([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]) is None

    async def act(engine):
        receipt = await engine.update_weights(
            1, make_manifest(1, exported(scattered)), exported(scattered), shared=True
        )
        return receipt, await engine.generate(request("a", [4, 5]))

    receipt, completion = with_engine(act)
    assert_of(scattered, [4, 5], completion)
    assert receipt.digests == {name: digest(each) for name, each in exported(scattered)}


@pytest.fixture
def update_in_flight(half_drawn, trainer):
    def replacing(prompt):
        async def act(engine):
            [task] = await half_drawn(engine, [request("a", prompt, max_new_tokens=90)])
            await engine.update_weights(1, make_manifest(1, exported(trainer)), exported(trainer))
            return await task

        return act

    return replacing


def test_running_requests_resume_with_versions_under_new_weights(with_engine, update_in_flight, tiny_spec):
    prompt = [4, 5, 6]
    output = with_engine(update_in_flight(prompt)).outputs[0]
    assert len(output.token_ids) == 90
    changed = int(output.versions.argmax())
    assert 0 < changed < 90
    assert (output.versions == (np.arange(90) >= changed)).all()
    old = scored(load_model(tiny_spec), [*prompt, *output.token_ids])[len(prompt) - 1 :]
    np.testing.assert_allclose(output.logprobs[:changed], old[:changed], atol=1e-5)


def test_recomputed_kv_gives_logprobs_of_the_new_weights(with_engine, update_in_flight, trainer):
    prompt = [4, 5, 6]
    output = with_engine(update_in_flight(prompt), kv_after_update="recompute").outputs[0]
    changed = int(output.versions.argmax())
    assert 0 < changed < 90
    new = scored(trainer, [*prompt, *output.token_ids])[len(prompt) - 1 :]
    np.testing.assert_allclose(output.logprobs[changed:], new[changed:], atol=1e-5)


def publish(trainer, change, version=1, first=None):
    """Publish what `change` makes of the tensors, under the manifest of the true ones."""

    async def act(engine):
        if first is not None:
            await engine.update_weights(first, make_manifest(first, exported(trainer)), exported(trainer))
        await engine.update_weights(version, make_manifest(version, exported(trainer)), change(exported(trainer)))

    return act


@pytest.mark.parametrize(
    ("error", "facts", "change"),
    [
        (MissingTensorError, ("model.norm.weight",), lambda t: [x for x in t if "model.norm" not in x[0]]),
        (UnexpectedTensorError, ("surprise",), lambda t: [*t, ("surprise", torch.zeros(1))]),
        (
            CorruptTensorError,
            ("model.norm.weight", "7"),
            lambda t: [(name, torch.zeros(7) if name == "model.norm.weight" else x) for name, x in t],
        ),
        (CorruptTensorError, ("F64",), lambda t: [(name, x.double()) for name, x in t]),
    ],
)
def test_manifest_mismatch_names_role_rank_and_tensor(with_engine, trainer, error, facts, change):
    with raises_error(error, "actor_infer rank 3", *facts):
        with_engine(publish(trainer, change))


def test_an_older_version_is_stale(with_engine, trainer):
    with raises_error(StaleWeightsError, "version 4", "version 5"):
        with_engine(publish(trainer, lambda tensors: tensors, version=4, first=5))


def test_a_manifest_that_lacks_a_tensor_of_the_model_is_refused(with_engine, trainer):
    some = [each for each in exported(trainer) if "lm_head" not in each[0]]

    async def act(engine):
        await engine.update_weights(1, make_manifest(1, some), some)

    with raises_error(MissingTensorError, "lm_head.weight"):
        with_engine(act)


# -- sleep -------------------------------------------------------------------------------------------------------------


def held_by(engine, except_of):
    """Storages of weights, of keys and values, but for the trainer's: alive as long as anything refers to them."""
    runner = engine._core.runner
    trained = {each.untyped_storage().data_ptr() for each in except_of.parameters()}
    tensors = [*(each.data for each in engine._model.parameters()), runner._rows._kv]
    return [
        StorageWeakRef(each.untyped_storage()) for each in tensors if each.untyped_storage().data_ptr() not in trained
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_sleeping_engine_holds_neither_weights_nor_kv(with_engine, trainer, shared):
    async def act(engine):
        await engine.update_weights(1, make_manifest(1, exported(trainer)), exported(trainer), shared=shared)
        await engine.generate(request("before", range(30)))
        held = held_by(engine, trainer)
        alive = [not each.expired() for each in held]
        await engine.sleep()
        await engine.sleep()
        numbers = sum(each.untyped_storage().nbytes() for each in engine._model.parameters()) // 4
        return alive, [each.expired() for each in held], numbers

    alive, gone, numbers = with_engine(act)
    assert len(alive) == (1 if shared else 1 + len(exported(trainer)))
    assert all(alive)
    assert all(gone)
    assert numbers == len(exported(trainer))  # one each, which stands for its shape


def test_sleep_returns_memory_to_other_processes(with_engine, trainer, monkeypatch):
    """The allocator of a device keeps freed memory until it is told to return it."""
    alive_at_return = []

    async def act(engine):
        await engine.generate(request("before", range(30)))
        held = held_by(engine, trainer)
        monkeypatch.setattr(
            torch.accelerator, "empty_cache", lambda: alive_at_return.append(sum(not each.expired() for each in held))
        )
        engine._mesh = replace(engine._mesh, device="meta")
        await engine.sleep()

    with_engine(act)
    assert alive_at_return == [0]


@pytest.mark.parametrize("device", ["cpu", "meta:2"])
def test_the_engines_thread_selects_its_device(tiny_spec, monkeypatch, device):
    selected = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda index: selected.append((threading.current_thread().name, index))
    )

    async def act():
        engine = HFInferStrategy(HFInferConfig(kernels="torch"))
        with suppress(NotImplementedError, RuntimeError):  # the device `meta` computes nothing
            await engine.start(tiny_spec, MeshInfo(role="actor_infer", device=device))
        await engine.stop()

    asyncio.run(act())
    assert selected == ([] if device == "cpu" else [("roll-engine", 2)])


@pytest.mark.parametrize("shared", [False, True])
def test_woken_engine_computes_with_the_next_weights(with_engine, trainer, shared):
    prompt = list(range(30))

    async def act(engine):
        await engine.update_weights(1, make_manifest(1, exported(trainer)), exported(trainer), shared=shared)
        before = await engine.generate(request("before", prompt))
        await engine.sleep()
        with raises_error(RuntimeError, "weights"):
            await engine.generate(request("asleep", prompt))
        await engine.wake()
        receipt = await engine.update_weights(1, make_manifest(1, exported(trainer)), exported(trainer), shared=shared)
        weights = [getattr(engine._model.model.layers[0].self_attn, f"{each}_proj").weight for each in "qkv"]
        return before, receipt, await engine.generate(request("after", prompt)), adjacent(weights) is not None

    before, receipt, after, side_by_side = with_engine(act)
    assert_of(trainer, prompt, after)
    assert after.outputs[0].token_ids.tolist() == before.outputs[0].token_ids.tolist()
    assert receipt.digests == {name: digest(each) for name, each in exported(trainer)}
    assert side_by_side  # as they lay before: one product for all three


def test_an_architecture_without_a_fast_path_sleeps_as_well(with_engine):
    spec = ModelSpec(
        random_init={
            "model_type": "gpt2",
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 97,
        },
        dtype="fp32",
        seed=5,
    )
    other = load_model(spec)

    async def act(engine):
        before = await engine.generate(request("before", range(9)))
        await engine.sleep()
        held = sum(each.untyped_storage().nbytes() for each in engine._model.parameters())
        await engine.update_weights(1, make_manifest(1, exported(other)), exported(other))
        return before, held, await engine.generate(request("after", range(9)))

    before, held, after = with_engine(act, spec=spec)
    assert held == 4 * len(exported(other))
    assert after.outputs[0].token_ids.tolist() == before.outputs[0].token_ids.tolist()
    np.testing.assert_allclose(after.outputs[0].logprobs, before.outputs[0].logprobs, atol=1e-6)


def test_an_engine_does_not_sleep_while_requests_run(with_engine):
    async def act(engine):
        running = asyncio.create_task(engine.generate(request("long", range(9), max_new_tokens=100)))
        await asyncio.sleep(0)
        with raises_error(RuntimeError, "requests"):
            await engine.sleep()
        return await running

    assert len(with_engine(act).outputs[0].token_ids) == 100
