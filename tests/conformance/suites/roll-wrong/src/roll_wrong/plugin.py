"""Offers all of them, by the names of their classes in snake case."""

from dataclasses import replace

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import (
    ExecutorProvider,
    InferCapabilities,
    InferProvider,
    PlatformProvider,
    TrainCapabilities,
    TrainProvider,
)

ROLL_HOOK_API = 1
ALONE = TrainCapabilities(
    tasks=("causal_lm", "value"),
    dtypes=("fp32",),
    offload=True,
    portable_state=True,
    topk=True,
    gathered=True,
    weight_transports=("shared", "shm"),
)
TOGETHER = TrainCapabilities(
    tasks=("causal_lm", "value"),
    dtypes=("fp32",),
    data_parallel=True,
    offload=True,
    portable_state=True,
    topk=True,
    gathered=True,
    weight_transports=("shared", "shm"),
)
IN_LAYERS = TrainCapabilities(
    tasks=("causal_lm", "value"),
    dtypes=("fp32",),
    tensor_parallel=True,
    offload=True,
    portable_state=True,
    topk=True,
    gathered=True,
    weight_transports=("shared", "shm"),
)
WITHOUT_TOPK = TrainCapabilities(
    tasks=("causal_lm", "value"),
    dtypes=("fp32",),
    offload=True,
    portable_state=True,
    weight_transports=("shared", "shm"),
)
OWN_OPTIMIZER = TrainCapabilities(
    tasks=("causal_lm", "value"),
    dtypes=("fp32",),
    topk=True,
    gathered=True,
    weight_transports=("shared", "shm"),
)
FLOW = TrainCapabilities(
    tasks=("flow",),
    dtypes=("fp32",),
    data_parallel=True,
    gradient_checkpointing=True,
    lora=True,
    ema=True,
    module_programs=True,
)
FLOWS = {
    name: "".join(part.capitalize() for part in name.split("_"))
    for name in (
        "right_flow",
        "calls_once",
        "halves_losses",
        "mean_of_batches",
        "mean_of_replicas",
        "cuts_blocks",
        "base_with_adapters",
        "average_without_ramp",
        "average_of_each_step",
        "average_stays",
        "average_seen_by_autograd",
        "average_lost",
        "nameless_flow",
        "exports_base",
    )
}
OPTIMIZERS = {
    name: "".join(part.capitalize() for part in name.split("_"))
    for name in (
        "right_sgd",
        "right_muon",
        "sgd_mean_of_microbatches",
        "sgd_momentum_lost",
        "sgd_instead_of_muon",
        "muon_mean_of_microbatches",
        "muon_forgotten_mask",
    )
}
SPECIAL = {
    **dict.fromkeys(OPTIMIZERS, OWN_OPTIMIZER),
    "right_together": TOGETHER,
    "mean_of_ranks": TOGETHER,
    "skips_alone": TOGETHER,
    "declares_too_much": IN_LAYERS,
    "silent_without_topk": WITHOUT_TOPK,
}
WRONG = {
    name: "".join(part.capitalize() for part in name.split("_")).replace("Nan", "NaN")
    for name in (
        "mean_of_microbatches",
        "mean_of_ranks",
        "skips_alone",
        "forgotten_mask",
        "off_by_one",
        "leaking_neighbours",
        "temperature_ignored",
        "entropy_in_bits",
        "values_shifted",
        "topk_backwards",
        "given_ids_detached",
        "any_number_of_ids",
        "clips_microbatches",
        "schedule_ahead",
        "gradients_kept",
        "decays_biases",
        "stale_export",
        "optimizer_lost",
        "state_lost_away",
        "weights_taken_along",
        "memory_kept",
        "skip_not_reported",
        "steps_on_nan",
        "closes_once",
        "forward_clears",
        "scorer_trains",
        "silent_without_topk",
        "heavy",
        "declares_too_much",
        "saves_rounded",
        "saves_late",
        "takes_every_task",
        "damage_ignored",
        "nameless_nan",
        "portable_moments_lost",
        "portable_step_forgotten",
        "portable_in_own_units",
        "portable_rounded",
        "portable_taken_away",
        "portable_of_any_model",
    )
}
PLATFORMS = (
    "right_platform",
    "other_name",
    "fickle",
    "silent",
    "found_nothing",
    "sets_variables",
    "starts_threads",
    "keeps_devices_open",
    "other_type",
    "one_for_all",
    "numbers_as_values",
    "without_reason",
    "deals_out_ranks",
    "of_the_moment",
    "takes_every_dtype",
    "uses_more_than_there_is",
    "unnamed",
    "unmeasured",
)


ENGINE = InferCapabilities(
    dtypes=("fp32",),
    sleeps=True,
    prompt_logprobs=True,
    prompt_topk=True,
    in_flight_update=True,
    weight_transports=("shared", "shm"),
)
WITHOUT_SEEDS = replace(ENGINE, seeds=False)
WITHOUT_PROMPT_LOGPROBS = replace(ENGINE, prompt_logprobs=False, prompt_topk=False)
WITH_ENDPOINT = replace(ENGINE, endpoint=True)
IN_BF16 = replace(ENGINE, dtypes=("fp32", "bf16"))
WITH_ADAPTERS = replace(IN_BF16, lora=True)
ADAPTERS = ("right_with_adapters", "adapters_pile_up", "unknown_adapter_ignored", "adapter_lost_in_bf16")
SPECIAL_ENGINES = {
    "silent_prompt_logprobs": WITHOUT_PROMPT_LOGPROBS,
    "undeclared_seeds": WITHOUT_SEEDS,
    "name_of_nobody": WITH_ENDPOINT,
    "bias_lost_in_bf16": IN_BF16,
    **dict.fromkeys(ADAPTERS, WITH_ADAPTERS),
}
WRONG_ENGINES = (
    "logprobs_off_by_one",
    "logprobs_untempered",
    "logprobs_penalised",
    "logprobs_of_the_kept",
    "prompt_logprobs_tempered",
    "late_top_tokens",
    "greedy_logprobs_zero",
    "noisy_logprobs",
    "finer_logprobs",
    "bias_lost_in_bf16",
    "greedy_takes_the_first",
    "cuts_by_default",
    "top_k_one_more",
    "temperature_forgotten",
    "top_p_one_less",
    "top_p_one_more",
    "min_p_ignored",
    "penalty_spares_prompts",
    "seed_of_the_batch",
    "seeds_in_a_row",
    "undeclared_seeds",
    "same_without_seed",
    "loses_track_of_many",
    "two_tokens_at_least",
    "stop_string_cut",
    "end_token_dropped",
    "stop_not_said",
    "stops_in_spite_of_all",
    "ends_too_soon",
    "prompt_cut",
    "takes_any_number",
    "stale_prefixes",
    "stale_long_prefixes",
    "changes_overlooked",
    "bias_forgotten",
    "receipt_of_the_sent",
    "receipt_of_the_manifest",
    "digests_of_one_kind",
    "borrows_for_good",
    "writes_into_shared",
    "missing_ignored",
    "unexpected_ignored",
    "draws_with_a_half",
    "version_of_the_end",
    "version_behind",
    "abort_forgets",
    "abort_says_nothing",
    "abort_knows_all",
    "abort_ends_all",
    "cancel_ends_all",
    "draws_for_nobody",
    "tells_no_ends",
    "tells_the_version_of_now",
    "tells_nothing_new",
    "buffer_lost_asleep",
    "shared_kept_asleep",
    "answers_after_stop",
    "answers_before_start",
    "outlives_its_process",
    "cuts_short_without_room",
    "name_of_nobody",
    "uncounted_metrics",
    "nameless_model",
    "silent_prompt_logprobs",
    "silent_routed_experts",
)


IN_PROCESS = (
    "right_here",
    "reverses_ranks",
    "forgets_arguments",
    "forgets_variables",
    "names_other_processes",
    "changes_threads",
    "one_at_a_time",
    "widens_arrays",
    "plain_errors",
    "without_traces",
    "hides_echoes",
    "ignores_unknown_methods",
    "keeps_cancelled_calls",
    "never_closes",
    "closes_once",
    "leaves_workers",
)
EXECUTORS = (
    *IN_PROCESS,
    "right_processes",
    "hides_no_devices",
    "leaves_processes",
    "deaf_watch",
    "forgets_the_rank",
    "silent_exits",
    "loses_another",
)


@hookimpl
def roll_executors():
    for name in EXECUTORS:
        target = f"roll_wrong.executors:{name.title().replace('_', '')}"
        summary = "For the tests of the kit for executors"
        yield ExecutorProvider(name=name, target=target, summary=summary, in_process=name in IN_PROCESS)


@hookimpl
def roll_platforms():
    yield PlatformProvider(name="wrong_board", target="roll_wrong.board:Board", summary="Pretends", priority=-1)
    for name in PLATFORMS:
        target = f"roll_wrong.platforms:{''.join(part.capitalize() for part in name.split('_'))}"
        yield PlatformProvider(name=name, target=target, summary="For the tests of the kit for platforms", priority=-1)


@hookimpl
def roll_train_strategies():
    targets = {"right": "right:Right", "right_together": "right:RightTogether"}
    targets |= {name: f"wrong:{attribute}" for name, attribute in WRONG.items()}
    targets |= {name: f"optimizers:{attribute}" for name, attribute in OPTIMIZERS.items()}
    for name, target in targets.items():
        yield TrainProvider(
            name=name,
            target=f"roll_wrong.{target}",
            config=f"roll_wrong.{'heavy' if name == 'heavy' else 'config'}:NoConfig",
            summary="For the tests of the conformance kit",
            capabilities=SPECIAL.get(name, ALONE),
            platforms=("wrong_board",),
        )
    for name, target in FLOWS.items():
        yield TrainProvider(
            name=name,
            target=f"roll_wrong.flows:{target}",
            config="roll_strategy_hf.config:HFTrainConfig",
            summary="For the tests of the conformance kit",
            capabilities=FLOW,
        )


@hookimpl
def roll_infer_strategies():
    targets = {"right_engine": "engine:RightEngine"}
    targets |= {name: f"wrong_engines:{name.title().replace('_', '')}" for name in WRONG_ENGINES}
    targets |= {name: f"adapters:{name.title().replace('_', '')}" for name in ADAPTERS}
    for name, target in targets.items():
        yield InferProvider(
            name=name,
            target=f"roll_wrong.{target}",
            config="roll_wrong.config:EngineConfig",
            summary="For the tests of the conformance kit",
            capabilities=SPECIAL_ENGINES.get(name, ENGINE),
            platforms=("cpu",) if name in SPECIAL_ENGINES else ("wrong_board",),
        )
