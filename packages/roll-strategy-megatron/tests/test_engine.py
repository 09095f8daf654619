"""Layers of Transformer Engine's modules compute and learn as transformers does, and what they save is what others
save. The modules are stand-ins in plain torch (`engine_stand_in`); Megatron's wrappers around them are its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import test_router_replay
import torch
from architectures import MODELS
from megatron_programs import (
    DEEPSEEK,
    MIXTURE,
    PRELOAD,
    copy_state,
    fail_to_build_in,
    lacking_engine_older_than,
    made_of,
    resume,
    save_after,
)
from safetensors.numpy import load_file
from test_arrangements import (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    TIED,
    WHOLE_QUERIES,
    Arrangement,
    case_of,
    check_against_transformers,
    run,
    sizes,
    steps,
)
from test_lora import SOME, WITH_NORMS, check_adapters_of_experts, check_against_hf_train

from roll_core.errors import ModelError, UnsupportedError
from roll_core.spec.model import ModelSpec
from roll_strategy_megatron.config import MegatronConfig
from roll_strategy_megatron.engine import LayerSpec, choose
from roll_testing.bounds import check_same, distance
from roll_testing.errors import mentions
from roll_testing.models import QWEN3
from roll_testing.ranks import shared_host

__all__ = ["run"]
ENGINE = {"transformer_impl": "transformer_engine"}
"""By name: `auto` does not look for it on a CPU."""
APART = ENGINE | {"moe_grouped_gemm": False}
LATENT = replace(SOME, targets=("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
FOUR = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def host():
    return shared_host(preload=("engine_on_cpu", *PRELOAD))


def engine(ranks, model=QWEN3, *, apart=False, **options):
    config = (APART if apart else ENGINE) | sizes(**options.pop("config", {}))
    return Arrangement(ranks=ranks, model=model, config=config, **options)


QUICK = {
    "tp 2": engine(2, QWEN2, config={"tp": 2}),
    "tp 2, sp": engine(2, config={"tp": 2, "sp": True}),
    "cp 2": engine(2, config={"cp": 2}),
    "experts together, ep 2": engine(2, MIXTURE, config={"ep": 2}),
    "experts together, ep 2, tp 2, sp": engine(2, MIXTURE, config={"ep": 2, "tp": 2, "etp": 1, "sp": True}),
    "deepseek, cp 2, ep 2": engine(2, DEEPSEEK, config={"cp": 2, "ep": 2}),
    "gemma 3, tp 2, sp": engine(2, MODELS["gemma3_text"], config={"tp": 2, "sp": True}),
}
PRODUCTS = {
    "olmo 2, tp 2, sp": engine(2, MODELS["olmo2"], config={"tp": 2, "sp": True}),
    "qwen2_moe, experts together, ep 2, tp 2, sp": engine(
        2, MODELS["qwen2_moe"], config={"ep": 2, "tp": 2, "etp": 1, "sp": True}
    ),
    "glm4, tp 2": engine(2, MODELS["glm4"], config={"tp": 2}),
    "mistral, window": engine(1, MISTRAL),
    "llama, scaled rotation": engine(1, LLAMA),
    "pp 2, tied": engine(2, TIED, config={"pp": 2}),
    "pp 2, vpp 2, layers recomputed": engine(2, TIED | FOUR, config={"pp": 2, "vpp": 2}, checkpointing=True),
    "parts recomputed": engine(
        1, config={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, checkpointing=True
    ),
    "tp 2, pp 2, sp": engine(4, config={"tp": 2, "pp": 2, "sp": True}),
    "tp 2, cp 2, sp": engine(4, config={"tp": 2, "cp": 2, "sp": True}),
    "values, tp 2, sp": engine(2, config={"tp": 2, "sp": True}, task="value"),
    "dp 2, overlapped, several calls": engine(2, config={"overlap_grad_reduce": True}, calls=(2, 1, 3)),
    "experts apart, ep 2": engine(2, MIXTURE, apart=True, config={"ep": 2}),
    "mixtral, experts together": engine(1, MIXTRAL),
    "experts together, cut by tp 2, sp": engine(2, MIXTURE, config={"tp": 2, "sp": True}),
    "experts together, whole beside tp 2, sp": engine(2, MIXTURE, config={"tp": 2, "etp": 1, "sp": True}),
    "experts together, ep 2, cp 2, allgather": engine(
        4, MIXTURE, config={"ep": 2, "cp": 2, "moe_token_dispatcher_type": "allgather"}
    ),
    "experts together, ep 2, pp 2, recomputed": engine(
        4, MIXTURE, config={"ep": 2, "pp": 2, "moe_layer_recompute": True}, checkpointing=True
    ),
    "deepseek, tp 2, sp": engine(2, DEEPSEEK, config={"tp": 2, "sp": True}),
    "deepseek, queries whole, tp 2, sp": engine(2, WHOLE_QUERIES, config={"tp": 2, "sp": True}),
}
ARRANGEMENTS = [pytest.param(each, id=name) for name, each in QUICK.items()] + [
    pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in PRODUCTS.items()
]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_engine_layers_compute_and_learn_as_transformers(run, tmp_path, arrangement):
    check_against_transformers(run, tmp_path, arrangement)


@pytest.mark.parametrize(
    ("model", "config", "present", "absent"),
    [
        pytest.param(
            QWEN3,
            ENGINE,
            {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "EngineAttention", "RMSNorm"},
            {"RowParallelLinear", "Norm", "PackedAttention"},
            id="dense",
        ),
        pytest.param(
            MIXTURE,
            ENGINE,
            {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "EngineAttention"},
            {"SequentialMLP", "PackedAttention"},
            id="experts together",
        ),
        pytest.param(MIXTURE, APART, {"SequentialMLP", "TEColumnParallelLinear"}, {"TEGroupedMLP"}, id="experts apart"),
        pytest.param(
            DEEPSEEK,
            ENGINE,
            {"MLASelfAttention", "TELinear", "TEGroupedMLP", "SharedExpertMLP"},
            {"LatentAttention", "Norm"},
            id="latent attention",
        ),
        pytest.param(
            QWEN3, {}, {"Norm", "PackedAttention"}, {"EngineAttention", "TERowParallelLinear"}, id="auto on a CPU"
        ),
    ],
)
def test_layers_are_made_of_what_was_asked_for(run, tmp_path, model, config, present, absent):
    (found,) = run(made_of, case_of(Arrangement(ranks=1, model=model, config=config), tmp_path))
    assert present <= found
    assert not absent & found


@pytest.mark.parametrize(
    ("model", "arrangements"),
    [
        pytest.param(QWEN3, [sizes(tp=2, sp=True), ENGINE | sizes(tp=2, sp=True)], id="dense"),
        pytest.param(MIXTURE, [sizes(ep=2), ENGINE | sizes(ep=2), APART | sizes(ep=2)], id="experts"),
        pytest.param(DEEPSEEK, [sizes(ep=2), ENGINE | sizes(ep=2)], id="latent attention", marks=pytest.mark.slow),
    ],
)
def test_saved_state_does_not_depend_on_the_layers(run, tmp_path, model, arrangements):
    """Steps on Megatron's own layers, and then from one make to the next: each saves what it has read, bit for bit."""
    own, *others = arrangements
    start = case_of(Arrangement(ranks=2, model=model, config=own), tmp_path / "model")
    run(save_after, start, steps((1, 1, 1), "causal_lm"), str(tmp_path / "0"))
    expected = state_in(tmp_path / "0")
    for at, config in enumerate([*others, own]):
        case = start.with_(strategy_config=config)
        run(copy_state, case, str(tmp_path / str(at)), str(tmp_path / str(at + 1)))
        check_same("state", state_in(tmp_path / str(at + 1)), expected)


@pytest.mark.parametrize(
    ("model", "lora", "config"),
    [
        pytest.param(QWEN3, SOME, {"tp": 2, "sp": True}, id="tensor and sequence"),
        pytest.param(QWEN3, WITH_NORMS, {"tp": 2, "sp": True}, id="beside whole norms", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, LATENT, {"tp": 2, "sp": True}, id="latent attention", marks=pytest.mark.slow),
    ],
)
def test_adapters_learn_as_those_of_hf_train_do(host, tmp_path, model, lora, config):
    check_against_hf_train(host, tmp_path, model, lora, ENGINE | sizes(**config), 2)


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param({"ep": 2}, 2, id="spread"),
        pytest.param({"tp": 2, "sp": True}, 2, id="cut", marks=pytest.mark.slow),
    ],
)
def test_experts_that_are_computed_together_have_adapters(host, tmp_path, config, ranks):
    check_adapters_of_experts(host, tmp_path, ENGINE | sizes(**config), ranks)


@pytest.mark.parametrize(
    "arrangement",
    [
        pytest.param(engine(2, MIXTURE, config={"ep": 2, "tp": 2, "etp": 1, "sp": True}), id="ep 2, tp 2, sp"),
        pytest.param(
            engine(2, MIXTURE | FOUR, config={"pp": 2, "vpp": 2}, checkpointing=True),
            id="pp 2, vpp 2, layers recomputed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_experts_are_replayed(run, tmp_path, arrangement):
    test_router_replay.test_experts_are_replayed_as_in_one_process(run, tmp_path, arrangement)


def state_in(folder):
    files = (folder / "rank-0").glob("state-*.safetensors")
    return {name: each for file in files for name, each in load_file(file).items()}


def test_training_resumes_with_other_layers(run, tmp_path):
    own = case_of(Arrangement(ranks=2, model=MIXTURE, config=sizes(ep=2)), tmp_path / "model")
    every, folder = steps((1, 1, 1), "causal_lm"), str(tmp_path / "state")
    expected, weights = run(save_after, own, every, folder)[0]
    found, again = run(resume, own.with_(strategy_config=ENGINE | sizes(ep=2)), every[-1], folder)[0]
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found.learning_rate == expected.learning_rate
    assert distance(again, weights) < 1e-5


@pytest.mark.parametrize(
    ("model", "config", "environment", "kind", "named"),
    [
        (MISTRAL, ENGINE | sizes(cp=2), {}, UnsupportedError, ["context_parallel_size"]),
        (MODELS["gemma2"], ENGINE, {}, UnsupportedError, ["soft-capped"]),
        (MODELS["gpt_oss"], ENGINE, {}, UnsupportedError, ["sinks"]),
        (MIXTURE, {"moe_grouped_gemm": True}, {}, UnsupportedError, ["moe_grouped_gemm: true", "cpu"]),
        (QWEN3, {"attention_backend": "flash"}, {}, UnsupportedError, ["attention_backend: flash"]),
        (
            QWEN3,
            ENGINE | {"attention_backend": "fused"},
            {"NVTE_FLASH_ATTN": "1"},
            ModelError,
            ["NVTE_FLASH_ATTN", "1", "attention_backend: fused", "0"],
        ),
    ],
    ids=[
        "window over ranks",
        "soft-capped scores",
        "sinks",
        "grouped on a CPU",
        "backend of other layers",
        "variables that contradict",
    ],
)
def test_impossible_layers_are_refused_by_name(run, tmp_path, model, config, environment, kind, named):
    ranks = config.get("context_parallel_size", 1)
    case = case_of(Arrangement(ranks=ranks, model=model, config=config), tmp_path)
    error, _ = run(fail_to_build_in, case, environment)[0]
    assert error is not None
    assert error.kinds[0] == kind.__name__, error
    assert mentions(error.message, *named)


@pytest.mark.parametrize(
    ("given", "device", "settings", "expected"),
    [
        ({"dtype": "bf16"}, "cuda:1", {}, LayerSpec(engine=True, grouped=True, fused_norms=True)),
        (
            {"dtype": "bf16", "lora": SOME},
            "cuda:1",
            {},
            LayerSpec(engine=True, grouped=True, fused_norms=False),
        ),
        ({"dtype": "fp32"}, "cuda:1", {}, LayerSpec(engine=False)),
        ({"dtype": "bf16"}, "cpu", {}, LayerSpec(engine=False)),
        ({"dtype": "bf16"}, "cuda:1", {"window_size": (3, 0)}, LayerSpec(engine=False)),
    ],
    ids=["bf16 on CUDA", "with adapters", "float32", "on a CPU", "a window over ranks"],
)
def test_layers_are_chosen_by_device_and_model(monkeypatch, given, device, settings, expected):
    monkeypatch.setattr("roll_strategy_megatron.engine.lacking_engine", lambda: "")
    config = MegatronConfig(context_parallel_size=2)
    assert choose(config, ModelSpec(path="here", **given), torch.device(device), settings) == expected
    monkeypatch.setattr("roll_strategy_megatron.engine.lacking_engine", lambda: "it is not installed")
    assert choose(config, ModelSpec(path="here", **given), torch.device(device), settings) == LayerSpec(engine=False)


SAYS = "from roll_strategy_megatron.engine import lacking_engine; print(lacking_engine())"


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, " --no-build-isolation "),
        ("raise ImportError('undefined symbol: _ZN3c10')", "cannot be imported (ImportError: undefined symbol: _ZN3c1"),
    ],
    ids=["absent", "of another torch"],
)
def test_lacking_engine_names_the_reason(tmp_path, text, said):
    if text is not None:
        (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
        (tmp_path / "transformer_engine" / "__init__.py").write_text(text, encoding="utf-8")
    path = {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", SAYS]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, timeout=100, check=True)
    assert said in done.stdout


def test_a_transformer_engine_that_is_too_old_is_not_used(host):
    assert host.run(lacking_engine_older_than, "2.9") == ("",)
    (said,) = host.run(lacking_engine_older_than, "3.0")
    assert mentions(said, "2.10.0")
