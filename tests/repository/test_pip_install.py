"""The wheels of all packages, and environments made of nothing else, outside the repository."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from roll_testing.new import KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in (REPOSITORY / "packages").glob("*/pyproject.toml"))
RUN = """\
output_dir: output
prompt_length: 8
response_length: 8
max_steps: 2
tokenizer: {kind: byte}
"""
TRAINED = """\
  model_args:
    dtype: fp32
    random_init:
      {model_type: qwen3, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
       head_dim: 16, intermediate_size: 64}
  training_args: {per_device_train_batch_size: 4}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
SFT = f"{RUN}pipeline: sft\nexp_name: sft\nsft_train:\n{TRAINED}"
GRPO = f"""\
{RUN}pipeline: rlvr
exp_name: grpo
rollout_batch_size: 2
num_return_sequences_in_group: 2
adv_estimator: grpo
actor_train:
{TRAINED}actor_infer:
  model_args: {{dtype: fp32}}
  strategy_args: {{strategy_name: hf_infer}}
rewards:
  length: {{reward: function, function: "mine:score"}}
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """A folder with a wheel of every package."""
    folder = tmp_path_factory.mktemp("wheels")
    env = {name: value for name, value in os.environ.items() if name != "BUILD_EXT"}
    for package in PACKAGES:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=package, env=env, check=True, capture_output=True)
    return folder


class Environment:
    """A plain virtual environment and a folder with the configs of two runs, both outside the repository."""

    def __init__(self, folder: Path, wheels: Path, uv: str | None = None) -> None:
        """`uv`, where it is given, installs in place of pip: it copies no file that its cache has."""
        self.bin, self.folder, self._uv = folder / "venv" / "bin", folder, uv
        self._wheels = str(wheels)
        venv.create(folder / "venv", with_pip=uv is None)
        (folder / "sft.yaml").write_text(SFT)
        (folder / "grpo.yaml").write_text(GRPO)
        rows = [json.dumps({"prompt": str(number), "response": str(number + 1)}) for number in range(8)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        (folder / "mine.py").write_text("def score(prompt, response):\n    return float(len(response))\n")

    def install(self, *words: str) -> None:
        python = str(self.bin / "python")
        if self._uv:
            command = [self._uv, "pip", "install", "--quiet", "--python", python]
        else:
            command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        command += ["-c", str(REPOSITORY / "constraints.txt"), "--find-links", self._wheels]
        subprocess.run([*command, *words], check=True, cwd=self.folder)

    def roll_core(self, *arguments: str) -> subprocess.CompletedProcess:
        # The first command that imports torch compiles it for the others.
        other = ("PYTHONPATH", "ROLL_PLUGINS", "PYTHONDONTWRITEBYTECODE")
        env = {name: value for name, value in os.environ.items() if name not in other}
        env["PYTHONPATH"] = str(self.folder)
        command = [str(self.bin / "roll-core"), *arguments]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def run(self, folder: Path, *words: str) -> None:
        """Run a module of Python in `folder`, and show its output if it fails."""
        other = ("PYTHONPATH", "ROLL_PLUGINS", "PYTHONDONTWRITEBYTECODE")
        env = {name: value for name, value in os.environ.items() if name not in other}
        command = [str(self.bin / "python"), "-m", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def has(self, module: str) -> bool:
        command = [str(self.bin / "python"), "-c", f"import {module}"]
        return subprocess.run(command, cwd=self.folder, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_every_wheel_carries_licence_readme_and_types(wheels):
    assert len(list(wheels.glob("*.whl"))) == len(PACKAGES)
    for wheel in wheels.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        module = wheel.name.partition("-")[0]
        names = archive.namelist()
        (licence,) = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(licence) == (REPOSITORY / "LICENSE").read_bytes()
        metadata = Parser().parsestr(archive.read(f"{licence.partition('/')[0]}/METADATA").decode())
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata.get_payload().startswith(f"# {metadata['Name']}\n")
        assert f"{module}/py.typed" in names


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_configs_are_checked_and_planned_without_torch(tmp_path, wheels):
    environment = Environment(tmp_path, wheels)
    environment.install("roll-core")
    assert environment.roll_core("--version").stdout == "roll-core 0.1.0\n"
    refused = environment.roll_core("check", "sft.yaml")
    assert refused.returncode == 2
    assert "pip install roll-strategy-hf" in refused.stderr
    environment.install(
        "--no-deps",
        *(
            "roll-infer-hf",
            "roll-modeling",
            "roll-rewards",
            "roll-strategy-hf",
            "roll-tools",
            "roll-trackers",
            "roll-weight-transports",
        ),
    )
    assert next((tmp_path / "venv").rglob("roll_tools/templates/report.html.j2")).is_file()
    assert not environment.has("torch")
    for command in (["plugins", "-v"], ["check", "sft.yaml", "grpo.yaml"], ["plan", "grpo.yaml"], ["doctor"]):
        done = environment.roll_core(*command)
        assert done.returncode == 0, (command, done.stdout + done.stderr)
    refused = environment.roll_core("run", "sft.yaml")
    assert refused.returncode == 2
    assert "'roll-core[train]'" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_core_and_the_hf_packages_give_the_quick_start(tmp_path, wheels):
    environment = Environment(tmp_path, wheels, os.environ.get("UV") or shutil.which("uv"))
    environment.install("roll-core", "roll-strategy-hf", "roll-infer-hf")
    assert not environment.has("ray")
    offered = json.loads(environment.roll_core("plugins", "--json").stdout)["plugins"]
    assert {each["package"] for each in offered} == {
        *("roll-core", "roll-infer-hf", "roll-rewards", "roll-strategy-hf"),
        *("roll-tools", "roll-trackers", "roll-weight-transports"),
    }
    commands = (
        ["plugins", "-v"],
        ["check", "sft.yaml", "grpo.yaml"],
        ["plan", "grpo.yaml"],
        ["doctor", "grpo.yaml"],
        ["run", "sft.yaml", "grpo.yaml"],
    )
    for command in commands:
        done = environment.roll_core(*command)
        assert done.returncode == 0, (command, done.stdout + done.stderr)
    for name in ("sft", "grpo"):
        steps = (tmp_path / "output" / name / "latest" / "metrics.jsonl").read_text().splitlines()
        assert len(steps) == 2
    refused = environment.roll_core("run", "grpo.yaml", "executor=ray")
    assert refused.returncode == 2
    assert "pip install roll-executor-ray" in refused.stderr
    refused = environment.roll_core("check", "grpo.yaml", "rewards.length.world_size=2")
    assert refused.returncode == 2
    assert "pip install roll-executor-ray" in refused.stderr


@pytest.fixture(scope="module")
def authors(tmp_path_factory, wheels):
    """The environment of a plugin's author."""
    environment = Environment(tmp_path_factory.mktemp("author"), wheels, os.environ.get("UV") or shutil.which("uv"))
    environment.install("roll-testing", "mypy")
    return environment


KIT_PARTS = {"strategy": "found or listing or contract or logprobs_equal or adamw"}
"""`-k` of kits that take minutes. `roll-strategy-hf` runs the whole kit."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_generated_package_installs_passes_tests_and_is_typed(kind, authors):
    done = authors.roll_core("new", kind, "fresh_part")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = authors.folder / f"roll-{kind}-fresh-part"
    authors.install("-e", f"{folder}[test]")
    authors.run(folder, "pytest", "-q", "-p", "no:cacheprovider", "-k", KIT_PARTS.get(kind, ""))
    authors.run(folder, "mypy", "--strict", "--cache-dir", str(authors.folder / "mypy"), f"roll_{kind}_fresh_part")
    authors.run(folder, "roll_core", "plugins", "--check")
