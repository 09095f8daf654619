"""`strategy_config` of `vllm`, as `roll-core check` judges it: without vLLM."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from roll_infer_vllm.arguments import DECIDED_ELSEWHERE, PASSED_ON
from roll_infer_vllm.config import VllmConfig


def test_a_worker_takes_tensor_times_pipeline_parallel_slots():
    assert VllmConfig().slots_per_worker() == 1
    assert VllmConfig(tensor_parallel_size=4, pipeline_parallel_size=2).slots_per_worker() == 8


def test_the_engines_own_arguments_go_to_it_as_they_are():
    given = {"max_model_len": 512, "attention_backend": "FLASH_ATTN", "compilation_config": {"mode": 3}}
    assert VllmConfig.model_validate(given).engine_arguments().items() >= given.items()


def test_what_is_not_given_is_left_to_the_engine():
    assert VllmConfig().engine_arguments() == {
        "tensor_parallel_size": 1,
        "enable_lora": False,
        "pipeline_parallel_size": 1,
        "enable_prefix_caching": True,
        "load_format": "auto",
        "scheduling_policy": "priority",
    }


def test_an_argument_that_is_given_as_nothing_goes_to_the_engine_as_nothing():
    assert VllmConfig.model_validate({"max_num_queued_reqs": None}).engine_arguments()["max_num_queued_reqs"] is None


@pytest.mark.parametrize("name", DECIDED_ELSEWHERE)
def test_what_others_decide_is_refused_with_the_reason(name):
    with pytest.raises(ValidationError) as caught:
        VllmConfig.model_validate({name: 1})
    assert f"{name} {DECIDED_ELSEWHERE[name]}" in str(caught.value)


def test_no_argument_is_both_passed_on_and_refused():
    assert not set(PASSED_ON) & set(DECIDED_ELSEWHERE)
    assert not set(PASSED_ON) & set(VllmConfig.__annotations__)


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"load_format": "dummy"}, "random weights beneath the adapter"),
        ({"sleep_level": 2}, "would lose the weights beneath"),
        ({"tensor_parallel_size": 2}, "over several slots"),
    ],
)
def test_adapters_are_refused_beside_what_would_break_them(beside, words):
    with pytest.raises(ValidationError, match=f"enable_lora: .*{words}"):
        VllmConfig.model_validate({"enable_lora": True, **beside})


def test_adapters_are_served_only_where_it_is_asked_for():
    assert not VllmConfig().serves_adapters()
    assert VllmConfig(enable_lora=True).serves_adapters()
    assert VllmConfig(enable_lora=True).engine_arguments()["enable_lora"] is True


def test_check_names_the_nearest_argument(tmp_path, capsys):
    from roll_core.cli.main import main

    (tmp_path / "run.yaml").write_text(
        "pipeline: rlvr\n"
        "max_steps: 1\n"
        "pretrain: model\n"
        "actor_train:\n"
        "  data_args: {file_name: rows.jsonl}\n"
        "  strategy_args: {strategy_name: hf_train}\n"
        "actor_infer:\n"
        "  strategy_args:\n"
        "    strategy_name: vllm\n"
        "    strategy_config: {attention_backends: FLASH_ATTN}\n"
        "rewards: {math: {reward: math_rule}}\n",
        encoding="utf-8",
    )
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "actor_infer.strategy_args.strategy_config.attention_backends" in said
    assert "did you mean attention_backend?" in said
