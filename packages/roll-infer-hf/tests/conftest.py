"""A tiny model, and an engine that runs it for the length of one coroutine."""

import asyncio
import time
from collections.abc import Callable

import pytest

from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.types import Completion, GenerateRequest
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy

VOCABULARY = 97


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    return ModelSpec(
        random_init={
            "model_type": "qwen3",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "eos_token_id": 1,
        },
        dtype="fp32",
        seed=5,
    )


@pytest.fixture
def with_engine(tiny_spec: ModelSpec) -> Callable:
    """`with_engine(coroutine function of an engine, spec=..., **config)` returns its result."""

    def run(act: Callable, spec: ModelSpec = tiny_spec, **config):
        async def started():
            engine = HFInferStrategy(HFInferConfig(**config))
            await engine.start(spec, MeshInfo(role="actor_infer", rank=3, num_threads=1))
            try:
                return await asyncio.wait_for(act(engine), 60)
            finally:
                await engine.stop()

        return asyncio.run(started())

    return run


@pytest.fixture
def half_drawn() -> Callable:
    """`await half_drawn(engine, requests)` returns tasks that generate. The first tokens are drawn; the others will be
    once the engine was asked for something else."""

    async def begin(engine: HFInferStrategy, requests: list[GenerateRequest]) -> list[asyncio.Task[Completion]]:
        core = engine._core
        step = core.step
        drawn = asyncio.Event()
        loop = asyncio.get_running_loop()

        def first_step():
            core.step = step
            done = step()
            loop.call_soon_threadsafe(drawn.set)
            patience = time.monotonic() + 20
            while not engine._inbox and not engine._closing and time.monotonic() < patience:
                time.sleep(0.001)
            return done

        core.step = first_step
        tasks = [asyncio.create_task(engine.generate(each)) for each in requests]
        await drawn.wait()
        return tasks

    return begin
