"""Whole runs on rows with images: what is recorded, and resume."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from roll_core.runtime.records.media_folder import MediaFolder
from roll_tools.page import write_report
from shared_tests.tiny_vision import picture, tiny_vision

REWARD = """
def width_and_length(prompt, response, images):
    return images[0].width + len(response)
"""


@pytest.fixture
def images(local_runs, monkeypatch):
    """`images(pipeline, **keys)`: config of a run on 8 images of 4 sizes."""
    folder = local_runs.folder
    tiny_vision(folder / "model", "qwen2_5_vl")
    (folder / "seen_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(folder))
    rows = []
    for index in range(8):
        picture(28 * (1 + index % 2), 28 * (1 + index // 4), seed=index).save(folder / f"{index}.png")
        rows.append({"prompt": "<image>how?", "images": [f"{index}.png"], "response": str(index)})
    (folder / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(pipeline, **keys):
        config = getattr(local_runs, pipeline)(**keys)
        config |= {"pretrain": str(folder / "model"), "prompt_length": 64, "tokenizer": None, "validation": None}
        role = config["sft_train" if pipeline == "sft" else "actor_train"]
        role["model_args"] = {"dtype": "fp32"}
        role["data_args"] = {"file_name": str(folder / "seen.jsonl"), "images": "images"}
        role["training_args"] = {"learning_rate": 1e-2, "per_device_train_batch_size": 4}
        if pipeline == "rlvr":
            config["rewards"] = {"seen": {"reward": "function", "function": "seen_rewards:width_and_length"}}
        return {key: value for key, value in config.items() if value is not None}

    return make


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("pipeline", ["rlvr", "sft"])
def test_resumed_runs_with_images_equal_uninterrupted_ones(local_runs, images, pipeline):
    uninterrupted = local_runs.ok(images(pipeline, exp_name="whole", max_steps=3))
    first = local_runs.ok(images(pipeline, exp_name="halves", max_steps=3, save_steps=2))
    checkpoint = str(first.run_dir.checkpoints / "step-2")
    second = local_runs.ok(images(pipeline, exp_name="halves", max_steps=3, resume_from_checkpoint=checkpoint))
    assert local_runs.timeless(second)[2:] == local_runs.timeless(uninterrupted)[2:]
    one, other = (load_file(run.run_dir.export / "model.safetensors") for run in (uninterrupted, second))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    if pipeline == "rlvr":
        samples = rows_of(second.run_dir.samples)
        files = {(image["digest"], image["width"]) for sample in samples for image in sample["images"]}
        assert {file.name for file in second.run_dir.media.iterdir()} == {digest for digest, _ in files}
        assert {width for _, width in files} <= {28, 56}
        assert all(sample["reward"] >= sample["images"][0]["width"] for sample in samples)
        assert MediaFolder(second.run_dir.path).get(samples[0]["images"])[0].image().width in (28, 56)
        report = write_report(second.run_dir.path).read_text(encoding="utf-8")
        assert report.count("data:image/png;base64,") == len(files)
