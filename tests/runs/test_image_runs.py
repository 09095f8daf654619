"""Runs of prompts with images, and the guards of the engine that reads them."""

import json

import pytest
import torch

from roll_infer_hf.module_runner import ModuleRunner
from shared_tests.tiny_vision import picture, tiny_vision

GUARDS = {
    "logprob_probe": {"every": 1, "threshold": 1e-4},
    "logprob_gap": "off",
    "zero_steps": "off",
}


def of_images(runs, **keys):
    """A run of `rlvr` on rows with one image, two and none."""
    model = tiny_vision(runs.folder / "model", "qwen2_5_vl")
    for i in range(3):
        picture(56, 84 - 28 * i, seed=i).save(runs.folder / f"{i}.png")
    rows = [
        {"prompt": "<image> how many?", "image": ["0.png"]},
        {"prompt": "<image> or <image>", "image": ["1.png", "2.png"]},
        {"prompt": "no image", "image": []},
        {"prompt": "again <image>", "image": ["0.png"]},
    ]
    (runs.folder / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = runs.rlvr(max_steps=2, eval_steps=0, prompt_length=64, guards=GUARDS, pretrain=str(model), **keys)
    config.pop("tokenizer", None)
    trained = config["actor_train"]
    trained["model_args"] = {"dtype": "fp32"}
    trained["data_args"] = {"file_name": str(runs.folder / "images.jsonl"), "images": "image"}
    return config


def test_trainer_and_engine_agree_on_tokens_after_images(local_runs):
    lines = local_runs.metrics(local_runs.ok(of_images(local_runs)))
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)


@pytest.mark.parametrize("fault", ["positions", "pixels"])
def test_probe_finds_an_engine_that_reads_images_wrongly(local_runs, monkeypatch, fault):
    inputs = ModuleRunner._image_inputs

    def faulty(self, cohort, tokens_NL, media_N):
        made = inputs(self, cohort, tokens_NL, media_N)
        if fault == "positions":
            cohort.shifts_AN1 = torch.zeros_like(cohort.shifts_AN1)
        else:
            features = made["mm_encoder_outputs"]["image"]
            features.pooler_output = tuple(torch.zeros_like(each) for each in features.pooler_output)
        return made

    monkeypatch.setattr(ModuleRunner, "_image_inputs", faulty)
    result = local_runs.run(of_images(local_runs))
    assert "logprob_probe" in str(result.error)
