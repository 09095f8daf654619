"""The smallest change that fits."""

from dataclasses import replace

from roll_core.spec.providers import TrainProvider
from roll_strategy_hf.config import HFTrainConfig
from roll_tools.planning import make_plan
from roll_tools.run_plan import PROCESS_BYTES
from roll_tools.suggestion import changed, smallest_change

LONG = (
    "prompt_length=200",
    "response_length=312",
    "actor_train.model_args.disable_gradient_checkpointing=true",
    "actor_infer.strategy_args.strategy_config.max_num_seqs=1",
    "actor_train.infer_batch_size=1",
)


def proposal(loaded, registry, *overrides, host_bytes):
    each = loaded(*overrides)
    plan = make_plan(each, registry, host_bytes=host_bytes)
    return plan, smallest_change(each.config, registry, plan)


def most(plan):
    return max(load.num_bytes for load in plan.loads)


def test_smallest_change_that_fits_is_proposed(loaded, registry, planned):
    everything = most(planned(*LONG))
    quarter = most(
        planned(
            *LONG,
            "actor_train.training_args.per_device_train_batch_size=2",
            "actor_train.training_args.gradient_accumulation_steps=4",
        )
    )
    plan, found = proposal(loaded, registry, *LONG, host_bytes=quarter)
    assert plan.over == everything - quarter
    assert found.over == 0
    assert found.overrides == [
        "actor_train.training_args.per_device_train_batch_size=2",
        "actor_train.training_args.gradient_accumulation_steps=4",
    ]
    assert planned(*LONG, *found.overrides, host_bytes=quarter).over == 0


def test_second_change_is_proposed_if_one_is_not_enough(loaded, registry, planned):
    both = most(
        planned(
            *LONG,
            "actor_train.training_args.per_device_train_batch_size=1",
            "actor_train.training_args.gradient_accumulation_steps=8",
            "actor_train.model_args.disable_gradient_checkpointing=false",
        )
    )
    _, found = proposal(loaded, registry, *LONG, host_bytes=both)
    assert found.over == 0
    assert len(found.changes) == 2
    assert planned(*LONG, *found.overrides, host_bytes=both).over == 0


def test_change_that_the_strategy_refuses_is_not_proposed(loaded, registry, monkeypatch):
    def refuse(self, given):
        if given.get("disable_gradient_checkpointing") is False:
            raise ValueError("this strategy computes nothing again")

    monkeypatch.setattr(HFTrainConfig, "check_model_args", refuse)
    _, found = proposal(loaded, registry, *LONG, host_bytes=PROCESS_BYTES)
    assert found.changes
    assert not [each for each in found.overrides if "disable_gradient_checkpointing" in each]


def test_a_microbatch_that_cannot_be_halved_is_divided_otherwise(loaded, registry, planned):
    sevens = ("rollout_batch_size=14", "actor_train.training_args.per_device_train_batch_size=7")
    ones = [
        "actor_train.training_args.per_device_train_batch_size=1",
        "actor_train.training_args.gradient_accumulation_steps=7",
    ]
    _, found = proposal(loaded, registry, *LONG, *sevens, host_bytes=most(planned(*LONG, sevens[0], *ones)))
    assert found.overrides == ones


def test_nearest_suggestion_is_shown_if_nothing_fits(loaded, registry):
    plan, found = proposal(loaded, registry, *LONG, host_bytes=PROCESS_BYTES)
    assert 0 < found.over < plan.over


def test_a_plan_that_fits_needs_no_change(planned):
    assert planned(*LONG).over == 0


def test_a_change_keeps_the_rest(loaded):
    config = loaded().config
    other = changed(config, {"actor_infer.strategy_args.strategy_config.kv_cache_gib": 0.5})
    assert other.actor_infer.strategy_args.strategy_config == {"kv_cache_gib": 0.5}
    assert other.actor_infer.strategy_args.strategy_name == "hf_infer"
    assert other.actor_train == config.actor_train
    assert config.actor_infer.strategy_args.strategy_config == {}


def test_checkpointing_is_not_proposed_to_a_strategy_without_it(loaded, registry, monkeypatch):
    record = registry.find(TrainProvider, "hf_train")
    without = replace(record, capabilities=replace(record.capabilities, gradient_checkpointing=False))
    find = registry.find
    monkeypatch.setattr(registry, "find", lambda kind, name: without if name == "hf_train" else find(kind, name))
    _, found = proposal(loaded, registry, *LONG, host_bytes=PROCESS_BYTES)
    assert found.changes
    assert not [each for each in found.overrides if "disable_gradient_checkpointing" in each]
