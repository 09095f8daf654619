"""Recorded rollouts: read back exactly, or not at all."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from rollout_fleet import PROMPT, engine, in_virtual_time, plan, prompt

from roll_core.data.rollouts import sample_of_rollout
from roll_core.errors import RecordingError
from roll_core.pipelines.prompt_order import PromptOrder
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.runtime.rollout.recording import BatchFacts, BatchTerms, RecordedBatch, Recorder, Recording, RewardStats
from roll_core.runtime.rollout.scheduler import RolloutScheduler
from roll_core.spec.rollout import Prompt
from roll_core.types import Group, Reward, Rollout, Sample, SamplingParams, TurnRecord
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
        ages=(0, 2),
        left_out=1,
        stale=0,
        surplus=3,
        positions=positions,
        tags=(tag, tag),
        rewards=RewardStats(scored=4, failed=2),
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


def test_a_domain_with_several_tags_is_replayed(tmp_path):
    tags = ("math_rule", "math_llm", "code")
    prompts = [Prompt(id=str(at), tokens=PROMPT + at, text="", tag=tags[at % 3]) for at in range(12)]
    domains = {"math_rule": "math", "math_llm": "math"}
    order = PromptOrder(prompts, size=4, shares={"math": 0.5, "code": 0.5}, seed=1, domains=domains)
    chosen = plan(counts=order.counts, prompt=order.prompt)

    async def main():
        queue = RequestQueue([engine("0")])
        scheduler = RolloutScheduler(chosen, queue, None, seed=1)
        groups, facts = await scheduler.batch(0)
        await scheduler.close()
        recorder = Recorder(tmp_path)
        recorder.begin()
        written = RecordedBatch(groups=groups, facts=facts, weight_version=0)
        recorder.write(1, BatchTerms.of(chosen), written)
        assert {sample.tag for group in groups for sample in group.samples} & domains.keys()
        assert_same(Recording(tmp_path).batch(1, chosen), written)

    in_virtual_time(main)


def test_a_step_without_a_group_is_one(tmp_path):
    facts = BatchFacts(ages=(), left_out=9, stale=0, surplus=0, positions=(), tags=(), rewards=RewardStats())
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


@pytest.mark.parametrize("head", ["", "nonsense\n", "[]\n", "{}\n", '{"schema": 3}\n'])
def test_a_file_that_is_no_recording_is_named(tmp_path, head):
    recording = record(tmp_path, 1)
    recording.steps[1].write_text(head, encoding="utf-8")
    with raises_error(RecordingError, "step-1", "jsonl"):
        recording.batch(1, plan_of())


def multi_turn_batch():
    """A group of two episodes: a chain with everything that a turn may have, and an episode without a turn."""
    found = prompt("a", 0)
    first = TurnRecord(
        context_ids=np.array([4, 5, 6]),
        sampled_ids=np.array([7, 1 << 40]),
        logprobs=np.array([-0.5, -1e-30], np.float32),
        versions=np.array([2, 3], np.int32),
        loss_mask=np.array([True, False]),
        finish_reason="stop",
        metrics={"dtype": 1.0, "shape": 2.0, "data": 3.0},
    )
    second = replace(
        first,
        parent=0,
        context_ids=np.array([8]),
        observation_mask=np.array([True]),
        routed_experts=np.arange(12, dtype=np.uint16).reshape(3, 2, 2),
        reward=-0.0,
        state="näh",
        finish_reason="length",
    )
    rollouts = (Rollout(turns=(first, second)), Rollout(turns=()))
    samples = [
        sample_of_rollout(
            each,
            id=f"a0/{index}/x",
            group_id=found.id,
            tag="a",
            finish_reason="stop",
            player="x",
            metadata=found.metadata,
            reward=REWARDS[index],
        )
        for index, each in enumerate(rollouts)
    ]
    group = Group(id=found.id, samples=tuple(samples), baseline=samples[0].with_reward(REWARDS[1]))
    facts = BatchFacts(ages=(0,), left_out=0, stale=0, surplus=0, positions=(0,), tags=("a",), rewards=RewardStats())
    return RecordedBatch(groups=[group], facts=facts, weight_version=3)


def plain(value):
    """Everything that a value consists of, with the types of its numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value), [plain(getattr(value, each.name)) for each in fields(value)]
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return repr(dict(value) if isinstance(value, Mapping) else value)


def test_a_multi_turn_group_is_read_as_it_was_written(tmp_path):
    (expected,) = multi_turn_batch().groups
    plan = plan_of("a", counts={"a": 2})
    (found,) = record(tmp_path, 1, recorded=multi_turn_batch()).batch(1, plan).groups
    assert plain(found) == plain(expected)
    assert all(turn.logprobs.flags.writeable for turn in found.samples[0].rollout.turns)


DAMAGE = {
    "nothing": lambda value: None,
    "a number": lambda value: 7,
    "text": lambda value: "AAAA",
    "a list": lambda value: [1, 2],
    "an unknown dtype": lambda value: ["<i9", *value[1:]],
    "objects": lambda value: ["|O", *value[1:]],
    "another shape": lambda value: [value[0], [1000], value[2]],
    "no base64": lambda value: [*value[:2], "A"],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    ("made", "path"),
    [
        (batch, ("prompt_ids",)),
        (batch, ("samples", 0, "response_ids")),
        (batch, ("samples", 2, "versions")),
        (multi_turn_batch, ("samples", 0, "rollout", "turns", 1, "logprobs")),
        (multi_turn_batch, ("baseline", "rollout", "turns", 0, "context_ids")),
    ],
)
def test_invalid_array_is_an_error_of_its_file(tmp_path, damage, made, path):
    recording = record(tmp_path, 1, recorded=made())
    head, first, *others = recording.steps[1].read_text(encoding="utf-8").splitlines()
    line = inner = json.loads(first)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = DAMAGE[damage](inner[path[-1]])
    body = "".join(f"{each}\n" for each in (json.dumps(line), *others))
    digest = hashlib.sha256(body.encode()).hexdigest()
    recording.steps[1].write_text(f"{json.dumps(json.loads(head) | {'sha256': digest})}\n{body}", encoding="utf-8")
    with raises_error(RecordingError, "step-1.jsonl"):
        recording.batch(1, plan_of() if made is batch else plan_of("a", counts={"a": 2}))


def test_another_schema_is_refused(tmp_path):
    recording = record(tmp_path, 1)
    path = recording.steps[1]
    head, _, rest = path.read_text(encoding="utf-8").partition("\n")
    path.write_text(json.dumps(json.loads(head) | {"schema": 2}) + "\n" + rest, encoding="utf-8")
    with raises_error(RecordingError, "schema 2", "roll-core", "3"):
        recording.batch(1, plan_of())


def test_missing_recordings_and_steps_are_named(tmp_path):
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


def test_resumed_run_keeps_earlier_recordings(tmp_path):
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
