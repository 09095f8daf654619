import ast
import inspect
import logging
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from roll_core.errors import GuardTrippedError, MissingTensorError, UnsupportedError
from roll_core.runtime.records.guards import REMEDIES, GuardEvent, Guards
from roll_core.spec.config import GuardConfig, GuardsConfig, RunConfig
from roll_testing.errors import mentions, raises_error

DOCS = Path(__file__).parents[2] / "docs" / "guards.md"
ACTIONS = {name: getattr(GuardsConfig(), name).action for name in GuardsConfig.model_fields}


def guards(**config: object) -> Guards:
    return Guards(GuardsConfig.model_validate(config))


def test_passed_check_trips_no_guard() -> None:
    events: list[GuardEvent] = []
    watch = Guards(GuardsConfig(), events.append)
    for name in ACTIONS:
        watch.check(name, True, "all is well")
    assert not events


@pytest.mark.parametrize("name", [name for name, action in ACTIONS.items() if action == "error"])
def test_guard_ends_the_run_with_its_id_and_a_remedy(name: str) -> None:
    with raises_error(GuardTrippedError, "guard", name, "step 3", "(docs/guards.md#") as caught:
        guards().check(name, False, "seen at step 3")
    assert caught.value.guard == name
    assert REMEDIES[name] in str(caught.value)


def test_warning_guard_continues_and_rarely_repeats(caplog: pytest.LogCaptureFixture) -> None:
    events: list[GuardEvent] = []
    watch = Guards(GuardsConfig(non_finite=GuardConfig(action="warn")), events.append)
    with caplog.at_level(logging.INFO):
        for step in range(25):
            watch.step = step
            watch.check("non_finite", False, f"loss is NaN at {step}")
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert "loss is NaN at 0" in warned[0]
    assert mentions(warned[1], "non_finite", 10, 9)
    assert [(event.guard, event.step) for event in events] == [("non_finite", step) for step in range(25)]


def test_warning_guard_names_steps_and_warns_once_per_stretch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events: list[GuardEvent] = []
    watch = guards(all_groups_filtered="warn")
    watch = Guards(watch.config, events.append)
    for step in (0, 3, 4, 4, 5, 9):
        watch.step = step
        watch.check("all_groups_filtered", False, "no reward signal at {steps}: why {not}")
    assert [(event.since, event.step) for event in events] == [(0, 0), (3, 3), (3, 4), (3, 4), (3, 5), (9, 9)]
    assert mentions(events[-2].message, "steps 4–6", "{not}")
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [re.findall(r"at (steps? [\d–]+):", each) for each in warned] == [["step 1"], ["step 4"], ["step 10"]]


def test_a_guard_that_is_off_sees_nothing() -> None:
    events: list[GuardEvent] = []
    watch = Guards(GuardsConfig.model_validate({"zero_steps": False}), events.append)
    watch.check("zero_steps", False, "nothing to do")
    assert not watch.active("zero_steps")
    assert watch.active("non_finite")
    assert events == []


def test_an_error_that_a_guard_watches_for_is_raised_as_it_is() -> None:
    error = MissingTensorError("actor_infer rank 0 lacks lm_head.weight")
    with pytest.raises(MissingTensorError) as caught:
        guards().failed("weight_manifest", error)
    assert caught.value is error
    guards(weight_manifest="warn").failed("weight_manifest", error)


@pytest.mark.parametrize(
    ("value", "trips"), [(0.0, False), (0.05, False), (0.051, True), (math.nan, True), (math.inf, True)]
)
def test_threshold_accepts_only_numbers(value: float, trips: bool) -> None:
    events: list[GuardEvent] = []
    watch = Guards(GuardsConfig.model_validate({"logprob_gap": "warn"}), events.append)
    watch.check_at_most("logprob_gap", value, watch.config.logprob_gap.bound("dtype"), "mean |Δ logprob|")
    assert [event.guard for event in events] == ["logprob_gap"] * trips


def test_a_guard_that_does_not_exist_is_named_with_those_that_do() -> None:
    with raises_error(UnsupportedError, "'non_finit'", "weights_unchanged"):
        guards().check("non_finit", True, "")


def test_the_event_is_recorded_before_the_run_ends() -> None:
    events: list[GuardEvent] = []
    with pytest.raises(GuardTrippedError):
        Guards(GuardsConfig(), events.append).check("dead_worker", False, "gone")
    assert [(event.guard, event.action, event.message) for event in events] == [("dead_worker", "error", "gone")]


def test_the_config_takes_a_word_or_details() -> None:
    config = RunConfig.model_validate(
        {"pipeline": "sft", "guards": {"zero_steps": "off", "logprob_probe": {"every": 3}, "logprob_gap": False}}
    ).guards
    assert (config.zero_steps.action, config.logprob_probe.every, config.logprob_gap.action) == ("off", 3, "off")
    assert config.logprob_probe.action == "error"
    assert RunConfig.model_validate(RunConfig(pipeline="sft", guards=config).model_dump()).guards == config


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"zero_step": "warn"}, ("guards", "zero_step")),
        ({"zero_steps": "wran"}, ("guards", "zero_steps", "action")),
        ({"zero_steps": {"threshold": 1}}, ("guards", "zero_steps", "threshold")),
        ({"reward_failures": {"threshold": 1.5}}, ("guards", "reward_failures", "threshold")),
        ({"logprob_gap": True}, ("guards", "logprob_gap")),
    ],
)
def test_mistakes_in_the_config_are_located(config: object, where: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"pipeline": "sft", "guards": config})
    assert [error["loc"] for error in caught.value.errors()] == [where]


def test_a_pipeline_of_a_plugin_may_have_guards_of_its_own() -> None:
    class FlowGuards(GuardsConfig):
        black_images: GuardConfig = GuardConfig()
        """A step's images are all black."""

    with raises_error(GuardTrippedError, "black_images", "8"):
        Guards(FlowGuards()).check("black_images", False, "8 of 8")


def test_every_guard_has_a_remedy_and_a_section_in_the_docs() -> None:
    assert set(REMEDIES) == set(ACTIONS)
    (schema,) = ast.parse(inspect.getsource(GuardsConfig)).body
    meanings = {
        ast.unparse(field.target): ast.literal_eval(below.value)
        for field, below in pairwise(schema.body[1:])
        if isinstance(field, ast.AnnAssign)
    }
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.MULTILINE)[1:]
    documented = {section.partition("\n")[0].strip("` "): section for section in sections}
    assert set(documented) == set(ACTIONS)
    for name, action in ACTIONS.items():
        meaning = " ".join(meanings[name].split())
        assert meaning in " ".join(documented[name].split()), name
        assert f"Default: `{action}`" in documented[name]
        guard = getattr(GuardsConfig(), name)
        for option in set(type(guard).model_fields) - {"action"}:
            value = getattr(guard, option)
            if value is None:
                said = f"{guard.bound('dtype'):g}; {guard.bound('fp8'):g} for an engine in"
            else:
                said = f"{value:g})"
            assert f"`{option}` ({said}" in documented[name], (name, option)
