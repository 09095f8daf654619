"""The contract of train strategies. Without megatron-core only what needs none of it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from megatron_programs import MIXTURE, PRELOAD

from roll_testing import TrainStrategyConformance
from roll_testing.models import QWEN3, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import Task
    from roll_testing.bench import Case


class TestDataParallel(TrainStrategyConformance):
    """Two ranks that share the batch and the optimizer's state."""

    name = "megatron_train"
    world_sizes = (2,)
    preload = PRELOAD


@pytest.mark.slow
class TestOneRank(TrainStrategyConformance):
    """A rank that shares nothing. In CI, `test_arrangements` trains some and `test_state` resumes one."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {"one": {}}  # noqa: RUF012
    ranks_of = {"one": (1,)}  # noqa: RUF012


@pytest.mark.slow
class TestOverlapped(TrainStrategyConformance):
    """Two replicas that add gradients up during the last backward pass, and checkpoints that are written later."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {  # noqa: RUF012
        "one": {},
        "overlapped": {"overlap_grad_reduce": True, "ddp_bucket_size": 2000, "async_save_ckpt": True},
    }
    ranks_of = {"one": (1,), "overlapped": (2,)}  # noqa: RUF012


@pytest.mark.brief
class TestScoring(TrainStrategyConformance):
    """The twin without optimizer, over two tensor parallel ranks."""

    name = "megatron_infer"
    preload = PRELOAD
    variants = {"one": {}, "tp2": {"tensor_model_parallel_size": 2}}  # noqa: RUF012
    ranks_of = {"one": (1,), "tp2": (2,)}  # noqa: RUF012


@pytest.mark.slow
class TestTensorParallel(TrainStrategyConformance):
    """Two ranks that share each layer, and activations between the layers; two such replicas."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {"one": {}, "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}  # noqa: RUF012
    ranks_of = {"one": (1,), "tp2-sp": (2, 4)}  # noqa: RUF012
    parallelism = {"tensor_parallel": "tp2-sp"}  # noqa: RUF012


@pytest.mark.slow
class TestTransformerEngine(TrainStrategyConformance):
    """Layers of what stands for Transformer Engine's modules, on one rank and on two that share each of them."""

    name = "megatron_train"
    preload = ("engine_on_cpu", *PRELOAD)
    variants = {  # noqa: RUF012
        "one": {"transformer_impl": "transformer_engine"},
        "tp2-sp": {
            "transformer_impl": "transformer_engine",
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    }
    ranks_of = {"one": (1,), "tp2-sp": (2,)}  # noqa: RUF012
    parallelism = {"tensor_parallel": "tp2-sp"}  # noqa: RUF012


@pytest.mark.slow
class TestPipelineParallel(TrainStrategyConformance):
    """Two stages."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {"one": {}, "pp2": {"pipeline_model_parallel_size": 2}}  # noqa: RUF012
    ranks_of = {"one": (1,), "pp2": (2,)}  # noqa: RUF012
    parallelism = {"pipeline_parallel": "pp2"}  # noqa: RUF012


@pytest.mark.slow
class TestInterleavedPipeline(TrainStrategyConformance):
    """Two stages with two runs of layers each."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {  # noqa: RUF012
        "one": {},
        "pp2-vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    }
    ranks_of = {"one": (1,), "pp2-vpp2": (2,)}  # noqa: RUF012
    parallelism = {"pipeline_parallel": "pp2-vpp2"}  # noqa: RUF012

    def model(self, task: Task, folder: Path) -> ModelSpec:
        """Of four layers, one for each run."""
        return write_checkpoint(folder, QWEN3 | {"num_hidden_layers": 4}, task=task, vocab_size=self.vocab_size)


@pytest.mark.slow
class TestContextParallel(TrainStrategyConformance):
    """Two ranks that share each sequence."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {"one": {}, "cp2": {"context_parallel_size": 2}}  # noqa: RUF012
    ranks_of = {"one": (1,), "cp2": (2,)}  # noqa: RUF012
    parallelism = {"context_parallel": "cp2"}  # noqa: RUF012


@pytest.mark.slow
class TestTensorByPipelineParallel(TrainStrategyConformance):
    """Two stages of two ranks that share each layer, and activations between the layers."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {  # noqa: RUF012
        "one": {},
        "tp2-pp2": {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
        },
    }
    ranks_of = {"one": (1,), "tp2-pp2": (4,)}  # noqa: RUF012
    parallelism = {"tensor_parallel": "tp2-pp2", "pipeline_parallel": "tp2-pp2"}  # noqa: RUF012


@pytest.mark.slow
class TestTensorByContextParallel(TrainStrategyConformance):
    """Two ranks that share each layer for each half of a sequence."""

    name = "megatron_train"
    preload = PRELOAD
    variants = {  # noqa: RUF012
        "one": {},
        "tp2-cp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    }
    ranks_of = {"one": (1,), "tp2-cp2": (4,)}  # noqa: RUF012
    parallelism = {"tensor_parallel": "tp2-cp2", "context_parallel": "tp2-cp2"}  # noqa: RUF012


class OfMixtures(TrainStrategyConformance):
    """What is different where tokens choose experts."""

    name = "megatron_train"
    preload = PRELOAD

    def model(self, task: Task, folder: Path) -> ModelSpec:
        """A mixture."""
        return write_checkpoint(folder, MIXTURE, task=task, vocab_size=self.vocab_size)

    @pytest.mark.xfail(
        reason="rounded to bf16, some tokens choose other experts than the reference's: hf_train is 0.07 off, too",
        strict=True,
        raises=AssertionError,
    )
    def test_the_gradient_in_lower_precision_stays_in_bounds(self, case: Case, low_dtype: str) -> None:
        """The bound is for models without such choices."""
        super().test_the_gradient_in_lower_precision_stays_in_bounds(case, low_dtype)

    def test_without_a_choice_it_stays_in_bounds(self, case: Case, low_dtype: str, tmp_path: Path) -> None:
        """The same of a mixture whose tokens go to all experts."""
        everything = MIXTURE | {"num_experts_per_tok": MIXTURE["num_experts"]}
        model = write_checkpoint(tmp_path, everything, task="causal_lm", vocab_size=self.vocab_size)
        super().test_the_gradient_in_lower_precision_stays_in_bounds(case.with_(model=model), low_dtype)


@pytest.mark.slow
class TestExpertParallel(OfMixtures):
    """Two ranks with half of the experts each."""

    variants = {"one": {}, "ep2": {"expert_model_parallel_size": 2}}  # noqa: RUF012
    ranks_of = {"one": (1,), "ep2": (2,)}  # noqa: RUF012
    parallelism = {"expert_parallel": "ep2"}  # noqa: RUF012


@pytest.mark.slow
class TestExpertByPipelineParallel(OfMixtures):
    """Two stages of two ranks with half of their layers' experts each."""

    variants = {  # noqa: RUF012
        "one": {},
        "ep2-pp2": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    }
    ranks_of = {"one": (1,), "ep2-pp2": (4,)}  # noqa: RUF012
    parallelism = {"expert_parallel": "ep2-pp2", "pipeline_parallel": "ep2-pp2"}  # noqa: RUF012
