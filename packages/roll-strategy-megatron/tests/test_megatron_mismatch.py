"""Causes planted into Megatron's trainer or the engine beside it: `roll-core doctor mismatch` names each first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("roll_infer_hf")
from megatron_programs import MIXTURE

from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_core.types import SamplingParams
from roll_infer_hf.engine import HFInferStrategy
from roll_strategy_megatron.strategy import MegatronStrategy
from roll_testing.models import QWEN3, write_checkpoint
from roll_tools.mismatch_experiments import Pair
from roll_tools.mismatch_sides import Part

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
]
"""Megatron warns of its own options."""
SHAPES = {"dense": QWEN3, "mixture": MIXTURE}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import megatron_on_cpu  # noqa: F401 - importing it is what counts

    folder = tmp_path_factory.mktemp("mismatch")
    extra = {"max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 1}
    return {
        name: write_checkpoint(folder / name, {**shape, **extra}, task="causal_lm", vocab_size=64)
        for name, shape in SHAPES.items()
    }


def examine(spec, *, engine=None, **params):
    registry, rng = load_registry(), np.random.default_rng(0)
    return Pair(
        trainer=Part(provider=registry.find(TrainProvider, "megatron_train"), config={}, model=spec, key="actor_train"),
        engine=Part(
            provider=registry.find(InferProvider, "hf_infer"),
            config={"kernels": "torch"},
            model=replace(spec, **(engine or {})),
            key="actor_infer",
        ),
        params=SamplingParams(**{"max_new_tokens": 16, "temperature": 1.0, "ignore_eos": True, **params}),
        prompts=[rng.integers(3, 60, length) for length in (5, 9, 30)],
    ).diagnose()


def trainer_module(change):
    """`change` is called for each module of Megatron's model."""

    def plant(patch):
        build = MegatronStrategy.build

        def built(self, *arguments):
            build(self, *arguments)
            for chunk in self.runs:
                for name, module in chunk.named_modules():
                    change(name, module)

        patch.setattr(MegatronStrategy, "build", built)

    return plant


def engine_request(change):
    def plant(patch):
        generate = HFInferStrategy.generate
        patch.setattr(HFInferStrategy, "generate", lambda self, request: generate(self, change(request)))

    return plant


def epsilon(name, module):
    if hasattr(module, "eps"):
        module.eps = 0.05


def hotter(request):
    return request if request.prompt_logprobs else replace(request, params=replace(request.params, temperature=0.8))


def truncated(request):
    return replace(request, prompt_ids=request.prompt_ids[-8:])


PLANTS = {
    "nothing": ("", lambda patch: None, {}, "dense"),
    "nothing in a mixture": ("", lambda patch: None, {}, "mixture"),
    "engine in bf16": ("arithmetic.dtype", lambda patch: None, {"engine": {"dtype": "bf16"}}, "dense"),
    "other temperature": ("sampling.temperature", engine_request(hotter), {}, "dense"),
    "truncated prompt": ("inputs.truncation", engine_request(truncated), {}, "dense"),
    "trainer's epsilon": ("model.norm_epsilon", trainer_module(epsilon), {}, "dense"),
}


@pytest.mark.parametrize("case", PLANTS)
def test_planted_cause_beside_megatron_is_the_first(models, monkeypatch, case):
    expected, plant, keys, shape = PLANTS[case]
    plant(monkeypatch)
    diagnosis = examine(models[shape], **keys)
    assert (diagnosis.causes[0].name if diagnosis.causes else "") == expected, diagnosis
