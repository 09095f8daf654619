import inspect
import pickle
import subprocess
import sys

import pytest
from pydantic import ValidationError

from roll_core.errors import ContractError
from roll_pipeline_diffusion.algorithm_config import (
    CONTRACTS,
    OBJECTIVES,
    REGISTRIES,
    FlowAlgorithmConfig,
    load_function,
)


def places(**values):
    """Keys of the errors of a config."""
    with pytest.raises(ValidationError) as caught:
        FlowAlgorithmConfig(**values)
    return [".".join(map(str, each["loc"])) for each in caught.value.errors()]


ALL = [(key, name) for key, registry in REGISTRIES.items() for name in registry]


@pytest.mark.parametrize(("key", "name"), ALL)
def test_function_options_are_its_parameters_with_their_defaults(key, name):
    """Otherwise a documented default and the one that computes would differ."""
    record = REGISTRIES[key][name]
    function = load_function(record.target)
    contract = load_function(CONTRACTS[key])
    num_given = len(inspect.signature(contract.__call__).parameters) - 1
    parameters = list(inspect.signature(function).parameters.values())[num_given:]

    found = {each.name: each.default for each in parameters}

    assert found == {each: field.default for each, field in record.options.model_fields.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_a_valid_config_by_default(name):
    config = FlowAlgorithmConfig(objective=name)

    assert config.bound("objective").target.endswith(f":{name}")
    assert config.sampler_name == ("sde" if name in ("flow_grpo", "distill") else "ode")
    assert pickle.loads(pickle.dumps(config.bound("sampler"))) == config.bound("sampler")


def test_bound_options_include_defaults():
    found = FlowAlgorithmConfig(sampler="dance", objective_options={"clip": 0.01}, window="random")

    assert found.bound("sampler").options == {"noise_level": 0.3}
    assert found.bound("objective").options["clip"] == 0.01
    assert found.bound("objective").options["kl"] == "exact"
    assert found.window_steps(3, 1) == found.window_steps(3, 1)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"sampler": "euler"}, "sampler"),
        ({"objective": "flow-grpo"}, "objective"),
        ({"sampler_options": {"noise_levl": 0.5}}, "sampler_options.noise_levl"),
        ({"sampler_options": {"noise_level": 0.0}}, "sampler_options.noise_level"),
        ({"sampler": "cps", "sampler_options": {"noise_level": 1.5}}, "sampler_options.noise_level"),
        ({"sampler": "ode"}, "sampler"),
        ({"objective": "distill", "sampler": "ode"}, "sampler"),
        ({"advantage_options": {"std": "batch"}}, "advantage_options.std"),
        ({"objective_options": {"variant": "dppo", "clip": 0.1}}, "objective_options.clip"),
        ({"objective_options": {"variant": "guard"}, "logprob_reduction": "sum"}, "objective_options.variant"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"objective": "refl", "objective_options": {"grad_steps": 11}}, "objective_options.grad_steps"),
        (
            {"objective": "refl", "objective_options": {"stop": "uniform", "stop_range": [5, 11]}},
            "objective_options.stop_range",
        ),
        ({"objective": "refl", "objective_options": {"stop_range": [5, 9]}}, "objective_options.stop_range"),
        ({"objective": "refl", "objective_options": {"lv_samples": 1, "predict": "sample"}}, "objective_options"),
        (
            {"objective": "refl", "objective_options": {"min_timestep_boundary": 0.9}},
            "objective_options.min_timestep_boundary",
        ),
    ],
)
def test_mistakes_are_located_at_their_keys(values, place):
    assert places(**values) == [place]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"step_range": [2, 10]}, "window_options.step_range"),
        ({"size": 10}, "window_options.size"),
        ({"size": 3, "step_range": [4, 6]}, "window_options.size"),
        ({"step_range": [4]}, "window_options.step_range"),
    ],
)
@pytest.mark.parametrize("window", ["random", "progressive"])
def test_a_window_with_the_last_step_is_refused(window, options, place):
    assert places(window=window, window_options=options) == [place]


def test_settings_of_roll_and_draft_are_valid():
    """ROLL's Reward-FL: 8 steps, gradients from step 4 to step 7."""
    FlowAlgorithmConfig(
        objective="refl",
        num_inference_steps=8,
        objective_options={
            "grad_steps": 4,
            "predict": "sample",
            "reward_scale": 0.625,
            "reward_offset": 0.54,
            "kl_coef": 1.0,
        },
    )
    FlowAlgorithmConfig(objective="refl", objective_options={"lv_samples": 2})
    FlowAlgorithmConfig(objective="refl", objective_options={"stop": "uniform"})


def test_distillation_of_velocities_needs_no_noise():
    FlowAlgorithmConfig(objective="distill", objective_options={"loss": "velocity"}, sampler="ode")


def test_the_config_knows_what_an_objective_needs():
    assert FlowAlgorithmConfig(objective="refl").objective_inputs == {"score"}
    both = FlowAlgorithmConfig(objective="refl", objective_options={"pretrain_loss_coef": 0.1, "kl_coef": 0.1})
    assert (both.objective_inputs, both.uses_reference, both.uses_average) == ({"score", "data"}, True, False)
    nft = FlowAlgorithmConfig(objective="nft", objective_options={"kl_coef": 0.0})
    assert (nft.uses_reference, nft.uses_average) == (False, True)
    assert FlowAlgorithmConfig(objective="diffusion_dpo").uses_reference


CODE = """
from typing import Annotated
from pydantic import Field

def mine(module, batch, setup, *, scale: Annotated[float, Field(gt=0)] = 1.0): ...
mine.inputs = ("data",)
def three(update, num_steps, seed, *, first: int = 0, gap=1): return [first, first + 1]
def short(update): ...
"""


def test_functions_of_the_user_have_their_options_checked(tmp_path, monkeypatch):
    (tmp_path / "flow_config_a.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    mine = {"objective": "flow_config_a:mine"}

    found = FlowAlgorithmConfig(**mine, objective_options={"scale": 2.0}, sampler="sde")

    assert found.bound("objective").options == {"scale": 2.0}
    assert found.objective_inputs == {"data"}
    assert FlowAlgorithmConfig(window="flow_config_a:three").window_steps(0, 0) == (0, 1)
    assert places(**mine, window="flow_config_a:three") == ["window"]
    assert places(**mine, objective_options={"scale": -1.0}) == ["objective_options.scale"]
    assert places(**mine, objective_options={"scales": 1.0}) == ["objective_options.scales"]
    assert places(window="flow_config_a:three", window_options={"gap": "two"}) == ["window_options.gap"]
    assert places(window="flow_config_a:short") == ["window"]
    assert places(advantage="flow_config_a:missing") == ["advantage"]
    last = FlowAlgorithmConfig(window="flow_config_a:three", window_options={"first": 8})
    with pytest.raises(ContractError, match="flow_config_a:three"):
        last.window_steps(0, 0)


@pytest.mark.parametrize("inputs", [{"sample"}, "samples ", {"advantages", "data"}, {"teacher", "samples"}])
def test_inputs_that_the_pipeline_does_not_provide_are_refused(inputs, tmp_path, monkeypatch):
    name = f"flow_config_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(f"def mine(module, batch, setup): ...\nmine.inputs = {inputs!r}")
    monkeypatch.chdir(tmp_path)

    assert places(objective=f"{name}:mine") == ["objective"]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"objective": "nft", "sampler": "sde"}, "sampler"),
        ({"objective": "flow_matching", "sampler": "ode"}, "sampler"),
        ({"objective": "nft", "window": "random"}, "window"),
        ({"objective": "refl", "window": "random", "window_options": {"size": 1}}, "window"),
        ({"objective": "refl", "advantage_options": {"std": "none"}}, "advantage_options"),
        ({"objective": "diffusion_dpo", "logprob_reduction": "sum"}, "logprob_reduction"),
        ({"dynamic_shift": True, "shift": 3.0}, "shift"),
    ],
)
def test_a_key_that_the_objective_does_not_read_is_refused(given, key):
    assert places(**given) == [key]


def test_user_functions_are_loaded_from_the_working_directory(tmp_path, monkeypatch):
    for folder in ("installed", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "flow_config_b.py").write_text(f"def where(): return {folder!r}")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), str(tmp_path / "here"), *sys.path])

    assert load_function("flow_config_b:where")() == "here"


def test_the_schema_imports_no_torch():
    module = "roll_pipeline_diffusion.algorithm_config"
    code = f"import sys, {module} as a; a.FlowAlgorithmConfig(); print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
