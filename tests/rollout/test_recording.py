"""Recorded rollouts: read back exactly, or not at all."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rollout_fleet import PROMPT, plan, prompt

from roll_core.errors import RecordingError
from roll_core.runtime.rollout.recording import BatchFacts, BatchTerms, RecordedBatch, Recorder, Recording, RewardStats
from roll_core.types import Group, Reward, Sample, SamplingParams
from roll_testing.errors import raises_error

REWARDS = (
    Reward(value=0.1 + 0.2, detail={"why": "näh “\ud800”", "format": 1.0}),
    Reward(value=None, failure="hung"),
    None,
)


def sample(prompt, index, length):
    rng = np.random.default_rng(index)
    mask = rng.random(length) < 0.7
    return Sample(
        id=f"{prompt.id}/{index}",
        group_id=prompt.id,
        prompt_ids=prompt.tokens,
        response_ids=rng.integers(0, 1 << 40, length),
        logprobs=-rng.random(length, dtype=np.float32),
        loss_mask=mask,
        versions=np.where(mask, 3, -1).astype(np.int32),
        finish_reason="length" if index else "stop",
        tag=prompt.tag,
        reward=REWARDS[index],
        metadata=prompt.metadata,
    )


def batch(tag="ä b", positions=(4, 2)):
    prompts = [prompt(tag, position) for position in positions]
    groups = [
        Group(id=each.id, samples=tuple(sample(each, index, length) for index, length in enumerate((5, 0, 1))))
        for each in prompts
    ]
    facts = BatchFacts(
        ages=(0, 2), left_out=1, stale=0, surplus=3, positions=positions, rewards=RewardStats(scored=4, failed=2)
    )
    return RecordedBatch(groups=groups, facts=facts, weight_version=3)


def plan_of(tag="ä b", **given):
    return plan(**({"counts": {tag: 2}, "n": 3} | given))


def record(folder, *steps, recorded=None):
    recorder = Recorder(folder)
    recorder.begin()
    for step in steps:
        recorder.write(step, BatchTerms.of(plan_of()), recorded or batch())
    return Recording(folder)


def assert_same(one, other):
    assert one.facts == other.facts
    assert one.weight_version == other.weight_version
    assert len(one.groups) == len(other.groups)
    for left, right in zip(one.groups, other.groups, strict=True):
        assert left.id == right.id
        for mine, theirs in zip(left.samples, right.samples, strict=True):
            for name in Sample.__slots__:
                a, b = getattr(mine, name), getattr(theirs, name)
                if isinstance(a, np.ndarray):
                    assert a.dtype == b.dtype, name
                    assert a.tobytes() == b.tobytes(), name
                else:
                    assert a == b, name


def test_a_batch_is_read_as_it_was_written(tmp_path):
    recording = record(tmp_path, 7, 8)
    assert list(recording.steps) == [7, 8]
    assert_same(recording.batch(8, plan_of()), batch())


def test_a_step_without_a_group_is_one(tmp_path):
    facts = BatchFacts(ages=(), left_out=9, stale=0, surplus=0, positions=(), rewards=RewardStats())
    empty = RecordedBatch(groups=[], facts=facts, weight_version=0)
    assert_same(record(tmp_path, 1, recorded=empty).batch(1, plan_of()), empty)


def test_a_changed_byte_is_found(tmp_path):
    recording = record(tmp_path, 1)
    path = recording.steps[1]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(lines[0] + lines[2] + lines[1], encoding="utf-8")
    with raises_error(RecordingError, "step-1", "jsonl"):
        recording.batch(1, plan_of())
    path.write_text("".join(lines)[:-9], encoding="utf-8")
    with raises_error(RecordingError, "step-1.jsonl"):
        recording.batch(1, plan_of())


@pytest.mark.parametrize("head", ["", "nonsense\n", "[]\n", "{}\n", '{"schema": 2}\n'])
def test_a_file_that_is_no_recording_is_named(tmp_path, head):
    recording = record(tmp_path, 1)
    recording.steps[1].write_text(head, encoding="utf-8")
    with raises_error(RecordingError, "step-1", "jsonl"):
        recording.batch(1, plan_of())


def test_another_schema_is_refused(tmp_path):
    recording = record(tmp_path, 1)
    path = recording.steps[1]
    head, _, rest = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(json.dumps(json.loads(head) | {"schema": 3}) + "\n" + rest, encoding="utf-8")
    with raises_error(RecordingError, "schema 3", "roll-core", "2"):
        recording.batch(1, plan_of())


def test_what_is_missing_is_said(tmp_path):
    with raises_error(RecordingError, tmp_path, "record_rollouts"):
        Recording(tmp_path)
    recording = record(tmp_path, 1, 2, 4)
    with raises_error(RecordingError, "1", "2", "4", "step 3"):
        recording.check(BatchTerms.of(plan_of()), range(1, 5))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"n": 4}, ("num_return_sequences_in_group", "3", "4")),
        ({"counts": {"ä b": 1}}, ("rollout_batch_size", "2", "1")),
        ({"params": SamplingParams(temperature=0.5)}, ("1", "0.5")),
    ],
)
def test_other_terms_are_refused(tmp_path, given, facts):
    with raises_error(RecordingError, *facts):
        record(tmp_path, 1).batch(1, plan_of(**given))


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        (lambda found: replace(found, id="other"), ("b4",)),
        (lambda found: replace(found, tokens=PROMPT[:-1]), ("b4",)),
    ],
)
def test_prompts_of_other_data_are_refused(tmp_path, changed, facts):
    with raises_error(RecordingError, *facts):
        record(tmp_path, 1).batch(1, plan_of(prompt=lambda tag, position: changed(prompt(tag, position))))


def test_a_resumed_run_takes_over_what_was_recorded_before(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    record(first, 1, 2, 3)
    recorder = Recorder(second, history=first, resumed_step=2)
    recorder.begin()
    recorder.write(3, BatchTerms.of(plan_of()), replace(batch(), weight_version=9))
    recording = Recording(second)
    assert list(recording.steps) == [1, 2, 3]
    assert_same(recording.batch(2, plan_of()), batch())
    assert recording.batch(3, plan_of()).weight_version == 9
    assert Recording(first).batch(3, plan_of()).weight_version == 3
