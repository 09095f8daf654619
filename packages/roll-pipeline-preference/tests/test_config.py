"""Configs of preference training: what is refused or warned about, and wrong rows before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import Registry
from roll_pipeline_preference import plans
from roll_pipeline_preference.config import OTHER_NAMES
from shared_tests.hf_plugins import hf_plugins

REGISTRY = Registry(hf_plugins("roll-pipeline-preference"))
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
DPO = """\
pipeline: dpo
actor_train:
  model_args: {random_init: {model_type: qwen3}}
  data_args: {file_name: pairs.jsonl}
  strategy_args: {strategy_name: hf_train}
reference: {strategy_args: {strategy_name: hf_infer}}
"""
FREE = DPO.replace("reference: {strategy_args: {strategy_name: hf_infer}}\n", "")
LORA = FREE.replace("model_type: qwen3}", "model_type: qwen3}, lora_target: all-linear")
REWARD_MODEL = """\
pipeline: reward_model
reward_train:
  model_args: {random_init: {model_type: qwen3}}
  data_args: {file_name: pairs.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


@pytest.mark.parametrize("text", [DPO, REWARD_MODEL])
@pytest.mark.parametrize(
    ("value", "names"), [("tensorboard", ["tensorboard"]), ("null", []), ("[tensorboard]", ["tensorboard"])]
)
def test_trackers_are_named_as_in_other_pipelines(text, value, names, folder):
    registry = Registry(hf_plugins("roll-pipeline-preference", "roll-trackers"))
    (folder / "run.yaml").write_text(f"{text}track_with: {value}\n")
    assert load(folder / "run.yaml", (), registry).config.track_with == names


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("pairs.jsonl", PAIR)
    return tmp_path


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def loaded(text, *overrides):
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load(Path("run.yaml"), overrides, REGISTRY, FileCheck())


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (DPO, []),
        (DPO, ["loss_type=[sigmoid, bco_pair, sft]", "loss_weights=[0.8, 0.2, 1]"]),
        (DPO, ["loss_type=kto"]),
        (DPO, ["loss_type=exo_pair", "label_smoothing=0.001"]),
        (FREE, ["precompute_ref_log_probs=true"]),
        (FREE, ["reference_free=true"]),
        (FREE, ["loss_type=orpo"]),
        (LORA, []),
        (REWARD_MODEL, []),
    ],
)
def test_a_config_is_accepted(text, overrides):
    assert not loaded(text, *overrides).warnings


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (FREE, []),  # no reference
        (DPO, ["loss_type=simpo"]),  # a reference that nothing reads
        (DPO, ["precompute_ref_log_probs=true"]),  # two references
        (FREE, ["loss_type=cpo", "precompute_ref_log_probs=true"]),
        (FREE, ["loss_type=cpo", "reference_free=true"]),
        (DPO, ["loss_type=[]"]),
        (DPO, ["loss_type=[sigmoid, sigmoid]"]),
        (DPO, ["loss_type=[sigmoid, kto]"]),
        (DPO, ["loss_type=[sigmoid, sft]", "loss_weights=[1]"]),
        (DPO, ["loss_type=ipo", "label_smoothing=0.1"]),
        (DPO, ["loss_type=exo_pair"]),
        (DPO, ["loss_type=apo_zero", "f_divergence_type=forward_kl"]),
        (DPO, ["loss_type=kto", "ld_alpha=0.5"]),
        (DPO, ["loss_type=kto", "use_weighting=true"]),
        (FREE, ["loss_type=sft", "ld_alpha=0.5"]),
        (FREE, ["loss_type=sft", "use_weighting=true"]),
        (DPO, ["label_smoothing=0.5"]),
        (DPO, ["simpo_gamma=1.0"]),
        (DPO, ["desirable_weight=2.0"]),
        (DPO, ["f_alpha_divergence_coef=0.3"]),
        (DPO, ["f_divergence_type=js_divergence", "f_divergence_max_exponent=10"]),
        (DPO, ["orpo_max_mean_logprob=-0.1"]),
        (DPO, ["loss_type=dpo"]),
        (DPO, ["actor_infer={strategy_args: {strategy_name: hf_infer}}"]),
    ],
)
def test_keys_without_effect_or_meaning_are_refused(text, overrides):
    with pytest.raises(ConfigError):
        loaded(text, *overrides)


EVALUATION = """\
actor_infer: {strategy_args: {strategy_name: hf_infer}}
validation: {data_args: {file_name: pairs.jsonl}}
rewards: {math: {reward: math_rule, ground_truth: chosen}}
"""


def test_engine_for_evaluation_needs_a_transport():
    with pytest.raises(ConfigError) as raised:
        loaded(DPO + EVALUATION, "weight_transport=disk")
    assert [(each.key, each.code) for each in raised.value.problems] == [("weight_transport", "ROLL-C030")]
    assert loaded(DPO + EVALUATION, "weight_transport=shared").config.actor_infer


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_another_name_of_a_loss_is_refused_with_the_one_here(name):
    for given in (name, f"[{name.upper()}, sft]"):
        with pytest.raises(ConfigError) as raised:
            loaded(DPO, f"loss_type={given}")
        (problem,) = raised.value.problems
        assert problem.key == "loss_type"
        assert OTHER_NAMES[name] in problem.message


def test_a_small_beta_of_simpo_is_warned_about():
    (warning,) = loaded(FREE + "loss_type: simpo\n").warnings
    assert warning.key == "beta"
    assert not loaded(FREE + "loss_type: simpo\nbeta: 2.0\n").warnings


@pytest.mark.parametrize(
    ("row", "overrides"),
    [
        ({"rejected": "4"}, []),
        ({"chosen": " "}, []),
        ({"rejected": None}, []),
        ({"prompt": None}, []),
        ({"chosen": None, "rejected": None, "response": "4", "label": True}, []),
        ({"margin": "wide"}, ["margin=margin"]),
        ({"margin": "nan"}, ["margin=margin"]),
        ({"margin": -0.5}, ["margin=margin"]),
        ({"margin": 1e39}, ["margin=margin"]),
        ({"margin": 10**400}, ["margin=margin"]),
    ],
    ids=[
        "equal",
        "empty",
        "missing",
        "no prompt",
        "unpaired",
        "margin",
        "margin that is no number",
        "negative margin",
        "margin above float32",
        "margin above float64",
    ],
)
def test_a_wrong_row_is_located_before_anything_is_built(row, overrides):
    given = {name: value for name, value in {**PAIR, **row}.items() if value is not None}
    write("pairs.jsonl", given)
    text = REWARD_MODEL if overrides else DPO
    with pytest.raises(ConfigError) as raised:
        loaded(text, *overrides)
    (problem,) = raised.value.problems
    assert problem.key.endswith("data_args.file_name")
    assert problem.where == "run.yaml:4:26"
    assert "pairs.jsonl" in problem.message


def test_labelled_rows_are_for_kto():
    write("pairs.jsonl", {"prompt": "2+2=", "response": "4", "label": True})
    loaded(DPO, "loss_type=kto")
    write("pairs.jsonl", {"prompt": "2+2=", "response": "4", "label": "perhaps"})
    with pytest.raises(ConfigError):
        loaded(DPO, "loss_type=kto")


def test_papers_terms_are_added_unless_they_are_listed():
    def weights(*overrides):
        return loaded(FREE, *overrides).config.weights

    assert weights("loss_type=orpo") == {"orpo": 1.0, "sft": 1.0}
    assert weights("loss_type=[cpo, sft]", "loss_weights=[1, 0.2]") == {"cpo": 1.0, "sft": 0.2}
    assert weights("loss_type=simpo") == {"simpo": 1.0}


def test_the_plan_has_the_reference_that_the_config_asks_for():
    def acts(text, *overrides):
        return [dict(phase.acts) for phase in plans.preference(loaded(text, *overrides).config).phases][:2]

    assert acts(DPO) == [{"reference": "score"}, {"actor_train": "backward"}]
    assert acts(LORA) == [{"actor_train": "score"}, {"actor_train": "backward"}]
    assert acts(FREE, "loss_type=orpo") == [{"actor_train": "backward"}, {"actor_train": "step"}]
    (role,) = plans.reward_model(loaded(REWARD_MODEL).config).roles
    assert (role.name, role.task) == ("reward_train", "reward")
