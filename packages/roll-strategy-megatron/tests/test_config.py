"""What `roll-core check` says of a role on Megatron, where neither torch nor Megatron is needed."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from divisions import DIVISIONS
from pydantic import ValidationError

from roll_core.config.loading import load
from roll_core.errors import ConfigError
from roll_strategy_megatron.config import ARCHITECTURES, REFUSED, MegatronConfig, ScoringConfig, runs
from roll_testing.errors import mentions
from roll_testing.train_kit import registry

RUN = """\
pipeline: sft
sft_train:
  data_args: {{file_name: rows.jsonl}}
  model_args: {model}
  device_mapping: list(range(0,{slots}))
  strategy_args:
    strategy_name: {name}
    strategy_config: {config}
"""
SPREAD = "{tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2}"


def checked(
    tmp_path, *, config=SPREAD, slots=8, platform="", name="megatron_train", model="{model_name_or_path: here}"
):
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(config=config, slots=slots, name=name, model=model), encoding="utf-8")
    return load(file, [f"platform={platform}"] if platform else [], registry())


def refusal(tmp_path, **values):
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, **values)
    return str(caught.value)


SCORED = """\
pipeline: dpo
actor_train:
  data_args: {{file_name: rows.jsonl}}
  model_args: {{model_name_or_path: here}}
  strategy_args: {{strategy_name: hf_train}}
reference:
  strategy_args:
    strategy_name: megatron_infer
    strategy_config: {config}
"""
AT_CONFIG = "sft_train.strategy_args.strategy_config"


def mistakes(tmp_path, **values):
    with pytest.raises(ConfigError) as caught:
        checked(tmp_path, **values)
    return [(each.code, each.key) for each in caught.value.problems]


def test_a_role_knows_how_many_ranks_share_a_model(tmp_path):
    assert checked(tmp_path).config.sft_train.ranks_per_replica == 4


def test_ranks_without_full_replicas_are_refused(tmp_path):
    said = refusal(tmp_path, slots=6)
    assert mentions(said, "6")
    product = "tensor_model_parallel_size 2 × pipeline_model_parallel_size 2 × context_parallel_size 1 = 4"
    assert product in said
    assert mentions(said, "parallel")


@pytest.mark.parametrize(
    ("keys", "model", "said"),
    [
        (
            {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
            {"num_hidden_layers": 28},
            "the model's num_hidden_layers 28 is not a multiple of pipeline_model_parallel_size 4 ×"
            " virtual_pipeline_model_parallel_size 2 = 8",
        ),
        (
            {"pipeline_model_parallel_size": 4, "account_for_loss_in_pipeline_split": True},
            {"num_hidden_layers": 28},
            "num_hidden_layers 28 + 1 for the output layer = 29 is not a multiple of pipeline_model_parallel_size 4",
        ),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|t*2L"},
            {"num_hidden_layers": 6},
            "pipeline_model_parallel_layout has 5 layers (t), the model 6",
        ),
        (
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 5},
            {"num_hidden_layers": 16},
            "num_layers_in_first_pipeline_stage 5 = 11 layers cannot be divided over 3 other stages",
        ),
        (
            {"tensor_model_parallel_size": 4},
            {"num_attention_heads": 16, "num_key_value_heads": 2},
            "the model's num_key_value_heads 2 is not a multiple of tensor_model_parallel_size 4",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
            {"moe_intermediate_size": 1022},
            "the model's moe_intermediate_size 1022 is not a multiple of expert_tensor_parallel_size 4",
        ),
        (
            {"moe_aux_loss_coeff": 0.001},
            {"num_hidden_layers": 2},
            "moe_aux_loss_coeff is for models with experts; a qwen3 has none",
        ),
        (
            {"expert_model_parallel_size": 8},
            {"num_local_experts": 60},
            "the model's num_local_experts 60 is not a multiple of expert_model_parallel_size 8",
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            {"model_type": "qwen3_moe", "num_experts": 8},
            "training a model with experts under a tensor_model_parallel_size above 1 needs sequence_parallel: true",
        ),
        (
            {"tensor_model_parallel_size": 2},
            {"model_type": "deepseek_v3"},
            "latent attention under a tensor_model_parallel_size above 1 needs sequence_parallel: true",
        ),
    ],
)
def test_uneven_models_are_refused_with_the_arithmetic(tmp_path, keys, model, said):
    stored = tmp_path / "model"
    stored.mkdir()
    (stored / "config.json").write_text(json.dumps({"model_type": "qwen3", **model}), encoding="utf-8")
    for where in ({"model_name_or_path": str(stored)}, {"random_init": {"model_type": "qwen3", **model}}):
        assert said in refusal(tmp_path, config=json.dumps(keys), model=json.dumps(where))


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("model", "keys", "named"),
    [
        ({"model_type": "qwen3_next"}, {}, ["qwen3_next", "GatedDeltaNet"]),
        ({"model_type": "deepseek_v32"}, {}, ["deepseek_v32", "DSAttention"]),
        ({"model_type": "ernie4_5_moe"}, {}, ["ernie4_5_moe"]),
        ({"model_type": "gpt_oss", "num_local_experts": 4}, SPLIT, ["gpt_oss", "expert_tensor_parallel_size: 1"]),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, {}, ["mxfp4"]),
        ({"model_type": "llama", "attention_bias": True}, {}, ["attention_bias"]),
        ({"model_type": "seed_oss", "attention_out_bias": True}, {}, ["attention_out_bias"]),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, {}, ["clip_qkv"]),
        ({"model_type": "dots1", "norm_topk_prob": False}, {}, ["norm_topk_prob"]),
        ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}, {}, ["topk_method"]),
        ({"model_type": "deepseek_v3", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 4}, {}, ["topk_group"]),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, {}, ["longrope"]),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            {},
            ["dynamic"],
        ),
    ],
)
def test_models_unsupported_by_megatron_are_found_by_check(tmp_path, model, keys, named):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    values = {"config": json.dumps(keys), "model": f"{{model_name_or_path: {tmp_path / 'model'}}}"}
    assert [key for _, key in mistakes(tmp_path, **values)] == [AT_CONFIG]
    assert mentions(refusal(tmp_path, **values), *named)


def test_a_model_that_comes_out_even_is_fine(tmp_path):
    keys = {
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "account_for_loss_in_pipeline_split": True,
    }
    model = {"random_init": {"model_type": "qwen3", "num_hidden_layers": 31}}
    assert checked(tmp_path, config=json.dumps(keys), model=json.dumps(model)).config.sft_train.ranks_per_replica == 4


@pytest.mark.parametrize("ends", [(11, 11), (10, None), (None, 3)])
def test_ends_of_a_pipeline_may_have_other_numbers_of_layers(tmp_path, ends):
    """94 layers in 8 stages: 6 × 12 between 11 and 11, as for Qwen3-235B-A22B; 7 × 12 and 10; 7 × 13 and 3."""
    first, last = ends
    keys = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    config = json.dumps({"pipeline_model_parallel_size": 8} | keys)
    model = json.dumps({"random_init": {"model_type": "qwen3", "num_hidden_layers": 94}})
    assert checked(tmp_path, config=config, model=model, slots=8).config.sft_train.ranks_per_replica == 8


@pytest.mark.parametrize("name", DIVISIONS)
def test_check_refuses_what_megatron_cannot_divide(tmp_path, name):
    """What Megatron does with the same: see `test_arrangements.py`."""
    case = DIVISIONS[name]
    model = json.dumps({"random_init": {"model_type": case.model_type, **case.keys}})
    arranged = {"config": json.dumps(case.config), "model": model, "slots": 6}
    if case.fits:
        assert checked(tmp_path, **arranged).config.sft_train is not None
    else:
        assert mistakes(tmp_path, **arranged) == [("ROLL-C018", AT_CONFIG)]


@pytest.mark.parametrize(
    "config",
    [
        {"recompute_num_layers": 2, "pipeline_model_parallel_layout": "Etttt|tttL"},
        {"recompute_num_layers": 3, "account_for_loss_in_pipeline_split": True},
        {"recompute_num_layers": 4, "account_for_loss_in_pipeline_split": True},
        {"recompute_num_layers": 2, "num_layers_in_first_pipeline_stage": 4},
    ],
    ids=["by layout", "first stage", "last stage", "first stage set"],
)
def test_recomputed_groups_of_layers_are_whole_on_each_stage(tmp_path, config):
    """7 layers on 2 stages are 4 and 3."""
    config |= {"recompute_granularity": "full", "pipeline_model_parallel_size": 2}
    model = '{"random_init": {"model_type": "qwen3", "num_hidden_layers": 7}}'
    assert mistakes(tmp_path, config=json.dumps(config), model=model) == [("ROLL-C018", AT_CONFIG)]
    config |= {"recompute_num_layers": 1}
    assert checked(tmp_path, config=json.dumps(config), model=model).config.sft_train is not None


@pytest.mark.parametrize(
    "config",
    [
        {"expert_tensor_parallel_size": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    ],
    ids=["split", "recomputed"],
)
def test_a_dense_model_has_no_experts_to_split_or_recompute(tmp_path, config):
    dense, mixture = (f"{{random_init: {{model_type: {each}}}}}" for each in ("qwen3", "qwen3_moe"))
    assert mistakes(tmp_path, config=json.dumps(config), model=dense) == [("ROLL-C018", AT_CONFIG)]
    assert checked(tmp_path, config=json.dumps(config), model=mixture).config.sft_train is not None


def test_shared_experts_of_other_models_are_sharded_as_dense():
    config = MegatronConfig(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    with pytest.raises(ValueError, match="shared_expert_intermediate_size"):
        config.check_model({"shared_expert_intermediate_size": 15})
    config.check_model({"shared_expert_intermediate_size": 16})


def test_only_training_needs_sequence_parallel_beside_experts(tmp_path):
    model = "{random_init: {model_type: mixtral, num_local_experts: 8}}"
    cut = {"config": "{tensor_model_parallel_size: 2}", "model": model}
    assert "sequence_parallel: true" in refusal(tmp_path, **cut)
    assert "sequence_parallel" not in refusal(tmp_path, name="megatron_infer", **cut)
    spread = "{tensor_model_parallel_size: 2, sequence_parallel: true}"
    assert checked(tmp_path, config=spread, model=model).config.sft_train.ranks_per_replica == 2


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("{recompute_granularity: full, recompute_num_layers: 2}", "recompute_granularity, recompute_num_layers"),
        ("{moe_layer_recompute: true}", "moe_layer_recompute"),
        ("{activation_offloading: true}", "activation_offloading"),
    ],
)
def test_recompute_needs_gradient_checkpointing(tmp_path, keys, named):
    model = "{model_name_or_path: here, disable_gradient_checkpointing: true}"
    said = refusal(tmp_path, config=keys, model=model)
    assert mentions(said, "disable_gradient_checkpointing")
    assert mentions(f"{said}\n", named)
    assert checked(tmp_path, config=keys).config.sft_train.strategy_args is not None
    assert checked(tmp_path, config="{moe_layer_recompute: false}", model=model).config.sft_train is not None


@pytest.mark.parametrize(
    "config",
    [
        "{recompute_granularity: selective, activation_offloading: true}",
        "{moe_layer_recompute: true, activation_offloading: true}",
        "{recompute_granularity: full, recompute_method: block, activation_offloading: true}",
    ],
)
def test_only_inputs_of_layers_are_offloaded(tmp_path, config):
    assert mentions(refusal(tmp_path, config=config), "activation_offloading")


@pytest.mark.parametrize("platform", ["rocm", "npu"])
def test_other_platforms_are_refused_with_their_strategies(tmp_path, platform):
    said = refusal(tmp_path, platform=platform)
    assert mentions(said, "megatron_train", platform)
    assert "fsdp2_train" in said
    assert ("deepspeed_train" in said) == (find_spec("roll_strategy_deepspeed") is not None)
    assert "hf_train" in said
    assert "fsdp2_infer" not in said


@pytest.mark.parametrize(
    ("keys", "variables"),
    [
        ({}, {}),
        ({"pipeline_model_parallel_size": 2}, {}),
        ({"tensor_model_parallel_size": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        ({"context_parallel_size": 2}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    ],
)
def test_workers_with_shared_layers_get_megatrons_variable(keys, variables):
    wanted = MegatronConfig.model_validate(keys).worker_environment()
    assert {each.name: each.value for each in wanted} == variables
    assert not any(each.required for each in wanted)


def test_a_twin_that_only_scores_cannot_be_trained(tmp_path):
    assert "has no optimizer" in refusal(tmp_path, name="megatron_infer")


OF_TRAINING = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 2,
    "recompute_modules": ["moe"],
    "moe_layer_recompute": True,
    "activation_offloading": True,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": 1000,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.01,
    "async_save_ckpt": True,
}


@pytest.mark.parametrize("key", OF_TRAINING)
def test_a_twin_that_only_scores_refuses_keys_of_training(tmp_path, key):
    file, at = tmp_path / "run.yaml", "reference.strategy_args.strategy_config"
    file.write_text(SCORED.format(config=json.dumps({key: OF_TRAINING[key]})), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, [], registry())
    assert [(each.code, each.key) for each in caught.value.problems] == [("ROLL-C014", at)]
    assert mentions(str(caught.value), key)


def test_a_twin_that_only_scores_takes_the_other_keys():
    disabled = {"recompute_granularity": None, "overlap_grad_reduce": False, "moe_aux_loss_coeff": 0.0}
    assert ScoringConfig.model_validate(disabled) == ScoringConfig()
    assert MegatronConfig.model_fields.keys() - OF_TRAINING.keys() == {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "attention_backend",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "logprob_chunk_tokens",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "moe_grouped_gemm",
        "moe_router_dtype",
        "moe_router_load_balancing_type",  # its other value is none
        "moe_token_dispatcher_type",
        "pipeline_model_parallel_layout",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "transformer_impl",
        "use_distributed_optimizer",  # has one value
        "virtual_pipeline_model_parallel_size",
    }


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_keys_are_refused_with_the_reason(key):
    with pytest.raises(ValidationError) as caught:
        MegatronConfig.model_validate({key: "yes"})
    assert mentions(str(caught.value), key)
    assert REFUSED[key] in str(caught.value)


@pytest.mark.parametrize("key", REFUSED)
def test_saying_no_to_what_is_not_supported_is_fine(key):
    assert MegatronConfig.model_validate({key: False}) == MegatronConfig()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"sequence_parallel": True}, ["tensor_model_parallel_size", "sequence_parallel"]),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, ["sequence_parallel: true"]),
        ({"moe_token_dispatcher_type": "flex"}, ["'alltoall'", "'allgather'"]),
        (
            {"moe_token_dispatcher_type": "allgather", "pipeline_model_parallel_size": 2},
            ["moe_token_dispatcher_type: allgather", "pipeline_model_parallel_size", "alltoall"],
        ),
        ({"ddp_bucket_size": 1000}, ["ddp_bucket_size", "overlap_grad_reduce: true"]),
        ({"recompute_num_layers": 2}, ["recompute_num_layers", "recompute_granularity: full"]),
        ({"recompute_modules": ["moe"]}, ["recompute_modules", "recompute_granularity: selective"]),
        ({"virtual_pipeline_model_parallel_size": 2}, ["pipeline_model_parallel_size"]),
        (
            {"pipeline_model_parallel_layout": "Et|t|L", "pipeline_model_parallel_size": 2},
            ["3", "pipeline_model_parallel_size 2"],
        ),
        (
            {
                "pipeline_model_parallel_layout": "Et|(t|)*2L",
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 3,
            },
            ["4", "pipeline_model_parallel_size 2 × virtual_pipeline_model_parallel_size 3 = 6"],
        ),
        ({"pipeline_model_parallel_layout": "Et|tL"}, ["pipeline_model_parallel_layout", "2", "above 1"]),
        ({"pipeline_model_parallel_layout": "tt|L"}, ["'tt|L'", "E", "L"]),
        ({"pipeline_model_parallel_layout": "Em|L"}, ["'Em|L'", "t", "|"]),
        (
            {"pipeline_model_parallel_layout": "EtL", "account_for_loss_in_pipeline_split": True},
            ["account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"],
        ),
        ({"num_layers_in_last_pipeline_stage": 2}, ["num_layers_in_last_pipeline_stage", "above 1"]),
        (
            {
                "num_layers_in_first_pipeline_stage": 3,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            ["num_layers_in_first_pipeline_stage 3", "virtual_pipeline_model_parallel_size 2"],
        ),
        (
            {
                "num_layers_in_first_pipeline_stage": 3,
                "pipeline_model_parallel_size": 2,
                "account_for_loss_in_pipeline_split": True,
            },
            ["num_layers_in_first_pipeline_stage", "account_for_loss_in_pipeline_split"],
        ),
        (
            {
                "num_layers_in_first_pipeline_stage": 1,
                "pipeline_model_parallel_size": 2,
                "pipeline_model_parallel_layout": "Et|tL",
            },
            ["num_layers_in_first_pipeline_stage", "pipeline_model_parallel_layout"],
        ),
        ({"use_distributed_optimizer": False}, ["use_distributed_optimizer", "True"]),
        ({"moe_router_load_balancing_type": "aux_loss"}, ["moe_router_load_balancing_type: aux_loss", "seq_aux_loss"]),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, ["global_aux_loss", "seq_aux_loss"]),
        (
            {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01},
            ["moe_aux_loss_coeff", "moe_router_load_balancing_type: none"],
        ),
        ({"moe_aux_loss_coeff": -0.1}, ["moe_aux_loss_coeff", "greater_than_equal", "input_value=-0.1"]),
        ({"optimizer_offload_fraction": 0.5}, ["optimizer_offload_fraction", "optimizer_cpu_offload: true"]),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0},
            ["optimizer_offload_fraction", "greater_than", "input_value=0"],
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, named):
    with pytest.raises(ValidationError) as caught:
        MegatronConfig.model_validate(keys)
    assert mentions(str(caught.value), *named)


@pytest.mark.parametrize(
    ("keys", "granularity", "modules"),
    [
        ({}, "full", ["core_attn"]),
        ({"moe_layer_recompute": True}, "selective", ["core_attn", "moe"]),
        ({"moe_layer_recompute": True, "recompute_granularity": "full"}, "full", ["core_attn", "moe"]),
        (
            {"moe_layer_recompute": True, "recompute_granularity": "selective", "recompute_modules": ["moe", "mlp"]},
            "selective",
            ["moe", "mlp"],
        ),
    ],
)
def test_experts_alone_are_recomputed_if_only_they_are_named(keys, granularity, modules):
    config = MegatronConfig.model_validate(keys)
    assert (config.recomputation, config.recomputed_modules) == (granularity, modules)


LAYOUTS = {
    "Et*3|(tt|)*2,tL": ["Ettt", "tt", "tt", "tL"],
    "E | t |*2 L": ["E", "t", "", "L"],
    "EL": ["EL"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_names_the_layers_of_each_stage(layout):
    assert runs(layout) == LAYOUTS[layout]


@pytest.mark.engine("megatron")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_megatron_reads_it(layout):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    rows = PipelineParallelLayerLayout.parse_str_to_list(layout.replace(" ", ""))
    assert ["".join(letters[each.name] for each in row) for row in rows] == LAYOUTS[layout]


def test_architecture_without_a_bridge_is_a_mistake_of_check(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    for model in ("{model_name_or_path: here}", "{random_init: {model_type: gpt2}}"):
        with pytest.raises(ConfigError) as caught:
            checked(tmp_path, model=model)
        assert [each.key for each in caught.value.problems] == ["sft_train.strategy_args.strategy_config"]
    checked(tmp_path, model="{random_init: {model_type: qwen3}}")
    checked(tmp_path, model="{model_name_or_path: elsewhere/model}")


def test_check_knows_the_architectures_of_the_bridge():
    pytest.importorskip("torch")
    from roll_strategy_megatron.bridge.registry import BUILTIN

    assert set(ARCHITECTURES) == set(BUILTIN)
