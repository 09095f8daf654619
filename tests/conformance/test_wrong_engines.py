"""The kit for infer strategies finds what it is there to find: each wrong engine fails the tests named here, no others.

What is wrong in every answer is seen by every test that looks at logprobs; what is wrong in one way fails one test.
"""

from __future__ import annotations

import pytest

from roll_testing import InferStrategyConformance
from roll_testing.packaging import PackagingTests, RefusalTests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]  # the first of them waits for the suite

UPDATES = {
    "test_new_weights_compute_the_outputs",
    "test_each_tensor_takes_effect",
    "test_nothing_computed_under_old_weights_is_used",
    "test_what_does_not_fit_the_manifest_is_named",
    "test_the_engine_copies_what_it_receives",
    "test_shared_tensors_may_be_a_trainers_own",
    "test_weights_arrive_by_every_transport",
    "test_numbers_are_the_same_after_a_sleep",
}
SHARED_ASLEEP = "test_a_sleeping_engine_keeps_no_shared_tensors"
HELD = "test_the_receipt_describes_the_loaded_weights"
FUNCTION = "test_the_receipt_has_digests_by_the_manifests_function"
IN_FLIGHT = "test_requests_continue_under_new_weights"
BROKE_OFF = "test_nothing_is_generated_between_a_failed_update_and_the_next"
CUTS = "test_logprobs_ignore_penalties_and_cuts"
STARTED = "test_a_started_engine_has_the_models_weights"
TIGHT = "test_requests_beyond_the_cache_complete"
MANY = "test_many_concurrent_requests_complete"
CANCELLED = "test_a_cancelled_call_harms_no_other"
EQUAL = "test_logprobs_equal_the_reference"
PENALTY = "test_the_repetition_penalty_is_that_of_ctrl"
ON_TOP = "test_an_adapter_is_applied_to_the_model"
MISFIT = "test_an_adapter_that_does_not_fit_is_named"
ORDER = "test_parameters_apply_in_their_order"
TOP_P = "test_top_p_keeps_the_smallest_set_that_reaches_it"
STOP_IDS = {"test_stop_token_ids_end_a_response", "test_min_new_tokens_masks_ends"}
END = "test_the_models_end_token_ends_a_response"
STOP_STRING = "test_a_stop_string_ends_a_response_and_is_kept"
PARTIAL = "test_an_aborted_request_keeps_its_tokens"
PROGRESS = "test_progress_reports_generated_tokens"
TOP_TOKENS = "test_the_top_tokens_of_a_prompt_equal_the_reference"
PROGRESS_OVER = "test_progress_reports_versions_during_an_update"
WRONG = {
    # logprobs
    "logprobs_off_by_one": {
        EQUAL,
        "test_logprobs_have_the_temperature",
        CUTS,
        "test_a_prompt_is_used_as_given",
        MANY,
        CANCELLED,
        STARTED,
        TIGHT,
        "test_aborting_harms_no_other",
        PARTIAL,
        PROGRESS,
        PROGRESS_OVER,
        IN_FLIGHT,
        BROKE_OFF,
        HELD,
        SHARED_ASLEEP,
        *UPDATES,
    },
    "logprobs_untempered": {"test_logprobs_have_the_temperature", CUTS},
    "logprobs_penalised": {CUTS},
    "logprobs_of_the_kept": {CUTS},
    "prompt_logprobs_tempered": {"test_prompt_logprobs_equal_the_reference", TOP_TOKENS},
    "late_top_tokens": {TOP_TOKENS},
    "greedy_logprobs_zero": {EQUAL, MANY, CANCELLED},
    "noisy_logprobs": {"test_greedy_outputs_repeat"},
    "finer_logprobs": {"test_completions_have_their_form"},
    "bias_lost_in_bf16": {"test_logprobs_in_lower_precision_stay_in_bounds"},
    # sampling
    "greedy_takes_the_first": {
        "test_greedy_tokens_are_the_most_likely",
        "test_min_new_tokens_masks_ends",
        PENALTY,
    },
    "cuts_by_default": {"test_tokens_come_from_the_models_distribution", "test_temperature_divides_the_logits"},
    "top_k_one_more": {"test_top_k_keeps_the_most_likely", ORDER},
    "temperature_forgotten": {"test_temperature_divides_the_logits", ORDER},
    "top_p_one_less": {TOP_P, ORDER},
    "top_p_one_more": {TOP_P, ORDER},
    "min_p_ignored": {"test_min_p_keeps_what_is_near_the_most_likely", ORDER},
    "penalty_spares_prompts": {PENALTY},
    "seed_of_the_batch": {"test_seeded_tokens_do_not_depend_on_the_batch", "test_output_i_depends_on_the_seed_and_i"},
    "seeds_in_a_row": {"test_output_i_depends_on_the_seed_and_i"},
    "undeclared_seeds": {"test_undeclared_features_are_refused"},
    "same_without_seed": {"test_requests_without_a_seed_differ"},
    "loses_track_of_many": {MANY},
    # ends
    "two_tokens_at_least": {"test_max_new_tokens_are_generated", MANY},
    "stop_string_cut": {STOP_STRING},
    "end_token_dropped": {END, *STOP_IDS},
    "stop_not_said": {END, STOP_STRING, *STOP_IDS},
    "stops_in_spite_of_all": {"test_ignore_eos_continues_past_every_end"},
    "ends_too_soon": {"test_min_new_tokens_masks_ends"},
    "prompt_cut": {"test_a_request_longer_than_the_context_is_refused"},
    "takes_any_number": {"test_invalid_requests_are_refused"},
    # weights
    "stale_long_prefixes": {"test_nothing_computed_under_old_weights_is_used"},
    "changes_overlooked": {"test_each_tensor_takes_effect"},
    "stale_prefixes": {BROKE_OFF, SHARED_ASLEEP, *UPDATES} - {"test_numbers_are_the_same_after_a_sleep"},
    "bias_forgotten": {HELD, IN_FLIGHT, BROKE_OFF, SHARED_ASLEEP, *UPDATES},
    "receipt_of_the_sent": {HELD, FUNCTION},
    "digests_of_one_kind": {FUNCTION},
    "receipt_of_the_manifest": {
        HELD,
        FUNCTION,
        "test_the_receipt_does_not_repeat_the_manifest",
        "test_weights_arrive_by_every_transport",
    },
    "borrows_for_good": {"test_the_engine_copies_what_it_receives"},
    "writes_into_shared": {"test_shared_tensors_may_be_a_trainers_own"},
    "missing_ignored": {"test_what_does_not_fit_the_manifest_is_named"},
    "unexpected_ignored": {"test_what_does_not_fit_the_manifest_is_named"},
    "draws_with_a_half": {BROKE_OFF},
    "version_of_the_end": {IN_FLIGHT, BROKE_OFF, PROGRESS_OVER},
    "version_behind": {HELD, IN_FLIGHT, BROKE_OFF, SHARED_ASLEEP, *UPDATES},
    # life
    "abort_forgets": {PARTIAL},
    "abort_says_nothing": {PARTIAL},
    "abort_knows_all": {"test_unknown_and_finished_ids_are_ignored"},
    "abort_ends_all": {"test_aborting_harms_no_other", BROKE_OFF},
    "cancel_ends_all": {CANCELLED},
    "draws_for_nobody": {"test_a_cancelled_call_stops_generating"},
    "tells_no_ends": {PROGRESS},
    "tells_the_version_of_now": {PROGRESS_OVER},
    "tells_nothing_new": {PROGRESS, PROGRESS_OVER},
    "answers_before_start": {"test_calls_before_start_raise"},
    "outlives_its_process": {"test_requests_of_a_killed_engine_raise"},
    "cuts_short_without_room": {TIGHT},
    "buffer_lost_asleep": {"test_numbers_are_the_same_after_a_sleep"},
    "shared_kept_asleep": {SHARED_ASLEEP},
    "answers_after_stop": {"test_requests_after_stop_raise"},
    "nameless_model": {"test_a_missing_model_is_named"},
    # what is said
    "silent_prompt_logprobs": {"test_undeclared_features_are_refused"},
    "silent_routed_experts": {"test_undeclared_features_are_refused"},
    "name_of_nobody": {"test_the_endpoint_lists_its_models"},
    "uncounted_metrics": {"test_metrics_are_numbers"},
    # adapters
    "adapters_pile_up": {ON_TOP, MISFIT},
    "unknown_adapter_ignored": {MISFIT},
    "adapter_lost_in_bf16": {"test_adapters_over_a_lower_precision_stay_in_bounds"},
}
RIGHT = {"right_engine": 59, "right_with_adapters": 64}
"""Engines that pass everything, and how much they pass at least."""
SHOWN_ELSEWHERE = {
    *(name for name in vars(PackagingTests) if name.startswith("test_")),
    *(name for name in vars(RefusalTests) if name.startswith("test_")),
    "test_logprobs_equal_the_train_strategys",
    "test_logprobs_in_lower_precision_are_near_the_train_strategys",
    "test_routed_experts_are_those_that_the_model_chooses",
}
"""By wrong train strategies, who share these tests, and by `test_trainers_logprobs`: none trains a bigram model. Routed
experts, which it has none of, are shown by no wrong engine."""


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_engines_pass(engine_suites, name):
    assert engine_suites.failed(f"Test_{name}") == set(), engine_suites.reasons(f"Test_{name}")
    assert list(engine_suites.tests[f"Test_{name}"].values()).count("passed") > RIGHT[name]


def test_no_test_of_the_kit_is_without_a_mistake_that_it_finds():
    tests = {name for name in dir(InferStrategyConformance) if name.startswith("test_")}
    assert set.union(*WRONG.values()) | SHOWN_ELSEWHERE == tests


BY_CHANCE = {
    # `shm` fills the first memory that is free again: which of the borrowed tensors it overwrites is a matter of time.
    "borrows_for_good": {"test_weights_arrive_by_every_transport"},
}
"""Tests that a mistake fails in some runs and not in others."""


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_fails_the_tests_that_are_there_for_it(engine_suites, name):
    failed = engine_suites.failed(f"Test_{name}") - BY_CHANCE.get(name, set())
    assert failed == WRONG[name], engine_suites.reasons(f"Test_{name}")


def test_every_wrong_engine_has_its_line(engine_suites):
    assert set(engine_suites.tests) == {f"Test_{name}" for name in (*RIGHT, *WRONG)}
