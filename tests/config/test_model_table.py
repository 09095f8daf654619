"""Architectures that did not work with the installed versions are mistakes of `check`, which loads no model."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_core.cli import main as cli
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_modeling import model_table as table_module
from roll_modeling.model_table import (
    CAUSAL_LM,
    CLASSIFIER,
    ON_A_CPU,
    check_buildable,
    check_flat,
    check_tried,
    has_experts,
    key_problems,
    position_table,
    untrained,
)
from roll_strategy_megatron.config import MegatronConfig
from roll_testing.errors import mentions
from roll_testing.errors import raises_error as raises_error_with

RANDOM = """\
pipeline: rlvr
actor_train:
  model_args: {random_init: {model_type: TYPE}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: STRATEGY}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards:
  math: {reward: math_rule}
"""
STORED = RANDOM.replace("  model_args: {random_init: {model_type: TYPE}}\n", "").replace(
    "pipeline: rlvr\n", "pipeline: rlvr\npretrain: model\n"
)
AT_RANDOM = (3, 42, "actor_train.model_args.random_init.model_type")
AT_PRETRAIN = (2, 11, "pretrain")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    return tmp_path


def found(text, *overrides, needs=True):
    """`((line, column, key), message)` of each mistake."""
    Path("run.yaml").write_text(text)
    try:
        load("run.yaml", overrides, load_registry(), needs=needs)
    except ConfigError as error:
        return [((*map(int, each.where.split(":")[1:]), each.key), each.message) for each in error.problems]
    return []


@pytest.mark.parametrize("strategy", ["hf_train", "fsdp2_train"])
def test_unknown_model_type_is_located(here, strategy):
    problems = found(RANDOM.replace("TYPE", "qwen33").replace("STRATEGY", strategy))
    assert [where for where, _ in problems] == [AT_RANDOM, AT_RANDOM]
    roles = (f"{strategy} of actor_train", "hf_infer of actor_infer")
    assert all(sum(role in message for _, message in problems) == 1 for role in roles)
    assert found(RANDOM.replace("TYPE", "qwen3").replace("STRATEGY", strategy)) == []


@pytest.mark.parametrize(("model_type", "mistakes"), [("qwen3", 0), ("vit", 2), ("qwen33", 2), ("rwkv", 1)])
def test_model_type_of_a_directory_is_checked_as_well(here, model_type, mistakes):
    """hf_train trains an rwkv; hf_infer keeps its state in caches that an rwkv does not take."""
    Path("model/config.json").write_text(json.dumps({"model_type": model_type}))
    text = STORED.replace("STRATEGY", "hf_train")
    assert [where for where, _ in found(text)] == [AT_PRETRAIN] * mistakes
    assert found(text, needs=False) == []


def test_model_with_remote_code_is_not_checked(here):
    keys = {"model_type": "of_mine", "auto_map": {"AutoModelForCausalLM": "modeling.OfMine"}}
    Path("model/config.json").write_text(json.dumps(keys))
    assert found(STORED.replace("STRATEGY", "hf_train")) == []


def test_role_with_own_environment_skips_local_package_checks(here, capsys):
    text = RANDOM.replace("TYPE", "qwen33").replace("STRATEGY", "hf_train")
    text = text.replace("{strategy_name: hf_infer}", f"{{strategy_name: hf_infer}}\n  environment: {sys.prefix}")
    (problem,) = found(text, "executor=ray")
    assert problem[0] == AT_RANDOM
    assert "actor_infer" not in problem[1]
    # What is not compared is printed.
    Path("run.yaml").write_text(text)
    Path("rows.jsonl").write_text('{"prompt": "1+1", "ground_truth": "2"}\n')
    assert cli.main(["check", "run.yaml", "executor=ray", "actor_train.model_args.random_init.model_type=qwen3"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not checked" in line)
    assert mentions(line, "actor_infer")
    assert "actor_train" not in line


def test_lists_equal_those_of_the_transformers_auto_classes():
    from transformers.models.auto import configuration_auto, modeling_auto

    for name, auto in ((CAUSAL_LM, "CAUSAL_LM"), (CLASSIFIER, "SEQUENCE_CLASSIFICATION")):
        mapping = getattr(modeling_auto, f"MODEL_FOR_{auto}_MAPPING")
        types = configuration_auto.CONFIG_MAPPING_NAMES
        builds = {each for each, config in types.items() if type(config, (), {}) in mapping}
        assert len(builds) > 100
        for each in types:
            assert raises_error(check_buildable, {"model_type": each}, name) == (each not in builds)


def raises_error(check, *arguments):
    try:
        check(*arguments)
    except ValueError:
        return True
    return False


@pytest.fixture
def table(tmp_path, monkeypatch):
    """`table(row, **versions)` installs a package `acme_tried` whose table has the row of `llama`."""

    def write(row, **versions):
        table_module.model_table.cache_clear()
        folder = tmp_path / "acme_tried"
        folder.mkdir(exist_ok=True)
        folder.joinpath("__init__.py").write_text("raise ImportError")
        text = json.dumps({"made_with": versions or {"transformers": "999"}, "models": {"llama": row}})
        folder.joinpath("models.json").write_text(text)

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    table_module.model_table.cache_clear()


def tried(*columns, **keys):
    return check_tried({"model_type": "llama", **keys}, "acme_tried", *columns)


def test_failed_attempts_are_errors_of_their_column(table):
    table({"forward": 2e-6, "lora": "no_adapters"})
    assert tried("forward") is None
    with raises_error_with(ValueError, "llama", "lora", "no_adapters"):
        tried("forward", "lora")
    assert tried("lora", auto_map={}) is None
    table({"start": "no_layers"})
    with raises_error_with(ValueError, "start", "no_layers"):
        tried("start", "forward")


def test_failures_on_other_versions_or_devices_are_warnings(table):
    for versions in ({"transformers": "4.0"}, {"no-such-engine": "1.0"}):
        table({"decode": "no_cache"}, **versions)
        assert mentions(tried("decode"), "no_cache", *versions)
    table({"start": f"{ON_A_CPU}no_kernel"})
    assert mentions(tried("start"), "no_kernel")
    table({"decode": 2e-3, "transformers": 3e-3})
    assert mentions(tried("decode"), "0.002", "0.003")


def test_a_type_without_a_row_was_never_tried(table):
    table({})
    assert mentions(tried("start", model_type="qwen9"), "qwen9")
    assert tried("lora", model_type="qwen9") is None
    assert check_tried({"model_type": "qwen9"}, "no_such_package") is None


@pytest.mark.parametrize(("made", "mistakes"), [("999", 1), ("4.0", 0)])
def test_the_lora_column_is_read_if_adapters_are_trained(here, monkeypatch, made, mistakes):
    table = table_module.ModelTable(
        made_with={"transformers": made}, models={"llama": {"forward": 2e-6, "lora": "no_adapters"}}
    )
    real = table_module.model_table
    monkeypatch.setattr(table_module, "model_table", lambda name: table if name == "roll_strategy_hf" else real(name))
    text = RANDOM.replace("TYPE}}", "llama}, lora_target: all-linear}").replace("STRATEGY", "hf_train")
    problems = found(text)
    assert [where[2] for where, _ in problems] == ["actor_train.model_args.lora_target"] * mistakes
    assert all(mentions(message, "llama", "no_adapters") for _, message in problems)
    if not mistakes:
        warnings = load("run.yaml", (), load_registry(), needs=True).warnings
        assert [each.key for each in warnings if "no_adapters" in each.message] == [
            "actor_train.model_args.lora_target"
        ]
    assert found(text, "actor_train.model_args.lora_rank=0") == []
    assert found(text, "actor_train.model_args.lora_target=q_proj") == []  # a warning: only all-linear was tried
    assert found(text, "~actor_train.model_args.lora_target") == []


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_warnings_about_models_are_at_the_key_that_names_them(here, model_type):
    """The indexers of sparse attention get no gradient."""
    Path("run.yaml").write_text(RANDOM.replace("TYPE", model_type).replace("STRATEGY", "hf_train"))
    (warning,) = (
        each for each in load("run.yaml", (), load_registry(), needs=True).warnings if "indexer" in each.message
    )
    assert warning.key == "actor_train.model_args.random_init.model_type"
    assert mentions(warning.message, "actor_train")
    assert untrained({"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("keys", "flat"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "mamba2"}, False),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, False),
        ({"model_type": "lfm2", "layer_types": ["full_attention", "full_attention"]}, True),
        ({"model_type": "llama4_text", "attention_chunk_size": 8}, False),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, True),
        ({"model_type": "mamba2", "auto_map": {}}, True),
    ],
    ids=str,
)
def test_models_that_need_padding_are_known(keys, flat):
    assert raises_error(check_flat, keys) is not flat


@pytest.mark.parametrize(
    ("keys", "mixture"),
    [
        ({"model_type": "qwen3_moe"}, True),  # 128 where the config says nothing
        ({"model_type": "qwen3_moe", "num_experts": 0}, False),
        ({"model_type": "mixtral"}, True),
        ({"model_type": "ernie4_5_moe"}, True),
        ({"model_type": "qwen3"}, False),
        ({"model_type": "of_mine", "n_routed_experts": 8}, True),
        ({"model_type": "of_mine", "text_config": {"num_local_experts": 8}}, True),
        ({}, False),
    ],
)
def test_moe_models_are_recognised_by_keys_or_type(keys, mixture):
    assert has_experts(keys) is mixture


def test_nothing_is_refused_if_transformers_is_not_installed(tmp_path):
    """As in an environment with roll-core's light dependencies alone."""
    folder = Path(table_module.__file__).parents[1]
    ask = "from roll_modeling.model_table import *; check_buildable({'model_type': 'qwen33'}, CAUSAL_LM)\n"
    ask += "print(has_experts({'model_type': 'mixtral'}))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(folder)!r})\n{ask}"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ},
    )
    assert done.stdout.split() == ["True"]


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
SFT = """\
pipeline: sft
prompt_length: 16
response_length: 64
sft_train:
  model_args: {random_init: MODEL}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


AT_LENGTH = (2, 16, "prompt_length")


@pytest.mark.parametrize("positions", [79, 80])
def test_lengths_beyond_a_table_of_positions_are_a_mistake(here, positions):
    model = GPT2 | {"n_positions": positions}
    expected = [] if positions == 80 else [AT_LENGTH]
    text = SFT.replace("MODEL", json.dumps(model))
    assert [where for where, _ in found(text)] == expected
    Path("model/config.json").write_text(json.dumps(model))
    sources = ["~sft_train.model_args", "+pretrain=model"]
    assert [where for where, _ in found(text, *sources)] == expected


def test_lengths_are_a_warning_for_a_role_elsewhere(here):
    text = SFT.replace("MODEL", json.dumps(GPT2 | {"n_positions": 79}))
    Path("run.yaml").write_text(f"{text}  environment: {sys.prefix}\n")
    (warning,) = load("run.yaml", ["executor=ray"], load_registry(), needs=True).warnings
    assert warning.key == "prompt_length"
    assert mentions(warning.message, "hf_train of sft_train", "79", "80")


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "gpt2", "n_positions": 24}, 24),
        ({"model_type": "opt", "max_position_embeddings": 30}, 30),
        ({"model_type": "gptj", "n_positions": 24}, 24),
        ({"model_type": "gpt_neo"}, 2048),
        ({"model_type": "qwen3", "max_position_embeddings": 24}, None),
        ({"model_type": "bloom"}, None),
        ({"model_type": "unknown"}, None),
    ],
    ids=str,
)
def test_tables_of_positions_are_known(keys, rows):
    assert position_table(keys) == rows


@pytest.mark.parametrize(
    ("more", "warns"),
    [
        ({"max_position_embeddings": 79}, True),
        ({"max_position_embeddings": 80}, False),
        ({}, False),
        ({"max_position_embeddings": 40, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, False),
        (
            {
                "max_position_embeddings": 40,
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 20},
            },
            True,
        ),
    ],
)
def test_lengths_beyond_rotary_positions_are_a_warning(here, more, warns):
    Path("run.yaml").write_text(SFT.replace("MODEL", json.dumps({"model_type": "qwen3"} | more)))
    warnings = load("run.yaml", (), load_registry()).warnings
    assert [each.key for each in warnings] == ["prompt_length"] * warns


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", [-1]),
        ("num_hidden_layers", -1),
        ("num_key_value_heads", "os:system"),
        ("hidden_size", 2**64),
        ("hiden_size", 8),
        ("tie_word_embeddings", "maybe"),
        ("initializer_range", {"a": 1}),
    ],
    ids=str,
)
def test_random_model_values_are_checked_where_written(here, key, value):
    model = {"model_type": "qwen3", key: value}
    ((where, message),) = found(RANDOM.replace("{model_type: TYPE}", json.dumps(model)).replace("STRATEGY", "hf_train"))
    assert where[0] == 3
    assert where[2] == f"actor_train.model_args.random_init.{key}"
    assert key != "hiden_size" or "hidden_size" in message


@pytest.mark.parametrize("value", [{"a": "b"}, [1], 5, None])
def test_a_model_type_is_a_name(here, value):
    text = RANDOM.replace("{model_type: TYPE}", json.dumps({"model_type": value})).replace("STRATEGY", "hf_train")
    assert [where[2] for where, _ in found(text)] == ["actor_train.model_args.random_init"]


def test_overrides_that_a_model_lacks_are_refused(here):
    Path("model/config.json").write_text(json.dumps({"model_type": "qwen3", "own_key": 1}))
    at = "actor_train.model_args.model_config_kwargs"
    text = STORED.replace("STRATEGY", "hf_train")
    problems = found(text, f"+{at}.embd_pdrop=0.0", f"+{at}.rope_theta=5.0", f"+{at}.own_key=2", f"+{at}.head_dim=x")
    assert [where[-1] for where, _ in problems] == [f"{at}.embd_pdrop", f"{at}.head_dim"]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "deepseek_v3", "qwen3_next", "gemma3", "mamba2", "opt"])
def test_every_field_of_a_config_is_known_with_its_default(model_type):
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    assert key_problems(model_type, dict.fromkeys(fields, "?")).keys() <= fields
    assert all("unknown" not in reason for reason in key_problems(model_type, dict.fromkeys(fields, "?")).values())
    defaults = json.loads(json.dumps(config().to_dict(), default=str))
    assert not key_problems(model_type, {key: defaults[key] for key in fields & defaults.keys()})


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5", "qwen2_5_vl"])
def test_megatron_has_no_bridge_for_models_with_images(model_type):
    with pytest.raises(ValueError, match=model_type):
        MegatronConfig().check_model({"model_type": model_type, "text_config": {"model_type": "qwen2"}})
