"""The kit for module programs: right strategies pass it, and each mistake fails the tests named here, and no other."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]  # the first of them waits for the suite

AVERAGE = "test_programs_compute_with_the_moving_average"
LOSS = "test_a_loss_may_use_the_moving_average"
RANKS = "test_the_gradient_of_a_program_does_not_depend_on_ranks"
WRONG = {
    "calls_once": {
        "test_a_program_computes_what_the_module_computes",
        "test_programs_compute_without_adapters",
        "test_programs_compute_with_the_moving_average",
    },
    "halves_losses": {"test_the_gradient_of_a_program_equals_plain_torchs", LOSS},
    "mean_of_batches": {"test_the_gradient_of_a_program_does_not_depend_on_batches", LOSS},
    "mean_of_replicas": {RANKS, LOSS},
    "cuts_blocks": {"test_the_gradient_of_a_program_does_not_depend_on_checkpointing"},
    "base_with_adapters": {"test_programs_compute_without_adapters"},
    "average_without_ramp": {AVERAGE, LOSS},
    "average_of_each_step": {AVERAGE},
    "average_stays": {AVERAGE},
    "average_seen_by_autograd": {LOSS, "test_training_by_programs_resumes"},
    "average_lost": {"test_training_by_programs_resumes"},
    "nameless_flow": {"test_a_module_loss_that_is_not_finite_is_named"},
    "exports_base": {"test_a_model_of_a_library_is_exported"},
}


def test_the_right_one_passes(flow_suites):
    assert flow_suites.failed("Test_right_flow") == set(), flow_suites.reasons("Test_right_flow")
    assert list(flow_suites.tests["Test_right_flow"].values()).count("passed") > 15


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_fails_the_tests_that_are_there_for_it(flow_suites, name):
    assert flow_suites.failed(f"Test_{name}") == WRONG[name], flow_suites.reasons(f"Test_{name}")


def test_every_test_of_the_group_has_a_wrong_strategy(flow_suites):
    assert {test.partition("[")[0] for test in flow_suites.tests["Test_right_flow"]} == set().union(*WRONG.values())
