"""Whole runs on rows with images: their numbers, records and resume, and the guards of the engine that reads images."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification, AutoTokenizer

from roll_core.config import load
from roll_core.errors import ConfigError, UnsupportedError
from roll_core.runtime.records.media_folder import MediaFolder
from roll_infer_hf.module_runner import ModuleRunner
from roll_testing.image_models import tiny_vision
from roll_tools.page import write_report
from shared_tests.tiny_vision import picture, transformers_logits, transformers_logprobs, vision_sequence

GUARDS = {
    "logprob_probe": {"every": 1, "threshold": 1e-4},
    "logprob_gap": "off",
    "zero_steps": "off",
}
REWARD = """
def width_and_length(prompt, response, images):
    return images[0].width + len(response)
"""
TRAINED = {"sft": "sft_train", "reward_model": "reward_train"}
"""Name of the trained role; otherwise `actor_train`."""
SIZES = [(28 * (1 + index % 2), 28 * (1 + index // 4)) for index in range(8)]
USER = "<|im_start|>user\n\ufffchow?<|im_end|>\n<|im_start|>assistant\n"
"""Rendered prompt of each row, with U+FFFC for its image."""


def of_model(folder):
    return {
        "model_args": {"dtype": "fp32", "model_name_or_path": str(folder)},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": [0],
    }


@pytest.fixture
def images(local_runs, monkeypatch):
    """`images(pipeline, **keys)`: config of a run on 8 images of 4 sizes."""
    folder = local_runs.folder
    (folder / "seen_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(folder))
    rows = []
    for index, size in enumerate(SIZES):
        picture(*size, seed=index).save(folder / f"{index}.png")
        texts = {"response": str(index), "chosen": str(index), "rejected": "no"}
        rows.append({"prompt": "<image>how?", "images": [f"{index}.png"], "tag": "seen", **texts})
    (folder / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(pipeline, model_type="qwen2_5_vl", **keys):
        if not (folder / "model").exists():
            tiny_vision(folder / "model", model_type)
        made = local_runs.preference(pipeline) if pipeline == "reward_model" else getattr(local_runs, pipeline)(**keys)
        config = made | {"pretrain": str(folder / "model"), "prompt_length": 64, "tokenizer": None, **keys}
        data = {"file_name": str(folder / "seen.jsonl"), "images": "images"}
        role = config[TRAINED.get(pipeline, "actor_train")]
        role["model_args"] = {"dtype": "fp32"}
        role["data_args"] = data
        role["training_args"] = {"learning_rate": 1e-2, "per_device_train_batch_size": 4}
        config["validation"] = {"data_args": dict(data)} if "eval_steps" in keys else None
        if pipeline == "rlvr":
            config["rewards"] = {"seen": {"reward": "function", "function": "seen_rewards:width_and_length"}}
        if pipeline == "distill":
            config["teachers"] = {"main": of_model(tiny_vision(folder / "teacher", model_type, seed=9))}
        return {key: value for key, value in config.items() if value is not None} | keys

    return make


def sequences(folder, response):
    """The row of each image as a sequence with a trained response."""
    return [
        vision_sequence(folder, USER, response(index), picture(*size, seed=index)) for index, size in enumerate(SIZES)
    ]


def response_sums(folder, response):
    """Sum of the logprobs of each response, by transformers."""
    rows = sequences(folder, response)
    with torch.no_grad():
        logprobs = transformers_logprobs(folder, rows)
    lengths = [len(row) for row in rows]
    return [
        float(row_T[torch.from_numpy(row.loss_mask)].sum())
        for row, row_T in zip(rows, logprobs.split(lengths), strict=True)
    ]


def rows_of(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_preferences_have_the_logprobs_of_transformers(local_runs, images):
    reference = of_model(local_runs.folder / "model")
    result = local_runs.ok(images("preference", reference=reference, max_steps=2, eval_steps=2))
    first, *_, last = local_runs.metrics(result)
    for name, response in (("chosen", "{}<|im_end|>"), ("rejected", "no<|im_end|>")):
        expected = np.mean(response_sums(local_runs.folder / "model", response.format))
        assert first[f"val/logps/{name}"] == pytest.approx(expected, abs=1e-4)
    assert first["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["val/loss"] < first["val/loss"]


def test_reward_model_learns_from_images(local_runs, images):
    result = local_runs.ok(images("reward_model", "gemma3", max_steps=6, eval_steps=6))
    first, *_, last = local_runs.metrics(result)
    assert last["val/loss"] < first["val/loss"]
    export = result.run_dir.export
    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32).eval()
    with torch.no_grad():
        chosen, rejected = (
            np.array([float(transformers_logits(export, row, model)) for row in sequences(export, response)])
            for response in ("{}<|im_end|>".format, "no<|im_end|>".format)
        )
    assert last["val/loss"] == pytest.approx(np.log1p(np.exp(rejected - chosen)).mean(), abs=1e-5)


def test_reward_model_without_a_stored_form_is_refused(local_runs, images):
    assert isinstance(local_runs.run(images("reward_model")).error, UnsupportedError)
    with pytest.raises(ConfigError) as caught:
        load(local_runs.folder / "reward_model.yaml", (), local_runs.registry, needs=True)
    (problem,) = caught.value.problems
    assert (problem.key, problem.code) == ("pretrain", "ROLL-C018")


def test_distillation_has_the_divergence_of_transformers(local_runs, images):
    folder = local_runs.folder
    keys = {"distill_data": "dataset", "kd_support": "full", "num_return_sequences_in_group": 1}
    config = images("distill", max_steps=2, rollout_batch_size=8, **keys)
    config["actor_train"]["training_args"]["per_device_train_batch_size"] = 8
    lines = local_runs.metrics(local_runs.ok(config))
    divergences = []
    for row in sequences(folder / "model", "{}<|im_end|>".format):
        with torch.no_grad():
            teacher_LV, student_LV = (
                torch.log_softmax(transformers_logits(folder / name, row), -1) for name in ("teacher", "model")
            )
        trained = np.flatnonzero(row.loss_mask) - 1
        divergences.append((teacher_LV.exp() * (teacher_LV - student_LV)).sum(-1)[trained])
    assert lines[0]["actor/divergence"] == pytest.approx(float(torch.cat(divergences).mean()), abs=1e-5)
    assert lines[1]["actor/divergence"] < lines[0]["actor/divergence"]


def test_judge_replies_as_transformers_about_the_image(local_runs, images):
    folder = tiny_vision(local_runs.folder / "judge", "llava", seed=5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    # Digit i is likely after image i, and the end of the reply after a digit.
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    with torch.no_grad():
        states_IH, ends_IH = (
            torch.stack([transformers_logits(folder, row, model)[-1] for row in sequences(folder, reply)])
            for reply in ("".format, "{}".format)
        )
        head.weight.zero_()
        head.weight[tokenizer.encode("01234567")] = states_IH - states_IH.mean(0)
        head.weight[tokenizer.encode("<|im_end|>")] = ends_IH.mean(0) - states_IH.mean(0)
    model.lm_head = head
    model.save_pretrained(folder)
    judge = of_model(folder) | {
        "reward": "judge_model",
        "judge_prompt": "{prompt}{response}",
        "judge_scale": "score",
        "score_pattern": "([0-9])",
        "score_range": [0, 9],
        "max_tokens": 6,
    }
    config = images("rlvr", max_steps=2, rewards={"seen": judge}, guards={"reward_failures": "off"})
    samples = [sample for sample in rows_of(local_runs.ok(config).run_dir.samples) if "<|" not in sample["response"]]
    for sample in samples[::3]:
        index = int(sample["metadata"]["response"])
        prompt, image = USER.replace("how?", f"how?{sample['response']}"), picture(*SIZES[index], seed=index)
        reply = ""
        while len(reply) < 6 and not reply.endswith("<|im_end|>"):
            logits_LV = transformers_logits(folder, vision_sequence(folder, prompt, reply, image), model)
            reply += tokenizer.decode(int(logits_LV[-1].argmax()))
        digits = reply.removesuffix("<|im_end|>")
        if digits in ("", reply):
            assert sample["reward"] is None
        else:
            assert (sample["reward"], sample["detail"]["reply"]) == (pytest.approx(int(digits[-1]) / 9), digits)
    assert len({sample["reward"] for sample in samples}) > 2


# -- resume ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["rlvr", "sft", "distill"])
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


# -- guards ------------------------------------------------------------------------------------------------------------


def of_images(runs, **keys):
    """A run of `rlvr` on rows with one image, two and none, and with a video."""
    model = tiny_vision(runs.folder / "model", "qwen2_5_vl")
    for i in range(3):
        picture(56, 84 - 28 * i, seed=i).save(runs.folder / f"{i}.png")
        picture(28, 56, seed=i).save(runs.folder / f"frame {i}.png")
    rows = [
        {"prompt": "<image> how many?", "image": ["0.png"]},
        {"prompt": "<image> or <image>", "image": ["1.png", "2.png"]},
        {"prompt": "no image", "image": []},
        {"prompt": "see <video> and <image>", "image": ["0.png"], "video": [[f"frame {i}.png" for i in (2, 0, 1, 0)]]},
    ]
    (runs.folder / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = runs.rlvr(max_steps=2, eval_steps=0, prompt_length=64, guards=GUARDS, pretrain=str(model), **keys)
    config.pop("tokenizer", None)
    trained = config["actor_train"]
    trained["model_args"] = {"dtype": "fp32"}
    trained["data_args"] = {"file_name": str(runs.folder / "images.jsonl"), "images": "image", "videos": "video"}
    return config


def test_trainer_and_engine_agree_on_tokens_after_images(local_runs):
    result = local_runs.ok(of_images(local_runs))
    lines = local_runs.metrics(result)
    assert all(line["weight_sync/logprob_probe"] < 1e-4 for line in lines)
    assert all(line["actor/logprob_gap"] < 1e-4 for line in lines)
    media = {image["digest"]: image for sample in rows_of(result.run_dir.samples) for image in sample.get("images", ())}
    (video,) = (item for item in media.values() if "frames" in item)
    assert video["frames"] == {"indices": [0, 1, 2, 3], "num_frames": 4, "fps": 2.0}
    (restored,) = MediaFolder(result.run_dir.path).get([video])
    assert [image.tobytes() for image in restored.images()] == [picture(28, 56, seed=i).tobytes() for i in (2, 0, 1, 0)]
    report = write_report(result.run_dir.path).read_text(encoding="utf-8")
    assert report.count("data:image/png;base64,") == len(media)  # of the video, its first frame


@pytest.mark.slow
def test_frozen_parts_are_sent_once(sockets):
    config = of_images(sockets) | {"executor": "sockets", "max_steps": 3}
    config["actor_infer"] |= {"device_mapping": [1]}  # engines on the trainer's slots sleep, and receive all again
    lines = sockets.metrics(sockets.ok(config))
    tensors = load_file(sockets.folder / "model" / "model.safetensors")
    total = sum(tensor.nbytes for tensor in tensors.values())
    frozen = sum(tensor.nbytes for name, tensor in tensors.items() if "visual" in name)
    assert [line["weight_sync/copied_bytes"] for line in lines] == [total, total - frozen, total - frozen]
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
