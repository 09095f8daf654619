"""A state that one arrangement of ranks has saved is read by any other, as far as float32 rounds alike."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from megatron_programs import MIXTURE, PRELOAD, resume, save_after

from roll_core.spec.providers import TrainProvider
from roll_core.testing.bench import Case, Step
from roll_core.testing.bounds import distance
from roll_core.testing.losses import LOSSES, TRAINING
from roll_core.testing.models import QWEN3, make_batch, write_checkpoint
from roll_core.testing.ranks import RankHost, free_port
from roll_core.testing.subject import registry

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def host():
    found = RankHost(preload=PRELOAD)
    yield found
    found.close()


def case_of(model, ranks, config):
    return Case(
        provider=registry().find(TrainProvider, "megatron_train"),
        strategy_config=config,
        model=model,
        training=TRAINING,
        world_size=ranks,
        devices=("cpu",) * ranks,
        master_port=free_port(),
    )


@pytest.mark.parametrize(
    ("architecture", "saved_by", "read_by"),
    [
        pytest.param(QWEN3, (2, TP), (2, PP), id="tensor to pipeline"),
        pytest.param(MIXTURE, (2, EP), (1, {}), id="experts to one rank", marks=pytest.mark.slow),
        pytest.param(MIXTURE, (1, {}), (2, EP), id="one rank to experts", marks=pytest.mark.slow),
        pytest.param(QWEN3, (2, PP), (4, TP), id="pipeline to tensor and data", marks=pytest.mark.slow),
    ],
)
def test_another_arrangement_goes_on(host, tmp_path, architecture, saved_by, read_by):
    model = write_checkpoint(tmp_path / "model", architecture, task="causal_lm", vocab_size=61)
    steps = [Step(sequences=make_batch(61, seed=i), loss=LOSSES["sft"]) for i in range(3)]
    case = case_of(model, *saved_by)
    expected, weights = host.run(
        save_after, case, steps, str(tmp_path / "state"), num_ranks=case.world_size, timeout_s=150
    )[0]
    case = case_of(model, *read_by)
    found, again = host.run(resume, case, steps[-1], str(tmp_path / "state"), num_ranks=case.world_size, timeout_s=150)[
        0
    ]
    assert found.learning_rate == expected.learning_rate
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert distance(again, weights) < 1e-5
