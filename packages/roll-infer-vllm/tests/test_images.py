"""Prompts with images on vLLM: logprobs beside transformers' passes, masks, and updates of image encoders."""

from __future__ import annotations

import pytest
from vllm_live import CACHE, start

from shared_tests.image_engine import ImageEngineTests, SeeingEngine

OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_vl", "internvl")]


@pytest.mark.engine("vllm")
class TestImages(ImageEngineTests):
    @pytest.fixture(scope="class", params=["qwen2_5_vl", *OTHERS])
    @classmethod
    def engine(cls, request, tmp_path_factory):
        config = CACHE | {"max_model_len": 256, "max_num_seqs": 8}
        folder = tmp_path_factory.mktemp(request.param)
        engine = SeeingEngine(folder, request.param, lambda spec: start(spec, config))
        yield engine
        engine.close()
