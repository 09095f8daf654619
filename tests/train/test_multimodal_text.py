"""Models that also take images are trained on text."""

from __future__ import annotations

import json

import pytest
import torch

from roll_core.algorithms.losses import ValueObjective, sft_objective
from roll_core.data.pack import pack
from roll_core.spec.model import LoraSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.model import load_model
from roll_testing.models import make_batch
from shared_tests.tiny_architectures import MULTIMODAL, write_multimodal

DECAY = TrainingSpec(learning_rate=1e-2, num_steps=100, weight_decay=0.1)


def reference(path, sequences):
    """Logprob of each token by the model of transformers, one sequence at a time."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    found = []
    for each in sequences:
        tokens = torch.from_numpy(each.tokens)
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0], dim=-1)
        found.append(torch.cat([torch.zeros(1), logp[:-1].gather(1, tokens[1:, None])[:, 0]]))
    return torch.cat(found)


def step(strategy, sequences, loss=None):
    """Names of the parameters that an optimizer step changed."""
    before = {name: each.detach().clone() for name, each in strategy.model.named_parameters()}
    strategy.forward_backward(pack(sequences), loss or sft_objective())
    strategy.optimizer_step()
    return {name for name, each in strategy.model.named_parameters() if not torch.equal(each, before[name])}


def of_language_model(strategy):
    """Names of the parameters that a text passes."""
    names = (name for name, _ in strategy.model.named_parameters())
    return {name for name in names if "language_model" in name or name.startswith("lm_head")}


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_text_logprobs_equal_transformers_and_only_llm_trains(build, tmp_path, model_type):
    spec, sequences = write_multimodal(tmp_path / "model", model_type), make_batch(61)
    settings = {"image_std": [0.5, 0.5, 0.5]}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    strategy = build(path=spec.path, training=DECAY)
    assert strategy.task_model.backbone.flat is (model_type != "qwen3_5")  # has recurrent layers
    found = strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(found, reference(spec.path, sequences), rtol=0, atol=1e-5)

    assert step(strategy, sequences) == of_language_model(strategy)
    assert len(of_language_model(strategy)) < len(list(strategy.model.named_parameters()))

    strategy.export_model(tmp_path / "export")
    trained = strategy.forward(pack(sequences)[0], WantedOutputs(logprobs=True)).logprobs_T
    torch.testing.assert_close(reference(tmp_path / "export", sequences), trained, rtol=0, atol=1e-5)
    assert json.loads((tmp_path / "export" / "preprocessor_config.json").read_text()) == settings


def test_critic_of_a_vision_model_trains_llm_and_head(build, tmp_path):
    spec = write_multimodal(tmp_path, "qwen3_vl")
    strategy = build(path=spec.path, task="value", training=DECAY)
    assert step(strategy, make_batch(61), ValueObjective(value_clip=0.3)) == of_language_model(strategy)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj",), ".*q_proj"])
def test_adapters_are_added_to_the_language_model_alone(build, tmp_path, targets):
    spec = write_multimodal(tmp_path, "gemma3")
    lora = LoraSpec(targets=targets, rank=2, alpha=4.0)
    strategy = build(path=spec.path, training=DECAY, lora=lora)
    adapters = [name for name, _ in strategy.model.named_parameters() if ".lora_" in name]
    assert adapters
    assert all("language_model" in name for name in adapters)
    assert any("vision_tower" in name and "q_proj" in name for name, _ in strategy.model.named_parameters())
    assert step(strategy, make_batch(61)) <= set(adapters)


def test_the_weights_equal_those_that_transformers_loads(tmp_path):
    from transformers import AutoModelForImageTextToText

    spec = write_multimodal(tmp_path, "mistral3")
    found = dict(load_model(spec).named_parameters())
    for name, each in AutoModelForImageTextToText.from_pretrained(spec.path).named_parameters():
        assert torch.equal(found.pop(name), each)
    assert not found
