"""`strategy_config` of `vllm`, as `roll-core check` judges it: without vLLM."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_infer_vllm.arguments import PASSED_ON, REJECTED
from roll_infer_vllm.config import VllmConfig
from roll_testing.errors import mentions, raises_error


def test_a_worker_takes_tensor_times_pipeline_parallel_slots():
    assert VllmConfig().slots_per_worker() == 1
    assert VllmConfig(tensor_parallel_size=4, pipeline_parallel_size=2).slots_per_worker() == 8
    assert VllmConfig(tensor_parallel_size=2, data_parallel_size=3, enable_expert_parallel=True).slots_per_worker() == 6


def test_the_engines_own_arguments_go_to_it_as_they_are():
    given = {"max_model_len": 512, "attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 3}}
    assert VllmConfig.model_validate(given).engine_arguments().items() >= given.items()


def test_unset_arguments_are_left_to_the_engine():
    assert VllmConfig().engine_arguments() == {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_lora": False,
        "pipeline_parallel_size": 1,
        "enable_prefix_caching": True,
        "load_format": "auto",
        "scheduling_policy": "priority",
    }


def test_null_arguments_reach_the_engine():
    assert VllmConfig.model_validate({"max_num_queued_reqs": None}).engine_arguments()["max_num_queued_reqs"] is None


@pytest.mark.parametrize("name", REJECTED)
def test_arguments_of_other_keys_are_refused_with_the_reason(name):
    with pytest.raises(ValidationError) as caught:
        VllmConfig.model_validate({name: 1})
    assert f"{name} {REJECTED[name]}" in str(caught.value)


def test_no_argument_is_both_passed_on_and_refused():
    assert not set(PASSED_ON) & set(REJECTED)
    assert not set(PASSED_ON) & set(VllmConfig.__annotations__)


@pytest.mark.parametrize(
    ("beside", "facts"),
    [
        ({"load_format": "dummy"}, ("weights",)),
        ({"sleep_level": 2}, ("weights",)),
        ({"tensor_parallel_size": 2}, ("slots",)),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, ("slots",)),
    ],
)
def test_adapters_are_refused_beside_what_would_break_them(beside, facts):
    with raises_error(ValidationError, "enable_lora", *facts):
        VllmConfig.model_validate({"enable_lora": True, **beside})


def test_adapters_are_served_only_where_it_is_asked_for():
    assert not VllmConfig().serves_adapters()
    assert VllmConfig(enable_lora=True).serves_adapters()
    assert VllmConfig(enable_lora=True).engine_arguments()["enable_lora"] is True


RUN = """
pipeline: rlvr
max_steps: 1
pretrain: model
actor_train:
  data_args: {{file_name: rows.jsonl}}
  strategy_args: {{strategy_name: hf_train}}
actor_infer:
  strategy_args:
    strategy_name: vllm
    strategy_config: {config}
rewards: {{math: {{reward: math_rule}}}}
"""


@pytest.fixture
def run(tmp_path):
    """A file with this `strategy_config`."""

    def written(config):
        (tmp_path / "run.yaml").write_text(RUN.format(config=config), encoding="utf-8")
        return tmp_path / "run.yaml"

    return written


def test_check_names_the_nearest_argument(run, capsys):
    from roll_core.cli.main import main

    assert main(["check", str(run("{attention_backends: FLASH_ATTN}"))]) == 2
    said = capsys.readouterr().err
    assert "actor_infer.strategy_args.strategy_config.attention_backends" in said
    assert mentions(said, "attention_backend")


# -- fp8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block"])
def test_fp8_starts_without_weights_and_with_our_quantization(quantization):
    found = VllmConfig(quantization=quantization).engine_arguments()
    assert (found["quantization"], found["load_format"]) == (f"roll_{quantization}", "dummy")
    assert VllmConfig(quantization=quantization).weight_format() == quantization
    assert VllmConfig().weight_format() == "dtype"
    assert "quantization" not in VllmConfig().engine_arguments()


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"quantization": "awq"}, ("'fp8'",)),
        ({"quantization": "fp8", "load_format": "auto"}, ("load_format",)),
        ({"quantization": "fp8", "enable_lora": True}, ("enable_lora", "fp8")),
    ],
)
def test_options_that_conflict_with_fp8_are_refused(given, facts):
    with raises_error(ValidationError, *facts):
        VllmConfig.model_validate(given)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_mixtures_of_experts_are_refused_in_fp8(key):
    VllmConfig().check_model({key: 8})
    VllmConfig(quantization="fp8").check_model({key: 0, "hidden_size": 64})
    with raises_error(ValueError, "experts"):
        VllmConfig(quantization="fp8").check_model({key: 8})


@pytest.mark.parametrize("model_type", ["llava", "llava_next"])
def test_encoders_that_vllm_cuts_are_refused(model_type):
    for encoder in ({}, {"model_type": "siglip_vision_model"}):
        with raises_error(ValueError, model_type, "hf_infer"):
            VllmConfig().check_model({"model_type": model_type, "vision_config": encoder})
    VllmConfig().check_model({"model_type": model_type, "vision_config": {"model_type": "pixtral"}})
    VllmConfig().check_model({"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}})


@pytest.mark.parametrize(
    ("keys", "ranks", "facts"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 8}, 4, ()),
        ({"model_type": "qwen3_moe"}, 3, ("enable_expert_parallel", "128", "tensor_parallel_size 3")),
        ({"model_type": "deepseek_v3", "n_routed_experts": 6}, 4, ("enable_expert_parallel", "6", "4")),
        ({"model_type": "qwen3"}, 2, ("enable_expert_parallel", "qwen3")),
        ({"model_type": "own", "auto_map": {}}, 2, ()),
        ({}, 2, ()),
    ],
)
def test_expert_parallel_ranks_must_divide_the_experts(keys, ranks, facts):
    def check():
        VllmConfig(enable_expert_parallel=True, tensor_parallel_size=ranks).check_model(keys)

    VllmConfig(tensor_parallel_size=ranks).check_model(keys)
    if facts:
        with raises_error(ValueError, *facts):
            check()
    else:
        check()


def test_data_and_tensor_parallel_ranks_divide_the_experts():
    config = VllmConfig(tensor_parallel_size=2, data_parallel_size=4, enable_expert_parallel=True)
    config.check_model({"model_type": "qwen3_moe", "num_experts": 16})
    facts = ("12 experts", "tensor_parallel_size 2", "data_parallel_size 4", "= 8")
    with raises_error(ValueError, "enable_expert_parallel", *facts):
        config.check_model({"model_type": "qwen3_moe", "num_experts": 12})


def test_dense_models_have_replicas_instead_of_data_parallelism():
    config = VllmConfig(data_parallel_size=2, enable_expert_parallel=True)
    with raises_error(ValueError, "data_parallel_size", "qwen3", "device_mapping"):
        config.check_model({"model_type": "qwen3"})


@pytest.mark.parametrize(
    ("beside", "fact"), [({}, "enable_expert_parallel"), ({"pipeline_parallel_size": 2}, "pipeline_parallel_size")]
)
def test_missing_needs_of_data_parallelism_are_mistakes(run, beside, fact):
    keys = {"data_parallel_size": 2, "enable_expert_parallel": bool(beside), **beside}
    with raises_error(ValidationError, "data_parallel_size", fact):
        VllmConfig.model_validate(keys)
    text = ", ".join(f"{key}: {str(value).lower()}" for key, value in keys.items())
    slots = "actor_infer.device_mapping=[0,1,2,3]"
    ((_, _, key),) = problems(run, f"{{{text}}}", slots)
    assert key.startswith("actor_infer.strategy_args.strategy_config")


def test_data_parallel_ranks_need_the_slots_of_one_worker(run):
    """2 × 2 slots per worker."""
    random = "actor_train.model_args.random_init={model_type: qwen3_moe, num_experts: 8}"
    config = "{tensor_parallel_size: 2, data_parallel_size: 2, enable_expert_parallel: true}"
    loaded = load(run(config), (random, "actor_infer.device_mapping=[0,1,2,3,4,5,6,7]"), load_registry()).config
    assert loaded.actor_infer.num_gpus_per_worker == 4
    with pytest.raises(ConfigError) as raised:
        load(run(config), (random, "actor_infer.device_mapping=[0,1]"), load_registry())
    (found,) = raised.value.problems
    assert (found.key, found.code) == ("actor_infer", "ROLL-C014")
    assert mentions(found.message, "device_mapping", "2", "4")


@pytest.mark.parametrize(
    "key", [{"enable_eplb": True}, {"eplb_config": {"num_redundant_experts": 2}}, {"enable_elastic_ep": True}]
)
def test_redundant_experts_are_refused(key):
    with raises_error(ValidationError, next(iter(key)), "copies"):
        VllmConfig.model_validate(key)


QWEN = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
MOE = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128}


@pytest.mark.parametrize(
    ("keys", "ranks", "facts"),
    [
        (QWEN, 1, ()),
        (QWEN, 2, ("num_attention_heads × head_dim", "896 / tensor_parallel_size 2 = 448", "128")),
        ({**QWEN, "head_dim": 64, "num_attention_heads": 16}, 2, ("num_key_value_heads × head_dim", "128 /", "= 64")),
        ({**QWEN, "head_dim": 128}, 2, ()),
        (QWEN, 4, ("intermediate_size", "4864 / tensor_parallel_size 4 = 1216")),
        ({**QWEN, "head_dim": 128, "intermediate_size": 5120, "num_attention_heads": 16}, 4, ()),  # shared keys
        ({"hidden_size": 960}, 1, ("hidden_size 960",)),
        ({"text_config": {"intermediate_size": 1536}}, 8, ("1536 / tensor_parallel_size 8 = 192",)),
        ({"intermediate_size": 257}, 2, ("128.5",)),
        ({"hidden_size": 7168, "kv_lora_rank": 512}, 1, ("kv_lora_rank",)),
    ],
)
def test_sides_that_no_block_divides_are_refused(keys, ranks, facts):
    """As vLLM does for edges between ranks and between fused matrices."""
    config = VllmConfig(quantization="fp8_per_block", tensor_parallel_size=ranks)
    VllmConfig(quantization="fp8", tensor_parallel_size=ranks).check_model(keys)
    if not facts:
        config.check_model(keys)
        return
    with raises_error(ValueError, *facts):
        config.check_model(keys)


def test_an_expert_is_divided_only_without_expert_parallelism():
    keys = {**MOE, "moe_intermediate_size": 768}
    eight = {"quantization": "fp8_per_block", "tensor_parallel_size": 8}
    VllmConfig(**eight, enable_expert_parallel=True).check_model(keys)
    with raises_error(ValueError, "moe_intermediate_size 768 / tensor_parallel_size 8 = 96"):
        VllmConfig(**eight).check_model(keys)


def problems(run, config, *overrides):
    """(line, column, key) of each."""
    with pytest.raises(ConfigError) as raised:
        load(run(config), overrides, load_registry())
    return [(*map(int, each.where.split(":")[1:]), each.key) for each in raised.value.problems]


def test_too_short_max_model_len_is_a_located_mistake(run):
    """1,024 + 1,024 tokens by default; a validation may generate more."""
    at = "actor_infer.strategy_args.strategy_config"
    for length, overrides in ((2047, ()), (1100, ("response_length=77",)), (900, ("prompt_length=1",))):
        assert problems(run, f"{{block_size: 16, max_model_len: {length}}}", *overrides) == [(11, 54, at)]
    validation = "validation={data_args: {file_name: rows.jsonl}, generating_args: {max_new_tokens: 1025}}"
    assert problems(run, "{max_model_len: 2048}", validation) == [(11, 38, at)]
    load(run("{max_model_len: 2048}"), (), load_registry())


def test_experts_that_ranks_cannot_divide_are_a_mistake_of_check(run):
    random = "actor_train.model_args.random_init={model_type: qwen3_moe, num_experts: 5}"
    load(run("{max_num_seqs: 4}"), (random,), load_registry())
    found = problems(run, "{tensor_parallel_size: 2, enable_expert_parallel: true}", random)
    assert found == [(11, 22, "actor_infer.strategy_args.strategy_config")]
    redundant = problems(run, "{eplb_config: {num_redundant_experts: 2}}", random)
    assert [key for _, _, key in redundant] == ["actor_infer.strategy_args.strategy_config"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enable_prefix_caching", "false"),
        ("pipeline_parallel_size", "2"),
        ("data_parallel_size", "2, enable_expert_parallel: true"),
    ],
)
def test_router_replay_needs_the_prefix_cache_and_one_stage(run, key, value):
    random = "actor_train.model_args.random_init={model_type: qwen3_moe, num_experts: 4}"
    with pytest.raises(ConfigError) as raised:
        load(run(f"{{{key}: {value}}}"), (random, "router_replay={mode: R3}"), load_registry())
    (found,) = [each for each in raised.value.problems if each.key == "router_replay.mode"]
    assert found.code == "ROLL-C018"
    assert mentions(found.message, key)
    VllmConfig().check_router_replay({})


@pytest.mark.parametrize(
    ("settings", "per_node", "mapping"),
    [
        ("{data_parallel_size: 2, enable_expert_parallel: true}", 1, "[0,1]"),
        ("{tensor_parallel_size: 3}", 4, "[2,3,4]"),
        ("{tensor_parallel_size: 4}", 2, "[0,2,1,3]"),
        ("{tensor_parallel_size: 2, pipeline_parallel_size: 2}", 4, "[0,1,2,3,6,7,8,9,11,12,13,14]"),
    ],
)
def test_slots_of_several_nodes_that_vllm_cannot_use(run, settings, per_node, mapping):
    with pytest.raises(ConfigError) as raised:
        load(run(settings), (f"num_gpus_per_node={per_node}", f"actor_infer.device_mapping={mapping}"), load_registry())
    assert [(each.key, each.code) for each in raised.value.problems] == [("actor_infer.device_mapping", "ROLL-C019")]


@pytest.mark.parametrize("mapping", ["[4,5,0,1]", "[3,4]", "[2,3,4,5,7,8]"])
def test_slots_of_one_node_or_as_many_of_two_are_accepted(run, mapping):
    file = run("{tensor_parallel_size: 2}")
    config = load(file, ("num_gpus_per_node=4", f"actor_infer.device_mapping={mapping}"), load_registry()).config
    assert config.actor_infer.num_gpus_per_worker == 2


def loaded(run, *overrides):
    return load(run("{quantization: fp8}"), list(overrides), load_registry()).config


def test_fp8_runs_have_their_own_correction_and_guard_bounds(run):
    config = loaded(run)
    assert config.actor_infer.weight_format == "fp8"
    assert config.correction.is_weight.enabled
    assert config.recomputes_logprobs
    assert not loaded(run, "train_infer_correction.is_weight.enabled=false").correction.enabled
    assert not loaded(run, "force_disable_old_logprobs_recompute=true").correction.enabled
    plain = loaded(run, "actor_infer.strategy_args.strategy_config.quantization=null")
    assert (plain.actor_infer.weight_format, plain.correction.enabled) == ("dtype", False)
    for guard in (config.guards.logprob_probe, config.guards.logprob_gap):
        assert guard.bound("fp8") > guard.bound("dtype") == 0.05
    assert loaded(run, "guards.logprob_probe.threshold=0.01").guards.logprob_probe.bound("fp8") == 0.01


def test_check_refuses_what_a_run_in_fp8_could_not_do(run):
    from roll_core.errors import ConfigError

    with raises_error(ConfigError, "experts"):
        loaded(run, "+actor_train.model_args.random_init={model_type: qwen3_moe, num_experts: 8}")
    with raises_error(ConfigError, "strategy_config", "fp8"):
        loaded(run, "+actor_infer.weight_format=dtype")


@pytest.mark.parametrize(
    ("why", "model_from", "facts"),
    [
        ("fp8 needs compute capability 8.9, but A100 has 8.0", "actor_train", ("fp8",)),
        ("", "", ("fp8",)),
    ],
)
def test_fp8_is_refused_on_hosts_that_do_not_support_it(run, monkeypatch, why, model_from, facts):
    from roll_core.builtin.cpu import CpuPlatform
    from roll_core.errors import UnsupportedError
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.cluster.executors.base import Place
    from roll_core.runtime.workers.build import group_specs
    from roll_core.spec.pipeline import RoleSpec

    monkeypatch.setattr(CpuPlatform, "supports", lambda self, dtype: why if dtype == "fp8" else "")
    config = loaded(run)
    roles = [RoleSpec(name="actor_infer", kind="generate", model_from=model_from)]
    places = {"actor_infer": (Place(rank=0, world_size=1),)}
    with raises_error(UnsupportedError, "actor_infer", "strategy_config", *facts):
        group_specs(roles, config, load_registry(), CpuPlatform(), places, run("{}"))


# -- videos ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        ("{}", False),
        ("{max_num_batched_tokens: 4095}", False),
        ("{max_num_batched_tokens: 4096}", True),
        ("{limit_mm_per_prompt: {video: 1}}", True),
        ("{limit_mm_per_prompt: {image: 1}}", False),
    ],
)
def test_videos_fit_into_the_encoder_cache(run, config, fits):
    file, columns = run(config), ["prompt_length=4096", "+actor_train.data_args={file_name: a.jsonl, videos: videos}"]
    if fits:
        load(file, columns, load_registry())
    else:
        with pytest.raises(ConfigError) as caught:
            load(file, columns, load_registry())
        ((key, code),) = [(problem.key, problem.code) for problem in caught.value.problems]
        assert (key, code) == ("actor_infer.strategy_args.strategy_name", "ROLL-C017")
    images = [columns[0], columns[1].replace("videos", "images")]
    load(file, images, load_registry())
    load(file, ["prompt_length=2048", columns[1]], load_registry())
