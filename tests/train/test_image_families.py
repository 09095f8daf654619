"""Further families of models with images: numbers of transformers, a step of all parts, and what is published."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.errors import UnsupportedError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_modeling.model import load_model
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from roll_testing.image_models import FAMILIES, tiny_vision
from shared_tests.tiny_vision import transformers_logprobs, vision_batch

WITH_TORCHVISION = "mistral3"
"""Its processor imports torchvision, which is stood in for in a process of its own."""


def trainer(folder: Path) -> HFTrainStrategy:
    strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-2, num_steps=3))
    strategy.build(ModelSpec(path=str(folder), dtype="fp32", freeze=()), MeshInfo(role="actor_train", num_threads=1))
    return strategy


def check_family(folder: Path, model_type: str) -> None:
    """Logprobs, gradients and exported weights of packed rows are those of transformers, with a row at a time."""
    rows = vision_batch(tiny_vision(folder, model_type))
    strategy = trainer(folder)
    try:
        logprobs_T = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
        model = load_model(strategy.spec)
        expected_T = transformers_logprobs(folder, rows, model)
        torch.testing.assert_close(logprobs_T, expected_T.detach(), rtol=0, atol=1e-5)
        mask_T = torch.cat([torch.from_numpy(row.loss_mask) for row in rows])
        (-(expected_T * mask_T).sum() / mask_T.sum()).backward()
        norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
        strategy.forward_backward(pack(rows), sft_objective())
        assert strategy.optimizer_step().grad_norm == pytest.approx(float(norm), rel=1e-4)
        exported = dict(strategy.export_weights())
        model.load_state_dict(exported, strict=False)
        assert exported.keys() == dict(model.named_parameters()).keys()
        with torch.no_grad():
            after_T = transformers_logprobs(folder, rows, model)
        found_T = strategy.forward(pack(rows)[0], WantedOutputs(logprobs=True)).logprobs_T
        torch.testing.assert_close(found_T, after_T, rtol=0, atol=1e-5)
        assert not torch.allclose(after_T, expected_T, atol=1e-2)
    finally:
        strategy.close()


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != WITH_TORCHVISION])
def test_numbers_with_images_are_those_of_transformers(tmp_path, model_type):
    check_family(tmp_path, model_type)


@pytest.mark.slow
def test_mistral3_reads_images_with_torchvision(tmp_path):
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, tmp_path], check=True, timeout=300, env=variables)


def test_text_that_attends_to_later_text_is_refused(tmp_path):
    """PaliGemma attends in both directions up to the response, whose begin the model does not know."""
    strategy = trainer(tiny_vision(tmp_path, "paligemma"))
    try:
        with raises_error(UnsupportedError, "later"):
            strategy.forward(pack(vision_batch(tmp_path))[0], WantedOutputs(logprobs=True))
    finally:
        strategy.close()


if __name__ == "__main__":
    import shared_tests

    sys.path.insert(0, str(Path(shared_tests.__file__).parents[1] / "stand_ins"))
    check_family(Path(sys.argv[1]), WITH_TORCHVISION)
