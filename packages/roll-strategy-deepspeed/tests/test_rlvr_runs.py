"""GRPO with DeepSpeed: the quick start with one worker for each role."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.engine("deepspeed"),
    pytest.mark.timeout(1500),
]

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
SHORT = (
    "max_steps=2",
    "eval_steps=0",
    "rollout_batch_size=8",
    "num_return_sequences_in_group=4",
    "actor_train.training_args.per_device_train_batch_size=16",
    "guards.logprob_probe={every: 1, action: error, threshold: 1e-4}",
    "guards.logprob_gap={action: error, threshold: 1e-4}",
)


def roll_core(*arguments: object) -> None:
    command = [sys.executable, "-m", "roll_core", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder with a model that is right now and then."""
    folder = tmp_path_factory.mktemp("sft")
    subprocess.run([sys.executable, str(QUICKSTART / "make_data.py")], cwd=REPOSITORY, check=True)
    roll_core("run", QUICKSTART / "sft.yaml", f"output_dir={folder}", "max_steps=100", "eval_steps=0")
    return folder / "quickstart-sft" / "latest" / "export"


@pytest.mark.parametrize("transport", ["shm", pytest.param("disk", marks=pytest.mark.slow)])
def test_weights_reach_an_engine_in_a_process_of_its_own(taught, tmp_path, transport):
    """Nobody says that there have to be two: DeepSpeed's weights do not travel within one."""
    (tmp_path / "weights").mkdir()
    roll_core(
        "run",
        QUICKSTART / "grpo.yaml",
        f"output_dir={tmp_path}",
        f"pretrain={taught}",
        "actor_train.strategy_args.strategy_name=deepspeed_train",
        *SHORT,
        *([f"model_update_dir={tmp_path}/weights"] if transport == "disk" else []),
    )
    run = tmp_path / "quickstart-grpo" / "latest"
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert record["executor"] == "ray"
    assert record["weight_transports"] == {"actor_train -> actor_infer": transport}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line["step"]]
    assert [line["actor/grad_norm"] > 0 for line in steps] == [True, True]
    assert [line["weight_sync/version"] for line in steps if "weight_sync/version" in line][-1] > 0
    assert list((tmp_path / "weights").iterdir()) == []
