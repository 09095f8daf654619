"""Every example in the docs works: Python is run, TOML installs a package, YAML is checked as `roll-core check` does.

Examples are taken from the text of the pages. The last test fails for a Python example that no other test runs.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from roll_core.algorithms import losses
from roll_core.algorithms.advantages import grpo
from roll_core.algorithms.aggregate import stream_weights, weighted_sum
from roll_core.config import load
from roll_core.data.media import received_message
from roll_core.data.pack import pack
from roll_core.errors import ConfigError
from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry, load_registry
from roll_core.plugins.targets import load_target, options_schema
from roll_core.runtime.rollout.program import SingleTurn
from roll_core.spec import providers
from roll_core.spec.environment import Reply
from roll_core.spec.rollout import IMAGE
from roll_core.spec.train import LossOutput, TokenOutputs, WantedOutputs
from roll_core.spec.transport import DeviceFacts, RoleFacts, SenderSetup, WorkerFacts
from roll_core.types import TrainSequence
from roll_testing.part_checks import check_part
from roll_testing.runs import Runs
from shared_tests import simulated
from shared_tests.docs import RLVR_CONFIG

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *REPOSITORY.glob("packages/*/README.md"),
]
SUITES = REPOSITORY / "tests" / "conformance" / "suites"
ACME = REPOSITORY / "tests" / "third_party" / "roll-acme"


def examples(language):
    """`(page, line, text)` of every block in this language."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(rf"^( *)```{language}\n(.*?)^\1```", text, flags=re.DOTALL | re.MULTILINE):
            line = text[: block.start()].count("\n") + 2
            found.append((str(page.relative_to(REPOSITORY)), line, textwrap.dedent(block[2])))
    return found


def example(page, word, language="python"):
    """The one block of a page that has this word."""
    (found,) = [each for each in examples(language) if each[0] == page and word in each[2]]
    return found[2]


def run(code, **names):
    """What the code leaves behind, run with these names defined."""
    names["__name__"] = "example"
    exec(compile(code, "example", "exec", dont_inherit=True), names)
    return names


# -- YAML --------------------------------------------------------------------------------------------------------------

FRAGMENTS = {
    "common.yaml": "seed: 7\n",
    "optim.yaml": "learning_rate: 1.0e-6\n",
    "../config/traj_envs.yaml": "max_steps: 10\n",
    "model/small.yaml": "# @package _global_\npretrain: Qwen/Qwen3-0.6B\n",
    "output/grpo/latest/rollouts/step-1.jsonl": json.dumps(
        {
            "schema": 3,
            "terms": {"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "temperature": 1.0},
            "weight_version": 0,
        }
    ),
}
"""Files that an example names."""
OF_A_ROLE = ("strategy_args:", "device_mapping:")
"""Beginnings of parts that stand below a role."""
ENVIRONMENT = re.compile("^environment: ", re.MULTILINE)
"""Entries of `custom_envs`: some need a package that the shared environment lacks."""
ELSEWHERE = {"reward: palindrome", "acme_small:", "environment: my_env:", "agent: my_agent:"}
TUTORIAL = {f"docs/own-{name}.md" for name in ("reward", "data", "environment", "plugin", "pipeline")}
"""Pages whose files `test_tutorial.py` runs in order."""
ELSEWHERE |= {"exp_name: letters"}
ELSEWHERE |= {"environment: text_game\n    env", "agent: verifiers"}
"""Parts that need a plugin or code of the user: tests below install it."""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{page}:{line}")
        for page, line, text in examples("yaml")
        if not any(word in text for word in ELSEWHERE) and not ENVIRONMENT.search(text)
    ],
)
def test_a_yaml_example_is_a_config_or_a_part_of_one(text, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, content in FRAGMENTS.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content, encoding="utf-8")
    shutil.copy(REPOSITORY / "examples" / "quickstart" / "model.yaml", ".")
    text = text.replace("/envs/vllm", sys.prefix).replace("s3://", "memory://")  # of packages that are not installed
    for part in text.splitlines() if text.count("device_mapping:") == text.count("\n") else [text]:
        if re.search("^pipeline:", part, flags=re.MULTILINE):
            Path("run.yaml").write_text(part, encoding="utf-8")
        else:
            role = "@actor_train" if part.startswith(OF_A_ROLE) else ""
            Path("run.yaml").write_text(f"defaults: [base, part{role}]\n", encoding="utf-8")
            Path("base.yaml").write_text(RLVR_CONFIG, encoding="utf-8")
            Path("part.yaml").write_text(part, encoding="utf-8")
        assert load("run.yaml", (), load_registry()).config.pipeline


def test_readme_config_equals_the_quick_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(REPOSITORY / "examples" / "quickstart" / "model.yaml", ".")
    Path("run.yaml").write_text(example("README.md", "pipeline: rlvr", "yaml"), encoding="utf-8")
    shown, real = (
        leaves(load(file, (), load_registry()).config.model_dump(exclude_unset=True))
        for file in ("run.yaml", REPOSITORY / "examples" / "quickstart" / "grpo.yaml")
    )
    assert len(shown) > 20
    assert shown.items() <= real.items()


def leaves(values, path=()):
    """Every value by its path, as JSON."""
    found = {}
    for key, value in values.items():
        found |= leaves(value, (*path, key)) if isinstance(value, dict) else {(*path, key): json.dumps(value)}
    return found


def test_the_json_example_is_a_line_of_metrics():
    ((_, _, text),) = examples("json")
    assert json.loads(text)["step"] == 12


# -- plugins -----------------------------------------------------------------------------------------------------------


def package(folder, project, files):
    """Sources and `.dist-info` of a distribution in `folder`; `project` is the text of its pyproject.toml."""
    table = tomllib.loads(project)["project"]
    name, version = table.get("name", "roll-example"), table.get("version", "1.0")
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(textwrap.dedent(content), encoding="utf-8")
        (folder / path).with_name("__init__.py").touch()
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = table["entry-points"].items()
    points = "\n".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items()) for group, points in groups
    )
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    return name


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on this process' path, whose modules are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def checked(site, kind, name):
    """The record of a part, found through its entry point and held against its contract, and the registry."""
    registry = Registry(load_plugins(path=[str(site)], environ={}))
    record = registry.find(kind, name)
    check_part(record, owner=registry.owner(record))
    return record


def test_the_palindrome_is_a_package_that_scores(site, tmp_path, monkeypatch):
    page = "docs/plugins.md"
    home = "roll_reward_palindrome"
    package(
        site,
        example(page, 'name = "roll-reward-palindrome"', "toml"),
        {
            f"{home}/plugin.py": example(page, "RewardProvider("),
            f"{home}/reward.py": example(page, "RewardFunction"),
            f"{home}/config.py": example(page, "PalindromeConfig(RewardConfig)"),
        },
    )
    record = checked(site, providers.RewardProvider, "palindrome")
    monkeypatch.chdir(tmp_path)
    Path("part.yaml").write_text(example(page, "reward: palindrome", "yaml"), encoding="utf-8")
    Path("base.yaml").write_text(RLVR_CONFIG, encoding="utf-8")
    Path("run.yaml").write_text("defaults: [base, part]\n", encoding="utf-8")
    config = load("run.yaml", (), load_registry()).config

    from roll_core.spec.rollout import RewardRequest

    def score(config, text):
        reward = load_target(record.target, owner="")(config)
        return reward.score(RewardRequest(sample=None, prompt="", response=text)).value

    strict = config.rewards["mirror"]
    lenient = strict.model_copy(update={"ignore_blanks": True})
    assert [score(strict, text) for text in ("Level ", "no", "no lemon, no")] == [1.0, 0.0, 0.0]
    assert [score(each, "never odd or even") for each in (strict, lenient)] == [0.0, 1.0]


def test_the_readmes_engine_is_found_with_its_keys(site):
    project = example("README.md", "roll.plugins", "toml")
    files = {
        "roll_infer_acme/plugin.py": example("README.md", "InferProvider("),
        "roll_infer_acme/strategy.py": """
            from roll_acme.bigram import BigramInferStrategy

            class AcmeStrategy(BigramInferStrategy):
                pass
        """,
        "roll_infer_acme/config.py": """
            from roll_core.spec.config import StrategyConfig

            class AcmeConfig(StrategyConfig):
                vocabulary: int = 8
        """,
    }
    package(site, project, files)
    sys.path.append(str(ACME / "src"))
    try:
        record = checked(site, providers.InferProvider, "acme")
    finally:
        sys.path.remove(str(ACME / "src"))
    assert record.capabilities.weight_transports == ("shm", "collective")


def test_estimator_example_has_its_keys_and_compares_groups(site, tmp_path, monkeypatch):
    """Two groups, of responses with 1, 2 and 3 tokens and with 1 token."""
    import torch

    from roll_core.spec.algorithms import AdvantageInput

    page = "docs/plugins.md"
    (record,) = re.findall(r"AdvantageProvider\(name=.*?\)", (REPOSITORY / page).read_text("utf-8"), flags=re.DOTALL)
    plugin = f"""
        from roll_core.spec.hooks import hookimpl
        from roll_core.spec.providers import AdvantageProvider

        ROLL_HOOK_API = 1

        @hookimpl
        def roll_advantage_estimators():
            yield {" ".join(record.split())}
    """
    home = "acme_credit"
    files = {
        f"{home}/config.py": example(page, "RankedConfig(Config)"),
        f"{home}/ranked.py": example(page, "def ranked"),
    }
    project = '[project.entry-points."roll.plugins"]\nacme-credit = "acme_credit.plugin"\n'
    package(site, project, {f"{home}/plugin.py": plugin, **files})
    record = checked(site, providers.AdvantageProvider, "ranked")

    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RLVR_CONFIG, encoding="utf-8")
    config = load("run.yaml", ("adv_estimator=ranked", "adv_options.scale=0.5"), load_registry()).config
    with pytest.raises(ConfigError) as raised:
        load("run.yaml", ("adv_estimator=ranked", "adv_options.scal=0.5"), load_registry())
    assert [each.key for each in raised.value.problems] == ["adv_options.scal"]

    segments_T = torch.tensor([0, 1, 1, 2, 2, 2, 3])
    batch = AdvantageInput(
        scores_S=torch.tensor([1.0, 0.0, 1.0, 5.0]),
        mask_T=torch.tensor([True, True, False, True, True, True, True]),
        segments_T=segments_T,
        groups_S=torch.tensor([0, 0, 0, 1]),
        values_T=None,
        gamma=1.0,
        lambd=1.0,
        options=config.adv_options,
    )
    found = load_target(record.target, owner="")(batch).advantages_T
    third = 0.5 / 3
    assert torch.allclose(found, torch.tensor([third, -2 * third, 0, third, third, third, 0]))


def test_an_estimator_without_the_cores_helpers_equals_grpo():
    import torch

    from roll_core.spec.algorithms import AdvantageInput

    estimate = run(example("docs/plugins.md", "def relative_to_group"))["relative_to_group"]
    batch = AdvantageInput(
        scores_S=torch.tensor([1.0, 0.0, 0.5, 5.0, 2.0, 2.0]),
        mask_T=torch.tensor([True, True, False, True, True, True, True]),
        segments_T=torch.tensor([0, 1, 1, 2, 3, 4, 5]),
        groups_S=torch.tensor([0, 0, 0, 1, 2, 2]),
    )
    assert torch.allclose(estimate(batch).advantages_T, grpo(batch).advantages_T, atol=1e-6)


def test_normaliser_example_changes_estimator_rewards(tmp_path, monkeypatch):
    import torch

    from roll_core.spec.algorithms import AdvantageInput

    source = example("docs/plugins.md", "def above_median")
    batch = AdvantageInput(
        scores_S=torch.tensor([0.0, 1.0, 9.0, 2.0]),
        mask_T=torch.tensor([True, True, False, True, True]),
        segments_T=torch.tensor([0, 1, 1, 2, 3]),
        groups_S=torch.tensor([0, 0, 0, 1]),
    )
    found = run(source)["above_median"](batch, reward_bound=5.0)
    assert found.advantages_T.tolist() == [-1.0, 0.0, 0.0, 5.0, 0.0]
    (tmp_path / "my_adv.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    provider = load_registry().find(providers.AdvantageProvider, "my_adv:above_median")
    assert options_schema(provider)().model_dump() == {"reward_bound": 3.0}


def test_an_optimizer_of_the_user_steps_by_signs(tmp_path, monkeypatch):
    import torch

    from roll_core.spec.train import TrainingSpec
    from roll_modeling.optimizer import create_optimizer

    (tmp_path / "my_optimizers.py").write_text(example("docs/plugins.md", "class Lion"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    weight.grad = torch.tensor([0.5, -4.0, 0.0])
    training = TrainingSpec(learning_rate=0.1, optimizer="my_optimizers:lion", optimizer_kwargs={"beta2": 0.5})
    optimizer = create_optimizer({"weight": weight}, training)
    optimizer.step()
    assert weight.tolist() == pytest.approx([0.9, 2.1, 3.0])
    assert optimizer.state[weight]["exp_avg"].tolist() == [0.25, -2.0, 0.0]


def test_a_prompt_sampler_of_the_user_takes_the_hardest_row():
    create = run(example("docs/plugins.md", "class Hardest"))["Hardest"]
    sampler = create(penalty=0.5)
    sampler.start(["a", "b"], seed=1)
    assert [sampler.choose(position) for position in range(2)] == [0, 1]
    sampler.observe(0, [1.0, 1.0])
    other = create(penalty=0.5)
    other.start(["a", "b"], seed=1)
    other.load_state(json.loads(json.dumps(sampler.state())))
    # The second row has 0.5 after one choice, the first 2.5.
    assert [other.choose(position) for position in range(2, 6)] == [1, 1, 1, 1]


def test_a_policy_loss_of_the_user_equals_ppo():
    from types import SimpleNamespace

    import torch

    from roll_core.algorithms.policy_losses import ppo
    from roll_core.spec.algorithms import PolicyLossParams

    loss = run(example("docs/plugins.md", "def clipped"))["clipped"]
    micro = SimpleNamespace(
        loss_mask_T=torch.tensor([False, True, True, True]),
        old_logprobs_T=torch.tensor([torch.nan, -1.0, -1.0, -2.0]),
        advantages_T=torch.tensor([torch.nan, 1.0, -1.0, -1.0]),
    )
    logprobs_T = torch.tensor([torch.nan, -0.5, -0.8, -3.0])
    expected, _ = ppo(logprobs_T, micro, PolicyLossParams(pg_clip_low=0.1, pg_clip_high=0.1))
    assert torch.equal(loss(logprobs_T, micro, PolicyLossParams(), clip=0.1)[0], expected)


def test_the_suites_of_smaller_parts_are_classes_with_tests():
    names = run(example("docs/conformance.md", "class TestLoss("))
    suites = [each for name, each in names.items() if name.startswith("Test")]
    assert len(suites) == 5
    assert all(each.name.startswith("my_") for each in suites)
    assert names["TestPipeline"]().run_config(SimpleNamespace(rlvr=lambda: {"seed": 1})) == {"seed": 1}


def test_transport_reports_why_it_cannot_connect_two_roles():
    names = run(example("docs/weight-sync.md", "class RdmaTransport"))
    transport = names["RdmaTransport"]()
    devices = [DeviceFacts(uuid=uuid) for uuid in ("GPU-1", "")]
    near, far = (
        RoleFacts(role="actor_infer", workers=(WorkerFacts(host="b", pid=2, device=device),)) for device in devices
    )
    assert transport.available(near, near) is None
    assert "b" in transport.available(near, far).split()
    assert [route.self_test for route in transport.routes(near, near)] == [True]
    sender = SenderSetup(receivers=(0,), bucket_bytes=8, host="a", device="cpu", options={})
    assert transport.sender(sender).address.startswith("a:")


def test_the_program_of_a_single_turn_is_quoted():
    quoted = ast.parse(example("docs/rollouts.md", "class SingleTurn")).body[0].body[0]
    source = ast.parse(textwrap.dedent(inspect.getsource(SingleTurn.run))).body[0]
    assert [ast.dump(each) for each in quoted.body] == [ast.dump(each) for each in source.body]


def test_a_reward_has_the_images_of_its_sample():
    score = run(example("docs/vision.md", "def score"))["score"]
    images = [Image.new("RGB", (56, 28))]
    assert [score("Which width?", reply, images) for reply in ("56 pixels", "28")] == [1.0, 0.0]


def test_an_environments_message_has_an_image():
    (message,) = run(example("docs/agentic.md", "board = "))["opening"].messages
    assert received_message(message)["content"].count(IMAGE) == 1


def test_an_engines_configuration_decides_its_slots():
    schema = run(example("docs/plugins.md", "slots_per_worker"))["EngineConfig"]
    assert schema().slots_per_worker() == 1
    assert schema(tensor_parallel_size=4).slots_per_worker() == 4


def test_a_fragment_is_a_block_under_its_own_name(site, tmp_path, monkeypatch):
    plugin = """
        from roll_core.spec.hooks import hookimpl
        from roll_core.spec.providers import FragmentProvider

        ROLL_HOOK_API = 1

        @hookimpl
        def roll_config_fragments():
            yield FragmentProvider(
                name="acme_small", target="roll_acme_files.fragments.config:acme_small.yaml", summary="A size"
            )
    """
    project = '[project.entry-points."roll.plugins"]\nroll-acme-files = "roll_acme_files.plugin"\n'
    fragment = example("docs/plugins.md", "acme_small:", "yaml")
    files = {"plugin.py": plugin, "fragments/config/acme_small.yaml": fragment}
    package(site, project, {f"roll_acme_files/{name}": content for name, content in files.items()})
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(RLVR_CONFIG, encoding="utf-8")
    names = "model_args: {model_config_kwargs: '${acme_small}'}"
    Path("run.yaml").write_text(f"defaults: [base, acme_small, _self_]\nactor_train:\n  {names}\n", encoding="utf-8")
    config = load("run.yaml", (), load_registry()).config
    assert config.actor_train.model_args.model_config_kwargs == {"heads": 4}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_sources_of_a_package_are_compiled_on_first_use(site, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    table = tomllib.loads(example("docs/plugins.md", "roll-extensions", "toml"))
    ((target,),) = table["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["roll-extensions"].values()
    (site / "acme").mkdir()
    (site / "acme" / "__init__.py").touch()
    (site / "acme" / "kernels.py").write_text(example("docs/plugins.md", "Extension("), encoding="utf-8")
    (site / "acme" / "fast.cpp").write_text('extern "C" int twice(int x) { return 2 * x; }\n', encoding="utf-8")

    from roll_kernels.extensions import Extension

    assert isinstance(load_target(target, owner=""), Extension)
    import acme.kernels

    assert acme.kernels.library().twice(21) == 42


def test_a_reward_function_is_called_with_the_rows_columns():
    style = run(example("docs/rewards.md", "def style"))["style"]
    assert (style("1+1=", "2.", solution="2"), style("1+1=", "2", solution="2")) == (1.0, 0.0)


def test_reward_functions_of_other_frameworks_are_recognised(tmp_path, monkeypatch):
    from roll_rewards.user_function import prepare

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "page_foreign.py").write_text(example("docs/rewards.md", "def exact"), encoding="utf-8")
    row = {"prompt": "1+1=", "messages": [], "completion_ids": [5]}
    columns = {"exact": {"answer": "2"}, "compute_score": {"ground_truth": "2"}, "reward_func": {"label": "2"}}
    for function, metadata in columns.items():
        score = prepare({"function": f"page_foreign:{function}"})
        assert [score(response=text, metadata=metadata, **row)["value"] for text in (" 2", "3")] == [1.0, 0.0]


def test_image_rewards_of_the_page_score_images(tmp_path, monkeypatch):
    from roll_pipeline_diffusion.rewards.base import DifferentiableRewards, ImageRewards
    from roll_pipeline_diffusion.rewards.config import ImageFunctionConfig

    monkeypatch.syspath_prepend(tmp_path)
    source = example("docs/rewards.md", "def contrast") + example("docs/rewards.md", "def warm")
    (tmp_path / "page_image_rewards.py").write_text(source, encoding="utf-8")
    config = {"reward": "image_function", "function": "page_image_rewards:contrast"}
    rewards = ImageRewards({"style": ImageFunctionConfig(**config)})
    images = np.zeros((1, 2, 2, 3), np.uint8)
    images[:, 0] = 128
    assert [each.value for each in rewards.score(images, [""], [{}])["style"]] == [0.5]
    config |= {"function": "page_image_rewards:warm", "differentiable": True}
    rewards = DifferentiableRewards(ImageRewards({"warm": ImageFunctionConfig(**config)}))
    pixels = torch.ones(1, 3, 2, 2, requires_grad=True)
    rewards(pixels, SimpleNamespace(tensors={})).sum().backward()
    assert pixels.grad.sum(dim=(0, 2, 3)).tolist() == [0.5, 0.0, -0.5]


def test_the_pages_agent_plays_and_its_config_is_accepted(tmp_path, monkeypatch):
    page = "docs/agents.md"
    monkeypatch.chdir(tmp_path)
    Path("my_agent.py").write_text(example(page, "def solve"), encoding="utf-8")
    Path("train.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n', encoding="utf-8")
    whole = example("docs/agentic.md", "environment: my_env:Sums", "yaml")
    head, tail = whole.partition("custom_envs:")[0], whole.partition("rollout_batch_size:")[2]
    text = head + example(page, "agent: my_agent:solve", "yaml") + "rollout_batch_size:" + tail
    Path("agentic.yaml").write_text(text, encoding="utf-8")
    entry = load("agentic.yaml", (), load_registry()).config.custom_envs["questions"]
    replies = iter(["3", " 2 "])

    def create(**request):
        message = SimpleNamespace(content=next(replies))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    solve = run(example(page, "def solve"))["solve"]
    monkeypatch.setitem(solve.__globals__, "OpenAI", lambda **given: client)
    session = SimpleNamespace(base_url="", api_key="", model="")
    assert solve({"question": "1 + 1?", "answer": "2"}, session, **entry.agent_config) == 0.9


def test_environments_of_the_page_match_its_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("counter_env.py").write_text(example("docs/environments.md", "class Counter"), encoding="utf-8")
    Path("documents.jsonl").write_text('{"title": "Oslo", "text": "The capital of Norway."}\n', encoding="utf-8")
    registry, named = load_registry(), set()
    for at, _, text in examples("yaml"):
        if at in ("docs/environments.md", "docs/tasks.md") and ENVIRONMENT.search(text):
            given = yaml.safe_load(text.replace("my_env:Counter", "counter_env:Counter"))
            provider = registry.find(providers.EnvironmentProvider, given["environment"])
            schema = load_target(provider.config, owner=provider.name)
            keys = {field.alias or name for name, field in schema.model_fields.items()}
            assert given["env_config"].keys() <= keys
            named.add(provider.name)
            if given["environment"] in ("math_with_python", "local_search", "text_game", "tools"):
                schema(**given["env_config"])
    ours = next(each for each in registry.plugins if each.package == "roll-environments")
    assert named == {each.name for each in ours.providers if isinstance(each, providers.EnvironmentProvider)}

    from roll_environments.python_tools import PythonTools

    async def play():
        environment = PythonTools(target="counter_env:Counter")
        opening = await environment.reset({"goal": 5}, 0)
        function = {"name": "add", "arguments": '{"number": 5}'}
        turn = await environment.step(Reply(text="", tool_calls=[{"function": function}]))
        return opening, turn, await environment.score()

    opening, turn, score = asyncio.run(play())
    assert opening.messages[0]["content"] == "Count to 5."
    assert [each["function"]["name"] for each in opening.tools] == ["add"]
    assert (turn.messages[0]["content"], score.value) == ("5", 1.0)


def test_environment_example_is_solved_and_its_config_accepted(tmp_path, monkeypatch):
    page = "docs/agentic.md"
    monkeypatch.chdir(tmp_path)
    sums = example(page, "class Sums")
    Path("my_env.py").write_text(sums, encoding="utf-8")
    Path("agentic.yaml").write_text(example(page, "environment: my_env:Sums", "yaml"), encoding="utf-8")
    config = load("agentic.yaml", (), load_registry()).config
    assert (config.num_groups, config.group_size, config.max_turns("sums")) == (16, 8, 4)
    environment = run(sums)["Sums"](**config.custom_envs["sums"].env_config)
    question = environment.reset({}, 7).messages[0]["content"]
    wrong, right = (
        environment.step(Reply(text="?")),
        environment.step(Reply(text=f" {sum(map(int, re.findall('[0-9]+', question)))}")),
    )
    assert (wrong.reward, wrong.done, right.reward, right.done) == (0.0, False, 1.0, True)
    text = Path("agentic.yaml").read_text(encoding="utf-8").partition("custom_envs:")[0]
    text += example(page, "data_args: {file_name: train.jsonl}", "yaml").replace("my_env:Questions", "my_env:Sums")
    text += "actor_train:" + Path("agentic.yaml").read_text(encoding="utf-8").partition("actor_train:")[2]
    Path("tasks.yaml").write_text(text, encoding="utf-8")
    assert (
        load("tasks.yaml", ("train_env_manager={group_size: 2}",), load_registry())
        .config.custom_envs["questions"]
        .data_args
    )


def test_the_pages_game_is_played_by_two():
    game = run(example("docs/agentic.md", "class OddOrEven"))["OddOrEven"]()

    async def play():
        opening = await game.reset({}, 7)
        return opening, await game.step(Reply(text="13")), await game.step(Reply(text="even"))

    opening, hidden, guessed = asyncio.run(play())
    assert (opening.player, hidden.player, hidden.reward) == ("hider", "guesser", None)
    assert (guessed.reward, guessed.rewards, guessed.done) == (-1.0, {"hider": 1.0}, True)


def test_adapters_are_added_trained_and_exported(tmp_path):
    import torch

    from roll_core.spec.model import LoraSpec, ModelSpec
    from roll_modeling.model import load_model

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    random = {"model_type": "qwen3", "vocab_size": 11, "num_key_value_heads": 2, "head_dim": 8, **sizes}
    lora = LoraSpec(rank=2, alpha=4.0, targets=("q_proj",))
    load_model(ModelSpec(random_init=random, dtype="fp32")).save_pretrained(tmp_path / "model")
    spec = ModelSpec(path=str(tmp_path / "model"), dtype="fp32", lora=lora)
    names = {"spec": spec, "gather": torch.Tensor.detach, "path": tmp_path / "adapter"}
    found = run(example("docs/lora.md", "add_adapters"), **names)
    trained = found["adapters"].trained()
    assert {each.shape[0] for each in trained.values()} == {2, 16}
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_an_architecture_of_another_package_is_a_table_of_rules(site):
    page = "docs/megatron.md"
    project = example(page, "roll.megatron_architectures", "toml")
    package(site, project, {"my_package/my_model.py": example(page, "ARCHITECTURE = Architecture(")})
    config = pytest.importorskip("roll_strategy_megatron.config").MegatronConfig
    config().check_model({"model_type": "my_model"})
    with pytest.raises(ValueError, match="my_model"):  # it is among those that there are
        config().check_model({"model_type": "no_model"})


# -- the kit -----------------------------------------------------------------------------------------------------------

OFFERED = """
from roll_acme.plugin import INFER
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_infer_strategies():
    yield InferProvider(
        name="my_infer",
        target="roll_page.engine:Engine",
        config="roll_acme.config:AcmeConfig",
        summary="The page's update_weights in an engine",
        capabilities=INFER,
    )
"""
ENGINE = """
from roll_acme.bigram import BigramInferStrategy


class Engine(BigramInferStrategy):
    update_weights, owned = update_weights, True

    @property
    def parameters(self):
        return {"table": self._table()}

    @parameters.setter
    def parameters(self, given):
        self.table_VV = given["table"]

    def _check(self, request):
        if self.version is None:
            raise RuntimeError("the last update of the weights failed")
        super()._check(request)
"""


def kit(folder, name, suite, chosen=""):
    """Names of the tests of a suite that passed, run as its author would run it."""
    (folder / f"{name}.py").write_text(suite, encoding="utf-8")
    wrong = SUITES / "roll-wrong"
    for project in (ACME, wrong):
        package(folder, (project / "pyproject.toml").read_text(encoding="utf-8"), {})
    path = os.pathsep.join(map(str, (folder, ACME / "src", wrong / "src", SUITES)))
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "0", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [*command, str(folder / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^PASSED .*::(\w+)", done.stdout, flags=re.MULTILINE)


def test_objective_and_term_examples_equal_their_formulas():
    page, probability = "docs/algorithms.md", torch.tensor([0.0, 0.5, 0.25])
    names = vars(losses) | {"dataclass": dataclass, "weighted_sum": weighted_sum, "stream_weights": stream_weights}
    names |= {"torch": torch, "WantedOutputs": WantedOutputs, "LossOutput": LossOutput}
    objective = run(example(page, 'CrossEntropy(stream="positive")'), **names)["objective"]
    term = run(example(page, "class Unlikelihood"), **names)["Unlikelihood"](stream="positive")
    sequence = TrainSequence(
        id="s",
        tokens=np.arange(3),
        loss_mask=np.array([False, True, True]),
        advantages=np.zeros(3, dtype=np.float32),
        streams={"positive": np.array([0, 3, 1], dtype=np.float32)},
    )
    (micro,) = pack([sequence])
    outputs = TokenOutputs(logprobs_T=probability.log(), entropy_T=torch.zeros(3))
    nll = 0.75 * math.log(2) + 0.25 * math.log(4)
    assert float(objective(outputs, micro).loss) == pytest.approx(0.1 * nll, rel=1e-6)
    assert float(term(outputs, micro).loss) == pytest.approx(0.75 * math.log(2) + 0.25 * math.log(4 / 3), rel=1e-6)


@pytest.mark.slow
def test_an_engine_with_the_pages_update_passes_the_whole_kit(tmp_path):
    page = example("docs/weight-sync.md", "async def update_weights")
    project = '[project]\nname = "roll-page"\n[project.entry-points."roll.plugins"]\nroll-page = "roll_page.plugin"\n'
    package(tmp_path, project, {"roll_page/plugin.py": OFFERED, "roll_page/engine.py": page + ENGINE})
    code = example("docs/conformance.md", "InferStrategyConformance")
    # Acme's suite says what its model is.
    code = re.sub(r"class TestMine\(\w+\)", "class TestMine(Acme)", code)
    passed = kit(tmp_path, "test_page", f"from acme_suite import TestAcmeInfer as Acme\n{code}\ndel Acme\n")
    assert {"test_what_does_not_fit_the_manifest_is_named", "test_shared_tensors_may_be_a_trainers_own"} <= {*passed}
    assert len(passed) > 40


@pytest.mark.slow
def test_conformance_examples_pass_for_correct_plugins(tmp_path):
    page = "docs/conformance.md"
    train = example(page, 'name = "my_train"').replace("TestMine", "TestTrain").replace("my_train", "hf_train")
    board = example(page, "TestMine(PlatformConformance)").replace("TestMine", "TestBoard").replace('"mine"', '"cpu"')
    wire = (
        example(page, "TestMine(WeightTransportConformance)").replace("TestMine", "TestWire").replace('"mine"', '"shm"')
    )
    start = example(page, "TestMine(ExecutorConformance)").replace("TestMine", "TestStart").replace('"mine"', '"local"')
    # The model of roll-wrong's strategies is what their suite says.
    sgd = re.sub(r"class TestMine\(\w+\)", "class TestSgd(Suite)", example(page, "torch.optim.SGD"))
    sgd = sgd.replace("my_sgd_train", "right_sgd").replace("class ", "from wrong_suite import Suite\n\nclass ")
    suite = f"{train}\n{board}\n{wire}\n{start}\n{sgd}\n"
    kits = ("TrainStrategy", "Platform", "WeightTransport", "Executor")
    suite += f"del Suite, {', '.join(f'{each}Conformance' for each in kits)}\n"
    passed = kit(tmp_path, "test_page", suite, "listing and not Sgd or Sgd and (clipped or steps_of_adamw)")
    assert sorted(set(passed)) == [
        "test_gradients_are_clipped_to_their_global_norm",
        "test_listing_it_imports_nothing_heavy",
        "test_steps_of_adamw_equal_the_reference",
    ]


def test_the_pages_tracker_records_the_metrics_of_each_step(tmp_path):
    tracker_class = run(example("docs/plugins.md", "class LinesTracker"))["LinesTracker"]
    for step in (1, 2):  # the second one is that of a resumed run
        tracker = tracker_class(tmp_path, "run", {})
        tracker.log(step, {"train/loss": step / 2})
        tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": 1.0}]


WALK = """
from roll_core.spec.environment import Environment, Opening, Turn

class MyEnvironment(Environment):
    def __init__(self, size):
        self.size = size

    async def reset(self, task, seed):
        self.way = ["up", "up", "left"]
        return Opening(messages=[{"role": "user", "content": f"{seed}: {self.size} fields"}])

    async def step(self, reply):
        self.way = self.way[reply.text == self.way[0] :]
        if self.way:
            return Turn(messages=[{"role": "user", "content": f"{len(self.way)} to go"}])
        return Turn(reward=1.0, done=True)
"""


def test_the_pages_suite_passes_for_an_environment_that_is_right(tmp_path):
    suite = example("docs/conformance.md", "EnvironmentConformance") + "\ndel EnvironmentConformance\n"
    assert len(set(kit(tmp_path, "test_page", WALK + suite))) == 11


def test_the_pages_integrity_suite_passes(tmp_path):
    suite = example("docs/conformance.md", "EnvironmentIntegrity") + "\ndel EnvironmentIntegrity\n"
    assert set(kit(tmp_path, "test_tricks_page", WALK + suite)) == {"test_a_trick_gets_no_reward"}


def test_pipeline_example_trains_with_row_weights(tmp_path, monkeypatch):
    page, package = "docs/plugins.md", tmp_path / "roll_pipeline_weighted"
    package.mkdir()
    (package / "config.py").write_text(example(page, "class WeightedSFTConfig"), encoding="utf-8")
    (package / "pipeline.py").write_text(example(page, "class WeightedSFT(Pipeline)"), encoding="utf-8")
    record = textwrap.indent(example(page, 'name="weighted_sft"'), "    ")
    hook = f"@hookimpl\ndef roll_pipelines():\n{record}\nROLL_HOOK_API = 1\n"
    imports = "from roll_core.spec.hooks import hookimpl\nfrom roll_core.spec.providers import PipelineProvider\n\n"
    (package / "plugin.py").write_text(imports + hook, encoding="utf-8")
    info = tmp_path / "roll_pipeline_weighted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roll-pipeline-weighted\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[roll.plugins]\nroll-pipeline-weighted = roll_pipeline_weighted.plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    runs = Runs(tmp_path, "local")

    def trained(weights):
        rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()]
        lines = [json.dumps(row | {"weight": weights[at % len(weights)]}) for at, row in enumerate(rows)]
        (tmp_path / "weighted.jsonl").write_text("\n".join(lines), encoding="utf-8")
        role = runs.sft()["sft_train"] | {"data_args": {"file_name": str(tmp_path / "weighted.jsonl")}}
        return runs.metrics(runs.ok(runs.base("weighted_sft") | {"student": role, "max_steps": 2}))

    ones, ragged = trained([1]), trained([1, 0])
    assert ones[-1]["train/loss"] < ones[0]["train/loss"]
    assert ragged[0]["train/loss"] != ones[0]["train/loss"]


def test_flow_example_trains_resumes_and_exports(tmp_path, site, monkeypatch):
    page = "docs/plugins.md"
    plugin = """
        from roll_core.spec.hooks import hookimpl
        from roll_core.spec.providers import PipelineProvider

        ROLL_HOOK_API = 1

        @hookimpl
        def roll_pipelines():
            target, config = "acme_flow.pipeline:FlowMatching", "acme_flow.config:FlowConfig"
            yield PipelineProvider(name="acme_flow", target=target, config=config, summary="A flow", tokenizer=False)
    """
    config = """
        from roll_core.spec.config import RunConfig
        from roll_core.spec.config import TrainWorkerConfig

        class FlowConfig(RunConfig):
            flow: TrainWorkerConfig

            def capabilities(self):
                return {"flow": ("module_programs",)}
    """
    files = {
        "acme_flow/plugin.py": plugin,
        "acme_flow/config.py": config,
        "acme_flow/model.py": example(page, "class FlowLibrary"),
        "acme_flow/pipeline.py": example(page, "class FlowMatching(Pipeline)"),
    }
    project = '[project]\nname = "acme-flow"\n[project.entry-points."roll.plugins"]\nacme-flow = "acme_flow.plugin"\n'
    package(site, project, files)
    angles = np.linspace(0, 2 * np.pi, 16, endpoint=False)
    rows = [json.dumps({"id": str(i), "x": [np.cos(each), np.sin(each)]}) for i, each in enumerate(angles)]
    (tmp_path / "points.jsonl").write_text("\n".join(rows), encoding="utf-8")
    runs = Runs(tmp_path, "local")
    flow = runs.sft()["sft_train"] | {"data_args": {"file_name": str(tmp_path / "points.jsonl")}}
    flow |= {"model_args": {"random_init": {"model_type": "flow"}, "dtype": "fp32"}, "infer_batch_size": 5}
    base = runs.base("acme_flow") | {"flow": flow, "max_steps": 4, "save_steps": 2}
    for key in ("tokenizer", "pretrain"):
        base.pop(key, None)
    whole = runs.ok(base)
    metrics = runs.metrics(whole)
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    assert all(each["sampled/distance"] > 0 for each in metrics)
    assert (whole.run_dir.export / "flow.safetensors").is_file()
    assert not whole.run_dir.tokenizer.exists()
    resumed = runs.metrics(runs.ok(base | {"resume_from_checkpoint": str(whole.run_dir.checkpoints / "step-2")}))
    assert resumed[-1]["train/loss"] == metrics[-1]["train/loss"]


@pytest.mark.slow(ci=True)
def test_the_python_api_runs_checks_interrupts_resumes_and_plans(tmp_path, monkeypatch):
    page = "docs/python-api.md"
    monkeypatch.chdir(tmp_path)
    written = yaml.safe_dump(Runs(tmp_path, "local").sft(), sort_keys=False)
    for name in ("sft.yaml", "grpo.yaml"):
        Path(name).write_text(written, encoding="utf-8")
    names = run(example(page, "losses = ["))
    assert len(names["losses"]) == 2
    names = run(example(page, "checked = roll.check"), **names)
    assert run(example(page, "LiveMetrics"), **names)["result"].steps_done == 2
    names = run(example(page, "max_stepps"), **names)
    assert names["mistakes"] == [("overrides", "max_stepps", "ROLL-C010")]
    run(example(page, "class StopBelow"), **names)
    record = json.loads(Path("output/sft/latest/run.json").read_text(encoding="utf-8"))
    assert record["outcome"] == "interrupted"
    assert 1 < record["steps_done"] < 8
    names = run(example(page, "resume_from_checkpoint"), **names)
    assert [each["step"] for each in names["result"].history] == list(range(1, 9))
    names = run(example(page, "host_memory_gib"), **names)
    assert names["planned"].fits
    found = run(example("README.md", "table = result.history"))
    assert len(found["table"]) == 20


@pytest.mark.slow
def test_simulated_devices_are_counted_and_renamed(tmp_path):
    page = "packages/roll-platform-sim/README.md"
    step = "import torch\ndef step():\n    torch.ones(2).to('sim').sum().item()\n"
    output = simulated.run("-c", step + example(page, "trace.num"), folder=tmp_path)
    assert {line.split("\t")[2] for line in output.splitlines()} >= {"op", "h2d", "wait"}
    device = "import torch\nassert torch.ones(2, device='npu').sum().item() == 2\n"
    simulated.run("-c", example(page, 'register("npu"') + device, folder=tmp_path, ROLL_SIM_DEVICES="0")


def test_every_python_example_is_run_by_a_test_of_this_file():
    taken = Path(__file__).read_text(encoding="utf-8")
    words = re.findall(r"example\(\s*(?:page|\"[\w/.-]+\"), (?:\"([^\"]+)\"|'([^']+)')", taken)
    assert len(words) > 10
    for page, line, text in examples("python"):
        if page in TUTORIAL:
            continue
        assert any((double or single) in text for double, single in words), f"{page}:{line}"
