"""The fragments in `defaults:`, as DeepSpeed's users write them. No DeepSpeed is needed to check a config."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_strategy_deepspeed.config import DeepSpeedConfig
from roll_strategy_deepspeed.plugin import FRAGMENTS

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
REGISTRY = load_registry()
STAGES = {"deepspeed_zero": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3, "deepspeed_zero3_cpuoffload": 3}
RUN = """\
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  model_args: {model_name_or_path: some/model}
  device_mapping: [0, 1]
  strategy_args:
    strategy_name: deepspeed_train
"""
BY_NAME = "defaults: [NAME, _self_]\n" + RUN + "    strategy_config: ${NAME}\n"
AS_IN_ROLL = "defaults:\n  - ../config/NAME@_here_\n" + RUN + "    strategy_config: ${NAME}\n"
INTO_THE_ROLE = "defaults:\n  - NAME@sft_train.strategy_args.strategy_config\n  - _self_\n" + RUN


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def strategy_config(path, *overrides: str) -> DeepSpeedConfig:
    role = load(path, list(overrides), REGISTRY).config.sft_train
    return DeepSpeedConfig.model_validate(role.strategy_args.strategy_config)


def test_every_fragment_is_for_a_stage():
    assert FRAGMENTS.keys() == STAGES.keys()


@pytest.mark.parametrize("idiom", [BY_NAME, AS_IN_ROLL, INTO_THE_ROLE], ids=["by name", "as in ROLL", "into the role"])
@pytest.mark.parametrize("name", STAGES)
def test_a_fragment_gives_a_role_its_stage(write, name, idiom):
    zero = strategy_config(write(idiom.replace("NAME", name))).zero_optimization
    assert zero.stage == STAGES[name]
    on_host = "cpu" if name.endswith("cpuoffload") else "none"
    assert (zero.offload_optimizer.device, zero.offload_param.device) == (on_host, on_host)


@pytest.mark.parametrize(
    "override",
    [
        "deepspeed_zero3.zero_optimization.contiguous_gradients=false",
        "sft_train.strategy_args.strategy_config.zero_optimization.contiguous_gradients=false",
    ],
)
def test_command_line_overrides_a_fragments_key(write, override):
    zero = strategy_config(write(BY_NAME.replace("NAME", "deepspeed_zero3")), override).zero_optimization
    assert (zero.stage, zero.contiguous_gradients) == (3, False)


def test_a_file_of_the_users_of_that_name_comes_first(write, tmp_path):
    (tmp_path / "deepspeed_zero3.yaml").write_text("deepspeed_zero3: {zero_optimization: {stage: 2}}\n", "utf-8")
    assert strategy_config(write(BY_NAME.replace("NAME", "deepspeed_zero3"))).zero_optimization.stage == 2


def test_mistake_is_located_in_the_fragment_and_its_use(write, tmp_path):
    own = "# mine\ndeepspeed_zero3:\n  zero_optimization:\n    stage: 4\n"
    (tmp_path / "deepspeed_zero3.yaml").write_text(own, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(write(BY_NAME.replace("NAME", "deepspeed_zero3")), [], REGISTRY)
    (problem,) = caught.value.problems
    assert problem.where.endswith("run.yaml:9:5")
    assert "deepspeed_zero3.yaml:4:12" in str(problem)


def test_command_line_mistake_is_not_located_in_the_fragment(write):
    override = "sft_train.strategy_args.strategy_config.zero_optimization.stage=7"
    with pytest.raises(ConfigError) as caught:
        load(write(BY_NAME.replace("NAME", "deepspeed_zero3")), [override], REGISTRY)
    (problem,) = caught.value.problems
    assert problem.where == "command line"
    assert "deepspeed_zero3.yaml" not in str(problem)


def test_quick_start_is_valid_with_fragments_without_deepspeed(tmp_path):
    for each in QUICKSTART.glob("*.yaml"):
        shutil.copy(each, tmp_path)
    text = (QUICKSTART / "grpo.yaml").read_text(encoding="utf-8")
    for name in STAGES:
        variant = tmp_path / f"grpo-{name}.yaml"
        variant.write_text(text.replace("  - model\n", f"  - model\n  - {name}\n"), encoding="utf-8")
        code = (
            "import sys; sys.modules['deepspeed'] = None\n"
            "from roll_core.cli.main import main\n"
            f"code = main(['check', '--no-files', {str(variant)!r},"
            " 'actor_train.strategy_args.strategy_name=deepspeed_train',"
            f" 'actor_train.strategy_args.strategy_config=${{{name}}}'])\n"
            "assert 'torch' not in sys.modules\n"
            "sys.exit(code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=QUICKSTART.parents[1], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
