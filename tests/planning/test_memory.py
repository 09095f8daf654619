"""What each role takes in each phase, by hand."""

from dataclasses import replace

import pytest

from roll_core.spec.plan import MemoryItem
from roll_core.spec.providers import TrainProvider
from roll_modeling.memory import MODEL_CODE_BYTES
from roll_testing.image_models import CONFIGS
from roll_tools.run_plan import CONTEXT_BYTES, PROCESS_BYTES
from roll_tools.sizes import model_size
from roll_weight_transports import device_memory

ACC = ("platform=acc", "executor=ray", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]")


def role(plan, name):
    return next(each for each in plan.memory if each.role == name)


def amounts(memory, act, *names):
    return sum(use.num_bytes for use in memory.taken(act) if use.what in names)


def held(memory, act):
    return amounts(memory, act, "weights", "gradients", "optimizer")


def test_trainer_needs_16_bytes_per_parameter_in_float32(planned, num_parameters):
    trainer = role(planned(), "actor_train")
    assert trainer.parameters == num_parameters
    assert held(trainer, "step") == 16 * num_parameters
    assert held(trainer, "start") == 8 * num_parameters  # gradients have their buffer from the beginning


def test_bfloat16_trainer_needs_a_float32_copy(planned, num_parameters):
    trainer = role(planned("actor_train.model_args.dtype=bf16"), "actor_train")
    largest = 1000 * 64
    assert held(trainer, "step") == (2 + 4 + 12) * num_parameters
    # One on its way into the float32 buffer, and the output layer's. Of several chunks it is accumulated in float32.
    assert held(trainer, "backward") == (2 + 4 + 12) * num_parameters + 2 * largest + 2 * largest
    chunks = "actor_train.strategy_args.strategy_config.logprob_chunk_tokens=200"
    several = role(planned("actor_train.model_args.dtype=bf16", chunks, "prompt_length=2"), "actor_train")
    assert held(several, "backward") == (2 + 4 + 12) * num_parameters + 2 * largest + (4 + 2) * largest
    assert amounts(trainer, "start", "weights") == (2 + 4) * num_parameters  # drawn in float32


def test_adapters_have_the_gradients(planned, num_parameters):
    trainer = role(
        planned("actor_train.model_args.lora_target=[q_proj,v_proj]", "actor_train.model_args.lora_rank=3"),
        "actor_train",
    )
    adapters = 2 * 3 * ((64 + 64) + (64 + 32))
    assert amounts(trainer, "backward", "weights") == 4 * (num_parameters + adapters)
    assert amounts(trainer, "backward", "gradients", "optimizer") == 12 * adapters


def test_frozen_layers_in_4_bits_take_4_and_a_half(planned, num_parameters):
    keys = "lora_target=[q_proj,v_proj]", "lora_rank=3", "load_in_4bit=true", "additional_target=[o_proj]"
    trainer = role(planned(*(f"actor_train.model_args.{key}" for key in keys)), "actor_train")
    adapters = 2 * 3 * ((64 + 64) + (64 + 32))
    packed = 2 * (64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    weights = 4 * (num_parameters + adapters - packed) + packed * 9 // 16
    assert amounts(trainer, "backward", "weights") == weights


def test_adapters_of_every_kind_are_counted(planned, num_parameters):
    keys = "lora_target=[q_proj,embed_tokens]", "lora_rank=3", "rank_pattern.q_proj=5", "use_dora=true"
    trainer = role(planned(*(f"actor_train.model_args.{key}" for key in keys)), "actor_train")
    adapters = 2 * (5 * (64 + 64) + 64) + 3 * (1000 + 64) + 64
    assert amounts(trainer, "backward", "weights") == 4 * (num_parameters + adapters)


def test_activations_by_hand(planned):
    keys = ("actor_train.model_args.disable_gradient_checkpointing=true", "actor_train.infer_batch_size=4")
    trainer = role(planned(*keys), "actor_train")
    tokens, hidden, query, key, width = 8 * 64, 64, 64, 32, 160
    # Inputs and outputs of two norms; heads before their norm; queries, keys, values, what was attended; the
    # feed-forward part's gate, up and product; attention weights of 64 tokens for each of 4 heads.
    layer = 4 * (4 * hidden + (query + key) + (2 * query + 2 * key) + 3 * width) + 4 * 4 * 64
    backward = tokens * (3 * width + 2 * hidden) * 4 + 4 * hidden * width
    # All of it is there when the logits are, which take most; unless these come one token at a time.
    assert amounts(trainer, "backward", "activations") == 2 * tokens * layer
    slowly = "actor_train.strategy_args.strategy_config.logprob_chunk_tokens=1"
    recomputing = role(planned(keys[1], slowly), "actor_train")
    assert amounts(recomputing, "backward", "logits") == 0
    assert amounts(recomputing, "backward", "activations") == 2 * tokens * hidden * 4 + tokens * layer + backward
    assert held(recomputing, "backward") == 16 * recomputing.parameters + 4 * 1000 * hidden  # the output's waits


def test_a_smaller_budget_of_tokens_makes_smaller_microbatches(planned):
    whole = role(planned(), "actor_train")
    half = role(
        planned("actor_train.use_dynamic_batching_in_train=true", "actor_train.max_tokens_per_microbatch_in_train=256"),
        "actor_train",
    )
    assert amounts(half, "backward", "activations") < amounts(whole, "backward", "activations")
    assert held(half, "backward") == held(whole, "backward")


def test_an_engine_in_the_trainers_process_borrows_its_weights(planned, num_parameters):
    together = role(planned(), "actor_infer")
    apart = role(planned("executor=ray", "num_gpus_per_node=1"), "actor_infer")
    packed = amounts(together, "generate", "weights")
    assert amounts(apart, "generate", "weights") == packed + 4 * num_parameters
    assert amounts(together, "start", "weights") == packed + 4 * num_parameters


def test_resident_weights_need_two_buckets_on_the_device(planned, monkeypatch, num_parameters):
    monkeypatch.setitem(device_memory.KINDS, "acc", object())

    def buffers(name, act, *keys):
        taken = role(planned(*ACC, *keys), name).taken(act)
        return [(use.num_bytes, use.on) for use in taken if use.what == "sync buffers"]

    assert buffers("actor_train", "publish") == [(2 * 4 * num_parameters, "device")]
    assert buffers("actor_infer", "receive") == []
    ((_, where),) = buffers("actor_train", "publish", "actor_infer.device_mapping=[1]")
    assert where == "host"


def test_keys_and_values_have_room_for_the_longest_rows(planned):
    engine = role(
        planned(
            "actor_infer.strategy_args.strategy_config.max_num_seqs=10",
            "actor_infer.strategy_args.strategy_config.max_num_batched_tokens=48",
        ),
        "actor_infer",
    )
    position = 2 * 2 * 32 * 4
    assert amounts(engine, "generate", "kv cache") == (10 * 64 + 48) * position


def test_accelerator_stores_the_full_kv_cache(planned):
    """Two layers of 32 key widths in float32; growing rows copies one of their four regions."""
    config = "actor_infer.strategy_args.strategy_config"
    keys = (f"{config}.max_num_seqs=10", f"{config}.max_num_batched_tokens=48")
    position = 2 * 2 * 32 * 4
    engine = role(planned(*ACC, *keys), "actor_infer")
    positions = 10 * 512
    assert amounts(engine, "generate", "kv cache") == positions * position + 48 * position
    assert amounts(engine, "wait", "kv cache") == positions * position
    assert amounts(engine, "generate", "activations") == max(10 * 64 * position // 4, 48 * 4 * (3 * 64 + 3 * 160))
    limited = role(planned(*ACC, *keys, f"{config}.kv_cache_gib={1000 * position / 2**30}"), "actor_infer")
    assert amounts(limited, "generate", "kv cache") == 1000 * position + 48 * position


def test_phases_are_ordered_and_colocated_roles_take_turns(planned, num_parameters):
    plan = planned(*ACC)
    slots = {load.phase: dict(load.by_role) for load in plan.loads if "slot" in load.where}
    nodes = {load.phase: dict(load.by_role) for load in plan.loads if "slot" not in load.where}
    assert [name for name in slots if not name.startswith("start of")] == [
        "publish", "rollout", "logprobs of the policy", "train", "train: step", "checkpoint of actor_train",
    ]  # fmt: skip
    trainer = role(plan, "actor_train")
    engine = role(plan, "actor_infer")
    assert slots["publish"]["actor_train"] == 4 * num_parameters
    # The engine's cache is freed by its sleep, and allocated again by the first request.
    received = engine.num_bytes("receive", "device") - amounts(engine, "receive", "kv cache")
    assert slots["publish"]["actor_infer"] == received
    assert "actor_train" not in slots["rollout"]
    # Gradients and optimizer stay away until the trainer trains.
    scoring = amounts(trainer, "score", "activations", "logits")
    assert slots["logprobs of the policy"]["actor_train"] == 4 * num_parameters + scoring
    # Weights, moments; gradients are zero and freed.
    assert nodes["rollout"]["actor_train"] == 12 * num_parameters + MODEL_CODE_BYTES
    assert "actor_infer" not in slots["train"]
    assert slots["train"]["actor_train"] == trainer.num_bytes("backward", "device")
    assert slots["train"]["device context"] == 2 * CONTEXT_BYTES


def test_moments_do_not_exist_before_the_first_step(planned, num_parameters):
    plan = planned(*ACC[:3], "actor_infer.device_mapping=[1]")
    loads = {(load.where, load.phase): dict(load.by_role) for load in plan.loads}
    # Weights and the buffer of gradients.
    assert loads["node 0, slot 0", "start of actor_infer"]["actor_train"] == 8 * num_parameters


def test_an_engine_on_another_device_has_its_own_weights(planned, num_parameters):
    config = "platform=acc", "executor=local", "actor_train.device_mapping=[0]"
    together, apart = (role(planned(*config, f"actor_infer.device_mapping=[{i}]"), "actor_infer") for i in (0, 1))
    assert amounts(together, "generate", "weights") == 0
    assert amounts(apart, "generate", "weights") == 4 * num_parameters


def test_roles_of_one_process_share_its_device_context(planned):
    plan = planned("platform=acc", "executor=local", "actor_train.device_mapping=[0]", "actor_infer.device_mapping=[0]")
    contexts = [dict(load.by_role)["device context"] for load in plan.loads if "slot" in load.where]
    assert set(contexts) == {CONTEXT_BYTES}


def test_without_turns_everything_stays(planned, num_parameters):
    plan = planned(*ACC, "is_offload_states=false")
    rollout = next(load for load in plan.loads if load.phase == "rollout" and "slot" in load.where)
    assert dict(rollout.by_role)["actor_train"] == 16 * num_parameters


def test_roles_apart_do_not_move(planned, num_parameters):
    plan = planned(*ACC[:3], "actor_infer.device_mapping=[1]")
    rollout = {load.where: dict(load.by_role) for load in plan.loads if load.phase == "rollout"}
    assert rollout["node 0, slot 0"]["actor_train"] == 16 * num_parameters
    assert "actor_train" not in rollout["node 0, slot 1"]


def test_the_slot_with_least_memory_counts(planned):
    assert planned(*ACC).capacity.slot == 78 * 2**30
    assert planned(*ACC, slot_bytes=5).capacity.slot == 5


def test_host_memory_counts_the_libraries_of_every_process(planned):
    one = next(load for load in planned().loads if load.phase == "train")
    three = next(load for load in planned("executor=ray", "num_gpus_per_node=1").loads if load.phase == "train")
    assert dict(one.by_role)["libraries"] == PROCESS_BYTES
    assert dict(three.by_role)["libraries"] == 4 * PROCESS_BYTES  # the driver, a trainer, an engine, a judge


def test_unknown_model_is_reported_as_unknown(planned, tmp_path):
    text = (
        "pipeline: sft\npretrain: nowhere/model\nsft_train: {data_args: {file_name: a.jsonl}, strategy_args:"
        " {strategy_name: hf_train}}\n"
    )
    plan = planned(text=text)
    assert "nowhere/model" in role(plan, "sft_train").unknown
    assert plan.starts
    assert not plan.known


@pytest.mark.parametrize(("kind", "size"), [("byte", 258), ("{kind: char, alphabet: abca}", 5), ("bpe", 1024)])
def test_the_vocabulary_is_that_of_the_tokenizer_to_be_made(planned, kind, size):
    tokenizer = kind if kind.startswith("{") else f"{{kind: {kind}}}"
    plan = planned(f"tokenizer={tokenizer}", "~actor_train.model_args.random_init.vocab_size")
    hidden = 64
    with_given = role(planned(), "actor_train").parameters
    assert with_given - role(plan, "actor_train").parameters == (1000 - size) * hidden


def test_failed_formula_is_reported_and_the_plan_continues(planned, monkeypatch):
    monkeypatch.setattr("roll_infer_hf.memory.engine", lambda question: 1 / 0)
    plan = planned()
    assert "memory:engine failed: ZeroDivisionError" in role(plan, "actor_infer").unknown
    assert not role(plan, "actor_train").unknown


def test_size_of_a_library_model_is_unknown(planned, monkeypatch):
    from roll_core.pipelines import plans

    usual = plans.sft

    def with_library(config):
        plan = usual(config)
        roles = tuple(replace(each, library="acme.flows:Library") for each in plan.roles)
        return replace(plan, roles=roles)

    monkeypatch.setattr(plans, "sft", with_library)
    text = (
        "pipeline: sft\npretrain: nowhere/model\nsft_train: {data_args: {file_name: a.jsonl}, strategy_args:"
        " {strategy_name: hf_train}}\n"
    )
    plan = planned(text=text)
    assert "acme.flows:Library" in role(plan, "sft_train").unknown
    assert not plan.known


def test_student_counts_teacher_head_and_full_vocabularies(planned, distill):
    found, plain = (
        role(planned(*ACC, f"kd_support={each}", text=distill), "actor_train") for each in ("full", "sampled")
    )
    assert amounts(found, "backward", "weights") - amounts(plain, "backward", "weights") == 2 * 1000 * 32
    # Of 8 rows of 64 tokens, 40 of them the response's: 6 arrays of the default, reverse KL, for the responses, and
    # hidden states of both models, this one's also for the responses alone, with their gradient.
    logits, states = 4 * 8 * 40 * 1000 * 6, 8 * 64 * (2 * 4 * 32 + 4 * 64) + 2 * 8 * 40 * 4 * 64
    assert amounts(found, "backward", "logits") == logits + states


def test_selective_recomputation_keeps_products_and_attention(planned):
    selective = "actor_train.strategy_args.strategy_config.recompute_granularity=selective"
    slowly = "actor_train.strategy_args.strategy_config.logprob_chunk_tokens=1"
    tokens, hidden, query, key, width, heads = 8 * 64, 64, 64, 32, 160, 4
    # The layer's input; outputs of q, k, v, o, gate, up and down; what was attended, and one number per head.
    kept = 4 * (hidden + query + 2 * key + hidden + 2 * width + hidden + query + heads)
    full, some = (role(planned(*ACC, slowly, *more), "actor_train") for more in ((), (selective,)))
    # Recomputing one layer adds the rest of it: what the plan counts for full recomputation, without what is kept.
    added = 2 * tokens * (kept - 4 * hidden) - tokens * (kept - 4 * hidden)
    assert amounts(some, "backward", "activations") - amounts(full, "backward", "activations") == added


def test_offloaded_activations_are_on_the_host(planned):
    keys = (*ACC, "actor_train.strategy_args.strategy_config.logprob_chunk_tokens=1")
    offloaded = role(
        planned(*keys, "actor_train.strategy_args.strategy_config.activation_offloading=true"), "actor_train"
    )
    held = role(planned(*keys), "actor_train")
    inputs = 2 * (8 * 64) * 64 * 4
    on_host = [use for use in offloaded.uses if use.what == "activations" and use.on == "host"]
    assert [use.num_bytes for use in on_host] == [inputs]
    on_device = [
        sum(
            use.num_bytes
            for use in each.uses
            if use.what == "activations" and use.on == "device" and "backward" in use.during
        )
        for each in (held, offloaded)
    ]
    assert on_device[0] - on_device[1] == inputs


def test_strategy_without_an_estimate_counts_its_parameters(planned, registry, num_parameters, monkeypatch):
    find = registry.find

    def without_memory(kind, name):
        provider = find(kind, name)
        return replace(provider, memory="") if (kind, name) == (TrainProvider, "hf_train") else provider

    monkeypatch.setattr(registry, "find", without_memory)
    plan = planned("actor_train.model_args.dtype=bf16")
    trainer = role(plan, "actor_train")
    assert trainer.num_bytes("step", "device") == (2 + 4 + 12) * num_parameters
    assert not trainer.unknown


def test_engine_joins_projections_at_the_start_of_an_accelerator(planned):
    """Gate and up of one layer, in float32, are its largest siblings."""
    engine = role(planned(*ACC), "actor_infer")
    assert amounts(engine, "start", "buffers") == 4 * 2 * 64 * 160
    assert amounts(role(planned(), "actor_infer"), "start", "buffers") == 0


def test_amount_and_formula_have_the_same_factors():
    item = MemoryItem.of("buffers", 4, 3_000_000, 2, "in transit", less=10)
    assert (item.num_bytes, item.formula) == (5_999_990, "in transit: 4 × 3.0 M / 2")
    assert MemoryItem.of("buffers", 2, 5, less=99).num_bytes == 0


# -- images ------------------------------------------------------------------------------------------------------------


def test_vision_parameters_are_loaded_and_not_trained(seeing):
    size = model_size({"model_type": "qwen2_5_vl", **CONFIGS["qwen2_5_vl"]})
    encoder, projector = size.vision.encoder, size.vision.projector
    for freeze, frozen in (("[vision,projector]", encoder + projector), ("[vision]", encoder), ("[]", 0)):
        trainer = role(seeing(f"model_args.freeze={freeze}", images=False), "actor_train")
        assert held(trainer, "step") == 4 * size.parameters + 12 * (size.parameters - frozen)


def test_images_take_pixels_and_the_encoders_activations(seeing):
    keys = "model_args.disable_gradient_checkpointing=true", "infer_batch_size=8"
    text, frozen = (role(seeing(*keys, images=images), "actor_train") for images in (False, True))
    trained = role(seeing(*keys, "model_args.freeze=[projector]"), "actor_train")
    patches = 8 * 24 * 4
    pixels, layer = 4 * 3 * 2 * 14**2, 4 * (7 * 64 + 3 * 128)
    before, after = (amounts(each, "backward", "activations") for each in (text, frozen))
    assert after - before == patches * pixels
    assert amounts(trained, "backward", "activations") - after == patches * 3 * layer
    score = [amounts(each, "score", "activations", "logits") for each in (text, frozen)]
    assert score[1] == patches * pixels + max(score[0], patches * layer)


def test_max_pixels_bounds_the_tokens_of_images(seeing):
    def patches(*keys):
        (use,) = [use for use in role(seeing(*keys), "actor_infer").uses if "pixels" in use.formula]
        return use.num_bytes // (4 * 3 * 2 * 14**2)

    few = patches("data_args.max_images=2", f"data_args.max_pixels={28 * 28 * 3}")
    assert (few, patches()) == (patches() * 6 // 24, few * 4)
