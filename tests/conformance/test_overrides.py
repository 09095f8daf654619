"""What an author may leave out has to be explained."""

from __future__ import annotations

import pytest

from roll_testing import InferStrategyConformance, TrainStrategyConformance
from roll_testing.errors import raises_error


def test_an_override_without_a_reason_is_refused():
    with raises_error(TypeError, "test_topk_equals_the_reference", "xfail(reason"):

        class Mine(TrainStrategyConformance):
            def test_topk_equals_the_reference(self):
                pass


def test_the_kit_for_engines_refuses_it_too():
    with raises_error(TypeError, "test_metrics_are_numbers", "xfail(reason"):

        class Mine(InferStrategyConformance):
            def test_metrics_are_numbers(self):
                pass


@pytest.mark.parametrize("value", [None, 3])
def test_a_test_that_is_taken_away_is_refused(value):
    with raises_error(TypeError, "test_closing_twice_is_fine"):
        type("Mine", (TrainStrategyConformance,), {"test_closing_twice_is_fine": value})


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.skip(reason="it is slow"),
        pytest.mark.xfail,
        pytest.mark.xfail(reason="", strict=True),
        # One that may also pass would let an empty test through.
        pytest.mark.xfail(reason="upstream issue 7"),
    ],
    ids=["skip", "bare", "empty", "lenient"],
)
def test_other_marks_are_no_explanation(mark):
    def test_closing_twice_is_fine(self):
        pass

    with raises_error(TypeError, "overrides"):
        type("Mine", (TrainStrategyConformance,), {"test_closing_twice_is_fine": mark(test_closing_twice_is_fine)})


def test_a_mixin_is_seen_through():
    class Mixin:
        def test_closing_twice_is_fine(self):
            pass

    with raises_error(TypeError, "overrides"):
        type("Mine", (Mixin, TrainStrategyConformance), {})


def test_an_explained_xfail_is_fine_and_other_tests_may_be_added():
    """Neither class is refused, and both have the tests."""

    class Mine(TrainStrategyConformance):
        @pytest.mark.xfail(reason="the engine asserts on it, upstream issue 7", strict=True)
        def test_closing_twice_is_fine(self, case):
            super().test_closing_twice_is_fine(case, 1)

        def test_something_of_its_own(self):
            pass

    class Again(Mine):
        pass

    assert Again.test_something_of_its_own is Mine.test_something_of_its_own
    assert [mark.name for mark in Again.test_closing_twice_is_fine.pytestmark] == ["xfail"]


def test_unsupported_dtype_of_the_platform_is_skipped():
    class Kit(TrainStrategyConformance):
        name = "hf_train"

        def dtypes(self):
            return ("fp32",)

    assert "bf16" in Kit().can.dtypes
    with pytest.raises(pytest.skip.Exception):
        Kit().test_the_moving_average_equals_the_reference(None, world_size=1, low=True)
