"""Whatever stands in a file of ROLL, verl, OpenRLHF or TRL: a report that is complete, or one of our errors."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.errors import RollError
from roll_core.plugins.registry import load_registry
from roll_core.plugins.targets import load_target
from roll_core.spec.providers import PipelineProvider
from roll_migrate.command import written
from roll_migrate.openrlhf import import_openrlhf
from roll_migrate.roll import import_roll
from roll_migrate.trl import import_trl
from roll_migrate.verl import import_verl

FILES = Path(__file__).parent / "roll"
WHOLE = [
    yaml.safe_load((FILES / f"{name}.yaml").read_text())
    for name in ("rlvr_megatron_vllm", "sft_fsdp2", "rlvr_ppo_critic")
]
VERL = [
    yaml.safe_load((FILES.with_name("verl") / f"{name}.yaml").read_text())
    for name in ("grpo_fsdp_vllm", "ppo_megatron")
]
SCRIPTS = [
    [re.split(r"\\$| # | 2>&1", line)[0].strip() for line in file.read_text().splitlines() if re.match(r" +--\w", line)]
    for file in sorted(FILES.with_name("openrlhf").glob("*.sh"))
]
WORDS = ["", "-1", "0", "0.5", "1e9", "x", "gspo", "group_norm", "a.py", "$NOWHERE", "''", "Ünï cödé"]
TRAINERS = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(),
    st.sampled_from(["", "x", "${oc.env:NOWHERE}", "${seed}", "???", "list(range(0,4))", "grpo", "vllm", "Ünï cödé"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "b", "1"]), st.integers(0, 3), max_size=2),
)


def paths(data, prefix=()):
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths(value, (*prefix, key))


@pytest.fixture(scope="module")
def registry():
    return load_registry()


@st.composite
def mutated(draw, files):
    data = copy.deepcopy(draw(st.sampled_from(files)))
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(list(paths(data))))
        parent = data
        for step in path[:-1]:
            parent = parent[step]
        action = draw(st.sampled_from(["replace", "remove", "misspell"]))
        if action == "replace":
            parent[path[-1]] = draw(JUNK)
        else:
            value = parent.pop(path[-1])
            if action == "misspell":
                parent[f"{path[-1]}x"] = value
    return data


def leaves(value, prefix=""):
    if isinstance(value, dict) and value:
        return [leaf for key, value in value.items() for leaf in leaves(value, f"{prefix}{key}.")]
    return [prefix.removesuffix(".")]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=mutated(WHOLE))
def test_every_key_of_roll_is_reported_or_the_file_refused(data, registry, tmp_path):
    check(import_roll, data, registry, tmp_path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=mutated(VERL))
def test_every_key_of_verl_is_reported_or_the_file_refused(data, registry, tmp_path):
    check(import_verl, data, registry, tmp_path)


TRL = [
    {
        "learning_rate": 1e-6,
        "num_generations": 4,
        "max_steps": 10,
        "num_train_epochs": 2,
        "beta": 0.1,
        "epsilon": 0.1,
        "loss_type": "grpo",
        "scale_rewards": "batch",
        "use_vllm": True,
        "generation_kwargs": {"min_p": 0.1},
        "model_init_kwargs": {"dtype": "bfloat16"},
        "train_dataset": "rows.jsonl",
        "reward_funcs": ["my.exact", "my.other"],
        "reward_weights": [1.0, 2.0],
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "lora_r": 8,
        "warmup_steps": 0.1,
        "save_steps": 100,
        "output_dir": "runs/a",
    }
]


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=mutated(TRL), trainer=st.sampled_from(["grpo", "rloo", "sft", "dpo", "kto", "reward"]))
def test_every_argument_of_trl_is_reported_or_refused(data, trainer, registry, tmp_path):
    def importer(file, registry):
        return import_trl(file, registry, {"trainer": trainer})

    check(importer, {name: value for name, value in data.items() if value is not None}, registry, tmp_path)


@st.composite
def launches(draw):
    """Lines with flags of any scripts, some of them with other values, for any trainer."""
    lines = [line for script in draw(st.lists(st.sampled_from(SCRIPTS), min_size=1, max_size=2)) for line in script]
    for i in draw(st.lists(st.integers(0, len(lines) - 1), max_size=6)):
        flag, _, value = lines[i].partition(" ")
        lines[i] = f"{flag} {draw(st.sampled_from([*WORDS, value * 2]))}"
    return f"python3 -m openrlhf.cli.{draw(st.sampled_from(TRAINERS))} {' '.join(lines)}\n"


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=launches())
def test_every_openrlhf_flag_is_reported_or_the_script_refused(text, registry, tmp_path):
    flags = {word[2:].partition("=")[0]: None for word in text.split() if word.startswith("--")}
    check(import_openrlhf, flags, registry, tmp_path, text)


def check(importer, data, registry, tmp_path, text=""):
    file = tmp_path / ("theirs.sh" if text else "theirs.yaml")
    file.write_text(text or yaml.safe_dump(data, allow_unicode=True), encoding="utf-8")
    try:
        imported = importer(file, registry)
    except RollError:
        return
    told = [value.key for value in imported.keys if value.status != "added"]
    assert len(told) == len(set(told))
    assert not [
        leaf for leaf in leaves(data) if leaf not in told and not any(key.startswith(f"{leaf}.") for key in told)
    ]
    record = registry.find(PipelineProvider, imported.pipeline)
    schema = load_target(record.config, owner=imported.pipeline)
    assert yaml.safe_load(written(imported.config, schema, heading="")) is not None
