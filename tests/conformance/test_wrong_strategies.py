"""The kit finds what it is there to find: right strategies pass it, and each mistake fails the tests named here.

What is wrong in many ways at once, like a forgotten mask, is seen by every test that looks at gradients; what is
wrong in one way fails one test.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]  # the first of them waits for all suites

ROWS = "test_the_gradient_does_not_depend_on_the_rows_of_a_rollout"
STEPS = {
    "test_steps_of_adamw_equal_the_reference",
    "test_gradients_are_clipped_to_their_global_norm",
    "test_the_schedule_is_that_of_transformers",
}
LOGPROBS = {
    "test_logprobs_equal_the_reference",
    "test_logprobs_have_the_temperature_of_the_rollouts",
    "test_outputs_do_not_depend_on_their_neighbours",
    "test_only_what_was_wanted_is_returned",
    "test_a_role_that_only_scores_has_no_optimizer",
    "test_two_roles_live_in_one_process",
    "test_exported_weights_are_those_that_compute",
}
BESIDE_TORCH = {
    "test_a_portable_state_equals_the_references",
    "test_a_run_resumes_from_the_references_state",
}
"""What takes steps, and compares with those of plain torch."""
PORTABLE_IMPORT = {
    "test_a_run_resumes_from_the_references_state",
    "test_a_run_resumes_from_its_own_portable_state",
}
RIGHT = {"Test_right", "Test_right_together", "Test_right_sgd", "Test_right_muon"}
WRONG = {
    # what is summed, and over what
    "mean_of_microbatches": {
        ROWS,
        "test_the_gradient_does_not_depend_on_microbatches",
        "test_the_gradient_does_not_depend_on_calls",
        "test_gradients_are_clipped_to_their_global_norm",
        *BESIDE_TORCH,
    },
    "mean_of_ranks": {
        "test_the_gradient_does_not_depend_on_ranks",
        "test_ranks_without_work_take_part",
        "test_steps_of_adamw_equal_the_reference",
        "test_gradients_are_clipped_to_their_global_norm",
        *BESIDE_TORCH,
    },
    "forgotten_mask": {
        ROWS,
        "test_the_gradient_equals_the_reference",
        "test_the_gradient_of_given_ids_equals_the_reference",
        "test_the_gradient_of_every_task_equals_the_reference",
        "test_metrics_add_up_to_those_of_the_batch",
        *STEPS,
        *BESIDE_TORCH,
    },
    # outputs
    "off_by_one": LOGPROBS,
    "leaking_neighbours": {
        "test_entropy_equals_the_reference",
        "test_topk_equals_the_reference",
        "test_logprobs_of_given_ids_equal_the_reference",
        "test_values_equal_the_reference",
        *LOGPROBS,
    },
    "temperature_ignored": {
        "test_logprobs_have_the_temperature_of_the_rollouts",
        "test_entropy_equals_the_reference",
        "test_logprobs_of_given_ids_equal_the_reference",
        "test_the_gradient_equals_the_reference",
        "test_the_gradient_of_given_ids_equals_the_reference",
        "test_the_gradient_of_every_task_equals_the_reference",
    },
    "entropy_in_bits": {"test_entropy_equals_the_reference"},
    "values_shifted": {"test_values_equal_the_reference"},
    "topk_backwards": {"test_topk_equals_the_reference"},
    "given_ids_detached": {"test_the_gradient_of_given_ids_equals_the_reference"},
    "any_number_of_ids": {"test_more_ids_than_the_vocabulary_has_are_refused"},
    # steps
    "clips_microbatches": {"test_gradients_are_clipped_to_their_global_norm"},
    "schedule_ahead": {"test_the_schedule_is_that_of_transformers", *BESIDE_TORCH},
    "decays_biases": {"test_steps_of_adamw_equal_the_reference", *BESIDE_TORCH},
    "gradients_kept": {
        "test_a_resumed_run_equals_an_uninterrupted_one",
        "test_a_gradient_that_is_not_finite_changes_nothing",
        *STEPS,
        *BESIDE_TORCH,
        *PORTABLE_IMPORT,
    },
    # with other optimizers
    "sgd_mean_of_microbatches": {
        ROWS,
        "test_the_gradient_does_not_depend_on_microbatches",
        "test_the_gradient_does_not_depend_on_calls",
        "test_gradients_are_clipped_to_their_global_norm",
    },
    "sgd_momentum_lost": {"test_a_resumed_run_equals_an_uninterrupted_one"},
    "sgd_instead_of_muon": {
        "test_the_gradient_equals_the_reference",
        "test_the_gradient_of_given_ids_equals_the_reference",
        "test_the_gradient_of_every_task_equals_the_reference",
        *STEPS,
    },
    "muon_mean_of_microbatches": {
        ROWS,
        "test_the_gradient_does_not_depend_on_microbatches",
        "test_the_gradient_does_not_depend_on_calls",
        "test_gradients_are_clipped_to_their_global_norm",
    },
    "muon_forgotten_mask": {
        ROWS,
        "test_the_gradient_equals_the_reference",
        "test_the_gradient_of_given_ids_equals_the_reference",
        "test_the_gradient_of_every_task_equals_the_reference",
        "test_metrics_add_up_to_those_of_the_batch",
        *STEPS,
    },
    # state
    "stale_export": {
        "test_a_resumed_run_equals_an_uninterrupted_one",
        "test_a_run_resumes_from_its_own_portable_state",
    },
    "optimizer_lost": {"test_a_resumed_run_equals_an_uninterrupted_one"},
    "saves_late": {"test_a_resumed_run_equals_an_uninterrupted_one"},
    "saves_rounded": {"test_saving_changes_nothing"},
    "state_lost_away": {"test_offload_and_onload_change_no_number"},
    "weights_taken_along": {"test_weights_alone_compute_and_are_exported"},
    "memory_kept": {"test_offload_frees_memory"},
    # portable state
    "portable_moments_lost": PORTABLE_IMPORT,
    "portable_step_forgotten": PORTABLE_IMPORT,
    "portable_in_own_units": BESIDE_TORCH,
    "portable_rounded": {
        "test_a_portable_state_equals_the_references",
        "test_a_run_resumes_from_its_own_portable_state",
    },
    "portable_taken_away": {
        "test_a_run_resumes_from_its_own_portable_state",
        "test_exporting_the_state_changes_nothing",
    },
    "portable_of_any_model": {"test_a_portable_state_of_another_model_is_refused"},
    # failure
    "skip_not_reported": {"test_a_gradient_that_is_not_finite_changes_nothing"},
    "steps_on_nan": {"test_a_gradient_that_is_not_finite_changes_nothing"},
    "skips_alone": {"test_a_gradient_that_is_not_finite_changes_nothing"},
    "nameless_nan": {"test_a_loss_that_is_not_finite_is_named"},
    "damage_ignored": {"test_a_damaged_state_is_refused", "test_calls_before_build_raise"},
    # contract and packaging
    "closes_once": {"test_closing_twice_is_fine"},
    "forward_clears": {"test_forward_passes_change_nothing"},
    "scorer_trains": {"test_a_role_that_only_scores_has_no_optimizer"},
    "silent_without_topk": {"test_undeclared_features_are_refused"},
    "declares_too_much": {"test_declared_parallelism_is_tested"},
    "takes_every_task": {"test_undeclared_features_are_refused"},
    "heavy": {"test_listing_it_imports_nothing_heavy"},
}


@pytest.mark.parametrize("name", [*sorted(RIGHT), "TestAcme", "TestAcmeInfer"])
def test_right_strategies_pass(suites, name):
    assert suites.failed(name) == set(), suites.reasons(name)
    assert list(suites.tests[name].values()).count("passed") > 40


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_fails_the_tests_that_are_there_for_it(suites, name):
    assert suites.failed(f"Test_{name}") == WRONG[name], suites.reasons(f"Test_{name}")


def test_every_wrong_strategy_has_its_line(suites):
    titles = {title for title in suites.tests if title.startswith("Test_")}
    assert titles == {f"Test_{name}" for name in WRONG} | RIGHT


def test_skips_follow_what_is_declared(suites):
    for title, test, reason in (
        ("TestAcme", "test_topk_equals_the_reference", "does not declare topk"),
        ("TestAcmeInfer", "test_top_p_keeps_the_smallest_set_that_reaches_it", "refuses top_p"),
    ):
        (found,) = (each for each in suites.tests[title] if each.partition("[")[0] == test)
        assert suites.tests[title][found] == "skipped"
        assert reason in suites.messages[title, found]
    assert suites.tests["Test_right"]["test_topk_equals_the_reference[default]"] == "passed"
