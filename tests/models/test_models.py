"""Each plugin's `models.json` has what its strategy did with a tiny model of each type.

`ROLL_UPDATE_GOLDEN=1 pytest -n 0 tests/models/test_models.py -m "" -k hf_train` writes the rows of one strategy, an
engine's in its own environment; `ROLL_UPDATE_GOLDEN=new` only rows that are missing. Otherwise the trials are compared
with the rows. CI tries the types of `EACH_CHANGE`.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version
from transformers import CONFIG_MAPPING

from roll_core.spec.providers import InferProvider, TrainProvider
from roll_infer_hf import decoder
from roll_infer_sglang.engine_environment import engine_environment as sglang_environment
from roll_infer_vllm.engine_environment import engine_environment as vllm_environment
from roll_modeling.model import load_model
from roll_modeling.model_table import ON_A_CPU, ROUNDING, model_table
from roll_strategy_megatron.config import MegatronConfig
from roll_testing.bench import Case
from roll_testing.infer.engine import Setup
from roll_testing.kit import registry
from roll_testing.ranks import RankHost, RanksFailedError, free_port
from shared_tests import model_trials
from shared_tests.tiny_models import TYPES

ROOT = Path(__file__).parents[2]
STAND_INS = str(ROOT / "tests/shared/stand_ins")  # torchvision, which code of models with images imports
SGLANG_STAND_INS = [str(ROOT / "packages/roll-infer-sglang/tests/cpu"), STAND_INS]
sys.path.append(str(ROOT / "packages/roll-strategy-megatron/tests"))  # for `megatron_on_cpu`
UPDATE = os.environ.get("ROLL_UPDATE_GOLDEN", "")
EACH_CHANGE = ("llama", "qwen3_moe", "mamba2", "gpt2")
SPLIT = {
    "tensor_parallel": {"tensor_model_parallel_size": 2},
    "context_parallel": {"ulysses_size": 2},
}
"""Columns of fsdp2_train on two ranks, with their `strategy_config`."""
CONFIGS = {
    "hf_train": {},
    "fsdp2_train": {},
    "deepspeed_train": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "megatron_train": {},
    "hf_infer": {},
    "vllm": {"kv_cache_memory_bytes": 128 << 20, "max_num_seqs": 16},
    "sglang": {
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.3,
    },
}
ENGINES = ("hf_infer", "vllm", "sglang")
FOR_ACCELERATORS = ("vllm", "sglang")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "vllm": {
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 32,
        "rope_parameters": YARN,
    },
    "sglang": {"qk_rope_head_dim": 32, "head_dim": 32, "rope_parameters": YARN},
}
"""The only sizes and rotation of latent attention that an engine computes on a CPU."""
EVERY_HEAD = {"num_key_value_heads": 4}
UNSCALED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
RELEASED = {
    "vllm": {"falcon": {"ffn_hidden_size": 512}, "minicpm3": UNSCALED},
    "sglang": {"mistral": {"sliding_window": None}, "minicpm3": UNSCALED}
    | {"mellum": {"layer_types": ["sliding_attention", "full_attention"]}}  # it asserts that a layer has a window
    | dict.fromkeys(("olmo", "olmoe"), EVERY_HEAD)
    | {"phi": EVERY_HEAD | {"intermediate_size": 512}},
}
"""Values of keys that an engine's model ignores or asserts, because every released model of the type has them."""
CAUSES = {
    ("vllm", "bloom"): "vLLM's BloomMLP computes GELU exactly, and transformers by tanh",
    ("vllm", "ctrl"): "vLLM's Transformers backend does not update the bias of an output layer",
    ("vllm", "doge"): "vLLM's Transformers backend drops the mask that Doge's attention computes from its values",
    ("vllm", "longcat_flash"): "transformers stores matrices of the identity experts, which vLLM has no place for",
    ("vllm", "zaya"): "vLLM's Transformers backend keeps no state between tokens, which ZAYA's convolutions need",
    (
        "sglang",
        "gemma",
    ): "SGLang's GemmaMLP computes GELU exactly, and transformers by tanh; its norms store weight + 1",
    ("sglang", "gemma2"): f"{ON_A_CPU}SGLang's TorchNativeAttnBackend ignores attn_logit_softcapping",
    ("sglang", "longcat_flash"): "SGLang's LongcatFlashConfig sets max_position_embeddings after transformers reads it",
    ("sglang", "minicpm3"): "SGLang's MiniCPM3ForCausalLM deletes kv_b_proj when it has loaded it",
    ("sglang", "recurrent_gemma"): "SGLang's Transformers backend keeps no state of recurrent layers between tokens",
    ("sglang", "vaultgemma"): "SGLang's Transformers backend ignores attn_logit_softcapping",
}
"""Why logprobs or digests differ, by the engine's code: the reason of such a row."""
PACKAGES = {
    "facts": ("roll_modeling", "transformers"),
    "hf_train": ("roll_strategy_hf", "transformers"),
    "fsdp2_train": ("roll_strategy_fsdp2", "transformers"),
    "deepspeed_train": ("roll_strategy_deepspeed", "deepspeed"),
    "megatron_train": ("roll_strategy_megatron", "megatron-core"),
    "hf_infer": ("roll_infer_hf", "transformers"),
    "vllm": ("roll_infer_vllm", "vllm"),
    "sglang": ("roll_infer_sglang", "sglang"),
}
"""Package with the file of each strategy, and the distribution whose version decides."""
TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def host():
    """Forks a process for each trial."""
    preload = ["shared_tests.model_trials", "roll_testing.kit", "peft", "transformers.optimization"]
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "PYTHONWARNINGS": "ignore"}
    if importlib.util.find_spec("deepspeed"):
        preload.append("deepspeed")
    if importlib.util.find_spec("megatron"):
        preload.insert(0, "megatron_on_cpu")
    if importlib.util.find_spec("sglang"):
        preload.insert(0, "shared_tests.sglang_in_forks")
        environment |= _importing(SGLANG_STAND_INS)
        environment |= sglang_environment("cpu", {}, num_threads=1, num_slots=1)
        environment |= {"TRITON_INTERPRET": "1"}
    if importlib.util.find_spec("vllm"):
        preload.insert(0, "shared_tests.vllm_in_forks")
        environment |= _importing([STAND_INS])
        environment |= vllm_environment("cpu", {}, num_threads=1, num_slots=1, compiles=False)
    started = RankHost(preload=preload, environment=environment)
    yield started
    started.close()


def _importing(folders):
    """Environment variables with which these folders are searched first."""
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, sys.path)])}


@cache
def table_file(strategy):
    """The file, in the sources of the package."""
    return Path(importlib.util.find_spec(PACKAGES[strategy][0]).submodule_search_locations[0], "models.json")


def made_with(strategy):
    found = {}
    for name in {"transformers", PACKAGES[strategy][1]}:
        try:
            found[name] = Version(version(name)).public
        except PackageNotFoundError:
            found[name] = Version(version(f"{name}-cpu")).public
    return dict(sorted(found.items()))


def rows(strategy):
    table = model_table(PACKAGES[strategy][0])
    return table.models if table else {}


def write(strategy, **sections):
    """Replace rows of `models` and `types`. What other versions wrote is removed."""
    file, versions = table_file(strategy), made_with(strategy)
    with file.open("a+", encoding="utf-8") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)  # other processes write other rows
        opened.seek(0)
        table = json.loads(opened.read() or "{}")
        table = table if table.get("made_with") == versions else {"made_with": versions}
        for name, new in sections.items():
            table[name] = dict(sorted((table.get(name, {}) | new).items())) if isinstance(new, dict) else new
        opened.truncate(0)
        opened.write(text_of(table))


def text_of(table):
    """As JSON, each row on one line."""
    sections = []
    for name, value in table.items():
        if name in ("models", "types"):
            lines = ",\n".join(
                f"  {json.dumps(key)}: {json.dumps(row, ensure_ascii=False)}" for key, row in value.items()
            )
            sections.append(f'"{name}": {{\n{lines}\n }}')
        else:
            sections.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{" + ",\n ".join(sections) + "}\n"


def refused(strategy, model_type):
    """Why the type is not tried: the engine's transformers lacks it, or Megatron's bridge does. Otherwise None."""
    if model_type not in CONFIG_MAPPING:
        return f"transformers {version('transformers')} has no model type {model_type}"
    if strategy != "megatron_train":
        return None
    try:
        MegatronConfig().check_model({"model_type": model_type})
    except ValueError as error:
        return model_trials.reason(str(error).partition("; it has ")[0])
    return None


def trial(host, strategy, model_type, folder):
    """The row of a type."""
    if (refusal := refused(strategy, model_type)) is not None:
        return {"start": refusal}
    released = RELEASED.get(strategy, {}).get(model_type, {})
    latent, images = LATENT.get(strategy, {}), strategy == "vllm"  # which loads the processor before the weights
    spec = model_trials.write_tiny(folder / model_type, model_type, released, latent, images=images)
    keys = json.loads(Path(spec.path, "config.json").read_text(encoding="utf-8"))
    if strategy == "megatron_train":
        MegatronConfig().check_model(keys)  # a value that it rejects is a mistake of the tiny model
    config = CONFIGS.get(strategy, {}) | (
        {"attention_backend": "CPU_MLA"} if strategy == "vllm" and "kv_lora_rank" in keys else {}
    )

    def run(function, *arguments, num_ranks=1):
        try:
            return host.run(function, *arguments, num_ranks=num_ranks, timeout_s=TIMEOUT_S)
        except RanksFailedError as error:
            # A timeout tells about the host, and an error outside of an engine about the reference.
            if " raised\n" not in str(error) or strategy in ENGINES:
                raise
            lines = [line for line in str(error).partition("\n--- output")[0].splitlines() if line.strip()]
            return model_trials.reason(lines[-1])

    def plain(value):
        if isinstance(value, float):
            return model_trials.rounded(value)
        return value.replace(str(folder), "") if isinstance(value, str) else value

    if strategy == "facts":
        found = run(model_trials.fact_row, spec)
    elif strategy in ENGINES:
        provider = registry().find(InferProvider, strategy)
        found = run(
            model_trials.engine_row,
            Setup(provider=provider, strategy_config=config, model=spec, timeout_s=2 * TIMEOUT_S),
        )
    else:
        provider = registry().find(TrainProvider, strategy)
        case = Case(provider=provider, strategy_config=config, model=spec, training=None)
        found = run(model_trials.train_row, case, str(folder))
        if strategy == "fsdp2_train" and not isinstance(found, str):
            for column, config in SPLIT.items():
                split = replace(
                    case, strategy_config=config, world_size=2, devices=("cpu",) * 2, master_port=free_port()
                )
                errors = run(model_trials.split_error, split, num_ranks=2)
                found[0][column] = errors if isinstance(errors, str) else max(errors)
    if isinstance(found, str):
        return {"start": plain(found)}
    row = {name: plain(value) for name, value in found[0].items()}
    if strategy == "hf_infer" and "start" not in row:
        row["path"] = "module" if decoder.unsupported(load_model(spec)) else "fast"
    explained = 2 * row.get("transformers", 0.0)
    for name, value in row.items():
        if name != "transformers" and isinstance(value, float) and value > max(ROUNDING, explained):
            row[name] = f"differs by {value:g} from transformers, and rounding explains at most {ROUNDING:g}"
    cause = CAUSES.get((strategy, model_type))
    # Files of released models may have keys that transformers' config does not need.
    assert cause or "Config' object has no attribute" not in row.get("start", ""), f"the tiny model's config: {row}"
    if strategy in FOR_ACCELERATORS:
        reasons = {name: value for name, value in row.items() if isinstance(value, str)}
        row |= {
            name: f"{cause} ({value})" if cause else model_trials.on_a_cpu(value) for name, value in reasons.items()
        }
    return row


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", PACKAGES)
@pytest.mark.parametrize(
    "model_type", [each if each in EACH_CHANGE else pytest.param(each, marks=pytest.mark.slow) for each in TYPES]
)
def test_model_supports_what_its_row_declares(host, strategy, model_type, tmp_path):
    need_versions(strategy)
    if UPDATE == "new" and model_type in rows(strategy):
        pytest.skip("its row exists")
    stored = rows(strategy).get(model_type)
    if stored is None and not UPDATE:
        pytest.skip("it has no row yet")
    found = trial(host, strategy, model_type, tmp_path)
    if UPDATE:
        write(strategy, models={model_type: found})
        return
    assert works(found) == works(stored), (found, stored)


def need_versions(strategy):
    """Skip the test without the strategy's engine, or with versions other than those of the table."""
    try:
        versions = made_with(strategy)
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGES[strategy][1]} is not installed")
    table = model_table(PACKAGES[strategy][0])
    if not UPDATE and (table is None or table.made_with != versions):
        pytest.skip(f"its table was not made with {versions}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("types", [EACH_CHANGE, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_facts_are_those_of_transformers_classes(types):
    need_versions("facts")
    found = model_trials.config_facts(types)
    if UPDATE:
        write("facts", every=model_trials.base_keys(), types=found)
        return
    table = model_table("roll_modeling")
    assert table.every == model_trials.base_keys()
    assert {name: table.types[name] for name in found} == found
    assert types or found.keys() == table.types.keys()


@pytest.mark.parametrize("strategy", PACKAGES)
def test_rows_have_types_that_are_tried(strategy):
    assert rows(strategy).keys() <= set(TYPES)


PLACE = '  File "/a/rope.py", line 9, in get\n    assert scale is not None\n'


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Traceback:\n[rank 0] ValueError: a\nKeyError: 'b'\n[x] a warning\n", "KeyError: 'b'"),
        (f"ValueError: a\n{PLACE}           ^^^^^\nAssertionError\n", "AssertionError: scale is not None (rope.py 9)"),
        (f"[rank 0] {PLACE}AssertionError\n[x] torch.OutOfMemoryError: b\n", "torch.OutOfMemoryError: b"),
        ("nothing", ""),
    ],
)
def test_the_last_exception_of_a_log_is_the_reason(log, reason):
    assert model_trials.last_exception(log) == reason


def works(row):
    """What compares equal on other machines: whether each column worked, not by how much it differs."""
    return {
        name: value <= ROUNDING if isinstance(value, float) else type(value)
        for name, value in row.items()
        if name != "path"
    }
