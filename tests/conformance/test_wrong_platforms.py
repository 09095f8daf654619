"""The kit for platforms finds what it is there to find: each mistake fails the tests named here, and no other."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow(ci=True)

WRONG = {
    "other_name": {"test_the_class_has_the_name_of_the_record"},
    "fickle": {"test_probing_twice_returns_the_same"},
    "silent": {"test_the_probe_states_a_reason"},
    "found_nothing": {"test_what_is_found_has_slots"},
    "sets_variables": {"test_queries_change_nothing"},
    "starts_threads": {"test_queries_change_nothing"},
    "keeps_devices_open": {"test_queries_leave_no_device_open"},
    "other_type": {
        "test_each_slot_has_its_device",
        "test_it_computes_in_what_it_supports",
        "test_memory_is_counted_in_bytes",
    },
    "one_for_all": {"test_each_slot_has_its_device", "test_memory_counts_allocations"},
    "numbers_as_values": {"test_variables_are_text_with_a_reason"},
    "without_reason": {"test_variables_are_text_with_a_reason"},
    "deals_out_ranks": {"test_variables_of_the_runtime_are_left_to_it"},
    "of_the_moment": {"test_variables_do_not_depend_on_the_moment"},
    "takes_every_dtype": {"test_an_unknown_dtype_is_refused_with_the_way_out"},
    "uses_more_than_there_is": {"test_memory_is_counted_in_bytes"},
    "unnamed": {"test_its_names_can_be_used"},
    "unmeasured": set(),
}


def test_the_right_one_passes(platform_suites):
    assert platform_suites.failed("Test_right_platform") == set(), platform_suites.reasons("Test_right_platform")
    assert list(platform_suites.tests["Test_right_platform"].values()).count("passed") > 20


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_fails_the_tests_that_are_there_for_it(platform_suites, name):
    assert platform_suites.failed(f"Test_{name}") == WRONG[name], platform_suites.reasons(f"Test_{name}")


def test_every_wrong_platform_has_its_line(platform_suites):
    assert set(platform_suites.tests) == {"Test_right_platform", *(f"Test_{name}" for name in WRONG)}
