"""Prompts with images on vLLM: logprobs beside transformers' passes, masks, and updates of image encoders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm_live import CACHE, start

from roll_core.errors import UnsupportedError
from roll_core.spec.model import LoraSpec, MeshInfo
from roll_core.spec.train import TrainingSpec
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from shared_tests.image_engine import ImageEngineTests, SeeingEngine, ask, step
from shared_tests.loaded_engine import CLOSE, digests

OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_vl", "internvl", "qwen2_vl")]


def started(folder, kind, config=None, **changes):
    """An engine with a changed `ModelSpec`."""
    config = CACHE | {"max_model_len": 256, "max_num_seqs": 8} | (config or {})
    return SeeingEngine(folder, kind, lambda spec: start(replace(spec, **changes), config))


@pytest.mark.engine("vllm")
class TestImages(ImageEngineTests):
    @pytest.fixture(scope="class", params=["qwen2_5_vl", *OTHERS])
    @classmethod
    def engine(cls, request, tmp_path_factory):
        engine = started(tmp_path_factory.mktemp(request.param), request.param)
        yield engine
        engine.close()


@pytest.mark.slow
@pytest.mark.engine("vllm")
@pytest.mark.parametrize(
    ("config", "dtype", "atol"),
    [({}, "bf16", 0.2), ({"tensor_parallel_size": 2}, "fp32", CLOSE)],
    ids=["bf16", "two ranks"],
)
def test_published_images_are_seen(tmp_path, config, dtype, atol):
    engine = started(tmp_path, "qwen2_5_vl", config, dtype=dtype)
    try:
        torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        step(engine.model.parameters(), 3)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.copy_(parameter.to(torch_dtype))
        tensors = [(name, parameter.to(torch_dtype)) for name, parameter in engine.model.named_parameters()]
        manifest, receipt = engine.live.publish(tensors)
        assert receipt.digests == digests(manifest)
        prompt = engine.prompt
        engine.check(ask("one", prompt("What is # this?", 0)), ask("two", prompt("#a#", 1, 2)), atol=atol)
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_adapters_are_served_beside_images(tmp_path):
    lora = LoraSpec(targets=("all-linear",), rank=4, alpha=8.0)
    engine = started(tmp_path, "qwen2_5_vl", {"enable_lora": True}, lora=lora)
    try:
        trainer = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.1, num_steps=9))
        trainer.build(engine.live.spec, MeshInfo(role="actor_train", num_threads=1))
        step(trainer.adapters.trained().values(), 4)
        manifest, receipt = engine.live.publish(list(trainer.export_adapters()))
        assert receipt.digests == digests(manifest)
        engine.model.load_state_dict(dict(trainer.export_weights()), strict=False)
        engine.check(ask("one", engine.prompt("What is # this?", 0)), ask("two", engine.prompt("#a#", 1, 2)))
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.engine("vllm")
def test_images_that_a_cpu_attends_to_wrongly_are_refused(tmp_path):
    """Gemma 3's encoder is loaded, as transformers 5 names it, and published."""
    engine = started(tmp_path, "gemma3")
    try:
        engine.check(ask("before", engine.prompt("Only a text.")))
        step(engine.model.parameters(), 5)
        manifest, receipt = engine.live.publish([*engine.model.named_parameters()])
        assert receipt.digests == digests(manifest)
        engine.check(ask("after", engine.prompt("Only a text.")))
        with raises_error(UnsupportedError, "image", "hf_infer"):
            engine.generate(ask("image", engine.prompt("What is # this?", 0)))
    finally:
        engine.close()


@pytest.mark.engine("vllm")
def test_encoders_of_vllm_load_no_flat_names():
    """When this fails, `workarounds.load_flat_encoders` is no longer needed."""
    from vllm.model_executor.models.clip import CLIPVisionModel
    from vllm.model_executor.models.siglip import SiglipVisionModel

    from roll_infer_vllm.workarounds import ENCODERS

    encoders = CLIPVisionModel, SiglipVisionModel
    assert tuple(encoder.__name__ for encoder in encoders) == ENCODERS
    assert not any(hasattr(encoder, "load_weights") for encoder in encoders)
