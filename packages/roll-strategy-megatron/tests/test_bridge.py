"""What the bridge refuses, and what other packages bring to it."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron_programs import (
    DEEPSEEK,
    MIXTURE,
    PRELOAD,
    case_on,
    configure,
    score_and_train,
    train_and_export,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from roll_core.errors import ModelError
from roll_core.spec.model import ModelSpec
from roll_core.spec.providers import TrainProvider
from roll_core.spec.train import WantedOutputs
from roll_modeling.model import load_model
from roll_testing.bench import Step
from roll_testing.bounds import check_near, check_rows, check_same
from roll_testing.errors import mentions
from roll_testing.losses import LOSSES
from roll_testing.models import QWEN3, make_batch, write_checkpoint
from roll_testing.programs import fail_to_build
from roll_testing.ranks import RankHost, free_port
from roll_testing.reference import Reference, TransformersModel
from roll_testing.train_kit import registry

DENSE = {key: value for key, value in QWEN3.items() if key != "model_type"}


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """A package that describes an architecture of its own, on the path before the ranks start."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme_helium.py").write_text(
        textwrap.dedent(
            """
            from roll_strategy_megatron.bridge.architectures import COMMON, DENSE_MLP, dense
            from roll_strategy_megatron.bridge.rules import Architecture

            def settings(config):
                return {**dense(config), "rotary_interleaved": True}

            ARCHITECTURE = Architecture(rules=(*COMMON, *DENSE_MLP), settings=settings)
            """
        )
    )
    info = folder / "acme_helium-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-helium\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[roll.megatron_architectures]\nhelium = acme_helium:ARCHITECTURE\nbroken = acme_helium:NOTHING\n"
    )
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def host(brought):
    found = RankHost(preload=PRELOAD)
    yield found
    found.close()


def case_of(folder, model, **config):
    spec = write_checkpoint(folder, model, task="causal_lm", vocab_size=61)
    return case_on(1, config, spec, training=None)


def refusal(host, case):
    ((error, _),) = host.run(fail_to_build, case, timeout_s=100)
    assert error is not None
    assert error.kinds[0] == "ModelError", error
    return error.message


def change_files(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_unknown_architecture_error_names_the_known_ones(host, tmp_path):
    said = refusal(host, case_of(tmp_path, {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}))
    assert "gpt2" in said
    assert mentions(said, "qwen2", "qwen3", "qwen3_moe", "seed_oss")
    assert mentions(said, "fsdp2_train")


def test_tensors_of_the_files_that_nothing_takes_are_listed(host, tmp_path):
    case = case_of(tmp_path, QWEN3)
    change_files(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    assert mentions(refusal(host, case), "model.layers.0.self_attn.sinks")


def test_layers_that_predict_several_tokens_are_left_out(host, tmp_path):
    """Other layers beyond the last one are not."""
    case = case_of(tmp_path, DEEPSEEK)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    last = config["num_hidden_layers"]
    extra = [
        f"model.layers.{last}.eh_proj.weight",
        f"model.layers.{last}.mlp.experts.0.up_proj.weight",
        "mtp.fc.weight",
    ]
    change_files(tmp_path, lambda tensors: tensors.update({name: torch.zeros(4) for name in extra}))
    (answer,) = host.run(score_and_train, case, make_batch(61), [], timeout_s=100)
    assert not set(extra) & set(answer["before"])
    beyond = f"model.layers.{last + 1}.eh_proj.weight"
    change_files(tmp_path, lambda tensors: tensors.update({beyond: torch.zeros(4)}))
    assert mentions(refusal(host, case), beyond)


def test_tensors_that_the_files_lack_are_listed(host, tmp_path):
    case = case_of(tmp_path, QWEN3)

    def drop(tensors):
        for name in [name for name in tensors if "layers.1" in name]:
            del tensors[name]

    change_files(tmp_path, drop)
    said = refusal(host, case)
    assert mentions(said, "model.layers.1.input_layernorm.weight")
    assert said.endswith(" and 6 more")


def test_tensors_of_another_shape_are_named(host, tmp_path):
    case = case_of(tmp_path, QWEN3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight: " in refusal(host, case)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (DEEPSEEK | {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not twice topk_group 2"),
        (DEEPSEEK | {"rms_norm_eps": 1e-5}, "transformers norms latents with 1e-06"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is true"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act is gelu"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}},
            "rotary embeddings of type 'dynamic' are not supported",
        ),
        (
            {
                "model_type": "glm4",
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "factor": 4.0,
                    "partial_rotary_factor": 0.5,
                },
            },
            "rotary embeddings with an attention factor of 1.1386",
        ),
    ],
    ids=[
        "groups by other experts",
        "other norms",
        "biases",
        "another activation",
        "another rotation",
        "a scaled rotation of half a head",
    ],
)
def test_models_that_megatron_computes_differently_are_refused(host, tmp_path, model, said):
    rest = {} if model["model_type"] == "deepseek_v3" else DENSE
    assert said in refusal(host, case_of(tmp_path, rest | model))


@pytest.mark.parametrize(
    ("key", "refused", "taken"),
    [("moe_router_score_function", "softmax", "sigmoid"), ("add_bias_linear", True, False)],
    ids=["a bias beside softmax scores, ERNIE 4.5's", "biases of experts that are split, gpt-oss'"],
)
def test_megatron_itself_refuses_what_check_refuses(host, key, refused, taken):
    settings = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 4}
    settings |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    settings |= {"add_bias_linear": False, "gated_linear_unit": True}
    config = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert host.run(configure, settings | {key: taken}, config) == (None,)
    (error,) = host.run(configure, settings | {key: refused}, config)
    assert error is not None
    assert error.kinds[0] == ModelError.__name__


NOT_CUT = [
    pytest.param(DEEPSEEK, {"multi_latent_attention": True}, "a model with latent attention under", id="latent"),
    pytest.param(MIXTURE, {"num_moe_experts": 4}, "training a model with experts under", id="experts"),
]


@pytest.mark.parametrize(("model", "settings", "what"), NOT_CUT)
def test_some_models_are_not_cut_without_sequence_parallel(host, tmp_path, model, settings, what):
    said = f"{what} a tensor_model_parallel_size above 1 needs sequence_parallel: true"
    case = case_of(tmp_path, model, tensor_model_parallel_size=2)
    case = case.with_(world_size=2, devices=("cpu", "cpu"), master_port=free_port())
    for error, _ in host.run(fail_to_build, case, num_ranks=2, timeout_s=100):
        assert error is not None
        assert error.kinds[0] == ModelError.__name__
        assert said in error.message
    # Of an architecture whose config another package describes, Megatron's settings say it.
    (error,) = host.run(configure, settings, {"tensor_model_parallel_size": 2}, timeout_s=100)
    assert error is not None
    assert said in error.message


def test_another_package_brings_an_architecture(host, tmp_path):
    model = DENSE | {"model_type": "helium"}
    case, batch = case_of(tmp_path, model), make_batch(61, seed=10)
    (answer,) = host.run(score_and_train, case, batch, [], timeout_s=100)
    from megatron_programs import WANT

    expected = Reference(TransformersModel(case.model), "causal_lm").by_sequence(batch, WANT)
    check_rows("logprobs", answer["scored"]["logprobs"], expected["logprobs"], 1e-4)


def test_critic_from_a_language_model_has_the_head_of_hf_train(host, tmp_path):
    case = case_of(tmp_path, QWEN3)
    spec = replace(case.model, task="value", seed=5)
    (answer,) = host.run(
        score_and_train, case.with_(model=spec), make_batch(61), [], WantedOutputs(values=True), timeout_s=100
    )
    expected = load_model(spec).state_dict()
    for name, found in answer["before"].items():
        assert np.array_equal(found, expected[name].numpy()), name
    assert "score.weight" in answer["before"]


@pytest.mark.parametrize(
    "config", [{"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}], ids=["stages", "shares"]
)
def test_random_tied_model_equals_hf_train_and_stays_tied(host, config):
    keys = {key: value for key, value in QWEN3.items() if key != "initializer_range"}
    spec = ModelSpec(random_init=keys | {"tie_word_embeddings": True, "vocab_size": 61, "pad_token_id": 0}, seed=5)
    case = case_on(2, config, spec)
    steps = [Step(sequences=make_batch(61, seed=seed), loss=LOSSES["sft"]) for seed in range(2)]
    alone = case.with_(
        provider=registry().find(TrainProvider, "hf_train"), strategy_config={}, world_size=1, devices=("cpu",)
    )
    expected = score_and_train(0, alone.with_(master_port=0), make_batch(61), steps)
    found, _ = host.run(score_and_train, case, make_batch(61), steps, num_ranks=2, timeout_s=100)
    assert "lm_head.weight" not in found["before"]
    check_same("weights as they were drawn", found["before"], expected["before"])
    assert [each.grad_norm for each in found["stats"]] == pytest.approx(
        [each.grad_norm for each in expected["stats"]], rel=1e-4
    )
    went, should = (
        {name: each["weights"][name] - start for name, start in expected["before"].items()}
        for each in (found, expected)
    )
    check_near("the way that the weights went", went, should, 1e-4)


def test_a_language_model_is_no_reward_model(host, tmp_path):
    case = case_of(tmp_path, QWEN3)
    said = refusal(host, case.with_(model=replace(case.model, task="reward")))
    assert mentions(said, "score.weight")


def test_expert_biases_are_written_as_read(host, tmp_path):
    case = case_of(tmp_path / "in", DEEPSEEK)
    biases = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]
    change_files(tmp_path / "in", lambda tensors: tensors.update({name: torch.randn(8) for name in biases}))
    host.run(train_and_export, case, str(tmp_path / "out"), [], timeout_s=100)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "in").state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert all(expected[name].any() for name in biases)
