"""The kit for executors finds what it is there to find: each mistake fails the tests named here, and no other."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(960)]  # the first of them waits for the suite

ORDERED, ARGUMENTS = "test_results_are_ordered_by_rank", "test_workers_get_their_arguments"
CAUSE, CLOSING = "test_the_cause_is_raised_before_its_consequences", "test_closing_closes_every_worker_once"
START, EXIT = "test_a_failed_start_leaves_no_worker", "test_an_exit_ends_the_run"
SURVIVED = "test_a_survived_exit_can_be_replaced"
WRONG = {
    "reverses_ranks": {ORDERED, ARGUMENTS, CAUSE},
    "forgets_arguments": {ARGUMENTS},
    "forgets_variables": {ARGUMENTS},
    "names_other_processes": {"test_members_name_their_processes"},
    "changes_threads": {"test_sync_methods_run_in_order_on_one_thread"},
    "one_at_a_time": {"test_async_methods_overlap"},
    "widens_arrays": {"test_arrays_arrive_unchanged"},
    "plain_errors": {"test_an_error_of_roll_keeps_its_class"},
    "without_traces": {"test_any_other_error_is_located"},
    "hides_echoes": {CAUSE},
    "ignores_unknown_methods": {"test_an_unknown_method_is_an_error"},
    "keeps_cancelled_calls": {"test_a_missed_deadline_cancels_the_call"},
    "never_closes": {CLOSING, START},
    "closes_once": {CLOSING, START},
    "leaves_workers": {START},
    "leaves_processes": {CLOSING, START},
    "hides_no_devices": {"test_workers_see_only_their_own_device"},
    "deaf_watch": {EXIT},
    "forgets_the_rank": {EXIT},
    "silent_exits": {EXIT, SURVIVED},
    "loses_another": {SURVIVED},
}
RIGHT = {"right_here", "right_processes"}


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_a_right_one_passes(executor_suites, name):
    assert executor_suites.failed(f"Test_{name}") == set(), executor_suites.reasons(f"Test_{name}")
    assert list(executor_suites.tests[f"Test_{name}"].values()).count("passed") > 15


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_fails_the_tests_that_are_there_for_it(executor_suites, name):
    assert executor_suites.failed(f"Test_{name}") == WRONG[name], executor_suites.reasons(f"Test_{name}")


def test_every_wrong_executor_has_its_line(executor_suites):
    assert set(executor_suites.tests) == {f"Test_{name}" for name in RIGHT | set(WRONG)}
