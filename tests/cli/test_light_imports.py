"""What the quick commands import, asked of a subprocess."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.run.run_saver import SavedRun
from shared_tests.hf_plugins import HF_PACKAGES

HEAVY = ("torch", "ray", "transformers", "datasets")
ASK = """
import contextlib, io, json, sys
from roll_core.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    try:
        code = main({arguments!r})
    except SystemExit as ended:
        code = ended.code
print(json.dumps([code, sorted(sys.modules)]))
"""
SFT = """\
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
RANDOM = """\
pipeline: sft
tokenizer: {kind: byte}
sft_train:
  model_args: {random_init: {model_type: qwen3, hidden_size: 64, num_hidden_layers: 2}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
RLVR = """\
defaults: [common, _self_]
pipeline: rlvr
save_steps: ${seed}
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards:
  math: {reward: math_rule}
  code: {reward: function, function: "mine:score"}
"""
THEIRS = """\
defaults: [common]
sequence_length: 2048
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
NEWER = 5 * (sys.version_info >= (3, 12))
"""Modules that those of Python 3.12 and 3.13 import besides."""

CASES = {
    # arguments, forbidden besides HEAVY, budget of modules
    "version": (["--version"], ("pluggy", "pydantic", "yaml", "rich", "hydra", "omegaconf"), 110),
    "help": (["--help"], ("pluggy", "pydantic", "yaml", "rich", "hydra", "omegaconf"), 110),
    "help of check": (["check", "--help"], ("pluggy", "pydantic", "yaml", "hydra", "omegaconf"), 130),
    "help of runs": (["runs", "--help"], ("pydantic", "yaml", "rich", "hydra", "omegaconf"), 220),
    "doctor": (["doctor"], ("hydra", "omegaconf", "numpy"), 440),
    "plugins": (["plugins"], ("pydantic", "yaml", "rich", "hydra", "omegaconf"), 220),
    "plugins --json": (["plugins", "--json"], ("pydantic", "yaml", "rich", "hydra", "omegaconf"), 220),
    "check": (["check", "plain.yaml"], ("rich", "hydra", "omegaconf", "numpy"), 354),
    "plan": (["plan", "random.yaml"], ("hydra", "omegaconf", "numpy"), 450),
    "check with a mistake": (["check", "wrong.yaml"], ("rich", "hydra", "omegaconf", "numpy"), 355),
    "run with a mistake in its rows": (["run", "wrong_rows.yaml"], ("rich", "hydra", "omegaconf", "numpy"), 400),
    "checkpoint list": (["checkpoint", "list", "run"], ("rich", "hydra", "omegaconf", "numpy"), 280),
    "help of import": (["import", "roll", "--help"], ("rich", "hydra", "omegaconf"), 353),
    "import of a config with fragments": (["import", "roll", "theirs.yaml", "-o", "ours.yaml"], ("rich", "numpy"), 650),
    "check of fragments and overrides": (["check", "composed.yaml", "seed=3"], ("numpy",), 640),
}


@pytest.mark.parametrize(("arguments", "forbidden", "budget"), CASES.values(), ids=CASES.keys())
def test_quick_commands_import_nothing_heavy(tmp_path, arguments, forbidden, budget):
    (tmp_path / "plain.yaml").write_text(SFT)
    (tmp_path / "random.yaml").write_text(RANDOM)
    (tmp_path / "wrong.yaml").write_text(SFT + "sede: 1\n")
    (tmp_path / "composed.yaml").write_text(RLVR)
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    (tmp_path / "wrong_rows.yaml").write_text(SFT.replace("rows.jsonl", "wrong.jsonl"))
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "1"}\nresponse: 2\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2", "ground_truth": "2", "tag": "math"}\n')
    (tmp_path / "mine.py").write_text("import torch\ndef score(prompt, response): return 1.0\n")
    (tmp_path / "common.yaml").write_text("seed: 7\n")
    with CheckpointDirectory(tmp_path / "run" / "checkpoints").writing(
        1, asdict(SavedRun(pipeline="sft", pipeline_state={}, roles={}))
    ):
        (tmp_path / "run" / "run.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(arguments=arguments)],
        cwd=tmp_path,
        env={**os.environ, "ROLL_PLUGINS": f"{HF_PACKAGES},roll-migrate"},
        capture_output=True,
        text=True,
        check=True,
    )
    code, modules = json.loads(done.stdout)
    assert code == (2 if {"wrong.yaml", "wrong_rows.yaml"} & {*arguments} else 0), done.stderr
    assert not {name for name in modules if name.split(".")[0] in (*HEAVY, *forbidden)}
    assert len(modules) <= budget + NEWER


@pytest.mark.parametrize(
    ("code", "forbidden", "budget"),
    [
        ("roll.__version__", ("pluggy", "pydantic", "yaml", "rich", "argparse"), 80),
        ("roll.check('plain.yaml')", ("rich", "hydra", "omegaconf", "numpy", "argparse"), 350),
        ("roll.plan('random.yaml')", ("hydra", "omegaconf", "numpy"), 450),
    ],
)
def test_the_python_api_imports_only_what_a_call_needs(tmp_path, code, forbidden, budget):
    (tmp_path / "plain.yaml").write_text(SFT)
    (tmp_path / "random.yaml").write_text(RANDOM)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    script = f"import sys, roll_core as roll\n{code}\nprint(*sys.modules)"
    env = {**os.environ, "ROLL_PLUGINS": HF_PACKAGES}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    modules = done.stdout.split()
    assert not {name for name in modules if name.split(".")[0] in (*HEAVY, *forbidden)}
    assert len(modules) <= budget + NEWER


BLOCKED = "import sys; sys.modules.update(dict.fromkeys({names!r}))\n"
WITHOUT = (*HEAVY, "safetensors", "tokenizers", "tensorboard", "math_verify", "peft", "ninja", "pyarrow")


@pytest.mark.parametrize("arguments", [["plugins", "-v"], ["check", "plain.yaml"], ["plan", "random.yaml"], ["doctor"]])
def test_commands_that_run_nothing_work_without_torch(tmp_path, arguments):
    """None in `sys.modules` makes an import of that name raise `ModuleNotFoundError`."""
    (tmp_path / "plain.yaml").write_text(SFT)
    (tmp_path / "random.yaml").write_text(RANDOM)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=WITHOUT) + ASK.format(arguments=arguments)],
        cwd=tmp_path,
        env={**os.environ, "ROLL_PLUGINS": HF_PACKAGES},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)[0] == 0, done.stderr


LIGHT = ("memory.py", "**/plans.py")
"""Functions of plugins that `roll-core plan` calls."""


def test_light_modules_of_plugins_import_nothing_heavy():
    """Every `plugin.py` and `config.py`, and the whole spec, can be read on a machine without an engine."""
    names = []
    pipelines = (
        "roll_pipeline_agentic",
        "roll_pipeline_diffusion",
        "roll_pipeline_distill",
        "roll_pipeline_preference",
    )
    for package in (
        "roll_core",
        "roll_environments",
        "roll_infer_hf",
        "roll_migrate",
        *pipelines,
        "roll_rewards",
        "roll_strategy_hf",
        "roll_tools",
        "roll_trackers",
    ):
        folder = Path(__import__(package).__file__).parent
        names += [
            ".".join((package, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
            for pattern in (
                "**/plugin.py",
                "**/config.py",
                "**/plans.py",
                "spec/*.py",
                "config/*.py",
                "plugins/*.py",
                "memory.py",
            )
            for file in folder.glob(pattern)
        ]
    assert len(names) > 30
    script = (
        f"import importlib, sys\nfor name in {sorted(set(names))!r}: importlib.import_module(name)\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {name for name in done.stdout.split() if name.split(".")[0] in HEAVY}
