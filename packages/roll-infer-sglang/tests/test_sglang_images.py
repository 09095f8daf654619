"""Prompts with images on SGLang: beside transformers' passes, in its caches, after sleep, and by its endpoint."""

from __future__ import annotations

import base64
import urllib.error
from dataclasses import replace

import numpy as np
import pytest
from sglang_on_a_cpu import ON_A_CPU, need_image_processors, stood_in

from roll_infer_sglang import requests
from roll_infer_sglang.config import SglangConfig
from shared_tests.image_engine import ImageEngineTests, SeeingEngine, ask
from shared_tests.live_engine import Live
from shared_tests.loaded_engine import CLOSE

OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_vl", "internvl")]
TRANSFORMERS_BACKEND = ("internvl",)
"""Types for which SGLang disables its prefix cache."""


def start(spec):
    from roll_infer_sglang.strategy import SglangStrategy

    return Live(SglangStrategy(SglangConfig.model_validate(ON_A_CPU | {"context_length": 256})), spec)


@pytest.mark.engine("sglang")
class TestImages(ImageEngineTests):
    @pytest.fixture(scope="class", params=["qwen2_5_vl", *OTHERS])
    @classmethod
    def engine(cls, request, tmp_path_factory):
        need_image_processors()
        with stood_in():  # set before each test's own
            engine = SeeingEngine(tmp_path_factory.mktemp("model"), request.param, start)
            yield engine
            engine.close()

    def test_prefixes_are_shared_by_equal_images_alone(self, engine):
        ids, (image,) = engine.prompt("# What is this? What is it?", 0)
        (other,) = engine.prompt("#", 3)[1]  # of the same size
        first = ask("first", (ids, (image,)), temperature=0.0)
        engine.live.publish([*engine.model.named_parameters()])
        engine.live.strategy.metrics()
        hits = []
        for request in (first, replace(first, id="again"), replace(first, id="other", media=(other,))):
            engine.check(request)
            hits.append(engine.live.strategy.metrics()["prefix_cache_hits"])
        start_of_image = int(np.argmax(ids == engine.processor.image_token_id))
        shared = 0 if engine.model.config.model_type in TRANSFORMERS_BACKEND else len(ids) - 1
        assert (hits[0], hits[1]) == (0, shared)
        assert hits[2] <= start_of_image

    def test_releases_with_short_hashes_have_keys_of_images(self, engine, monkeypatch):
        monkeypatch.setattr(requests, "distinguishes_images", lambda: False)
        ids, media = engine.prompt("# What is this?", 0)
        engine.check(ask("keyed", (ids, media), n=2), ask("text", engine.prompt("a")))
        engine.live.strategy.metrics()
        other = engine.prompt("#", 3)[1]
        engine.check(ask("another", (ids, other)))
        assert engine.live.strategy.metrics()["prefix_cache_hits"] == 0

    def test_images_are_read_after_sleep(self, engine):
        engine.live.run(engine.live.strategy.sleep())
        engine.live.run(engine.live.strategy.wake())
        engine.live.publish([*engine.model.named_parameters()])
        engine.check(ask("awake", engine.prompt("What is # this?", 1)))

    def test_the_endpoint_reads_images(self, engine):
        text = "<|im_start|>user\nWhat is #?<|im_end|>\n<|im_start|>assistant\n"
        request = ask("same", engine.prompt(text, 0), temperature=0.0)
        (completion,) = engine.generate(request)
        output = completion.outputs[0]
        data = base64.b64encode(request.media[0].data).decode()

        def body(url):
            parts = [
                {"type": "text", "text": "What is "},
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "?"},
            ]
            messages = [{"role": "user", "content": parts}]
            sampling = {"temperature": 0.0, "max_tokens": len(output.token_ids), "ignore_eos": True, "logprobs": True}
            return {"model": "actor_infer", "messages": messages, **sampling}

        reply = engine.live.post("chat/completions", body(f"data:image/png;base64,{data}"))
        logprobs = [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]
        np.testing.assert_allclose(logprobs, output.logprobs, atol=CLOSE)
        assert reply["usage"]["prompt_tokens"] == len(request.prompt_ids)
        for url in ("http://127.0.0.1:9/image.png", f"{engine.folder}/image.png"):
            with pytest.raises(urllib.error.HTTPError) as error:
                engine.live.post("chat/completions", body(url))
            with error.value as refusal:
                assert refusal.code == 400
