"""Groups in checkpoints: exactly what they were."""

import json
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from roll_core.data.media import image_media
from roll_core.data.pack import sample_of
from roll_core.data.rollouts import sample_of_rollout
from roll_core.runtime.records.media_folder import MediaFolder
from roll_core.runtime.rollout.recording import group_from, outputs_from, saved_group, saved_outputs
from roll_core.spec.rollout import Prompt
from roll_core.types import CompletionOutput, Group, Reward, Rollout, Sample, TurnRecord

PROMPT = Prompt(id="7/1", tokens=np.array([1, 2]), text="?", tag="maß", metadata={"answer": object()})
REWARDS = st.one_of(
    st.none(),
    st.builds(Reward, value=st.floats(allow_nan=False, allow_infinity=False), detail=st.just({"x": 1.0, "y": "ü"})),
    st.just(Reward(value=None, failure="died")),
)


@given(
    hnp.arrays(np.float32, st.integers(0, 20), elements=st.floats(-50, 0, width=32)),
    REWARDS,
    st.sampled_from(["stop", "length", "abort"]),
    st.one_of(st.none(), hnp.arrays(st.sampled_from([np.uint8, np.uint16]), st.tuples(*[st.integers(0, 3)] * 3))),
)
def test_a_group_survives_json_bit_for_bit(logprobs, reward, finish, experts):
    num = len(logprobs)
    sample = Sample(
        id="7/1/0",
        group_id="7/1",
        prompt_ids=PROMPT.tokens,
        response_ids=np.arange(num) * 100_003,
        logprobs=logprobs,
        loss_mask=np.arange(num) % 2 == 0,
        versions=np.arange(num, dtype=np.int32),
        finish_reason=finish,
        tag=PROMPT.tag,
        reward=reward,
        routed_experts=experts,
        metadata=PROMPT.metadata,
    )
    group = group_from(json.loads(json.dumps(saved_group(Group(id="7/1", samples=(sample, sample))))), PROMPT)
    assert group.id == "7/1"
    for other in group.samples:
        for name in ("response_ids", "logprobs", "loss_mask", "versions"):
            ours, theirs = getattr(sample, name), getattr(other, name)
            assert ours.dtype == theirs.dtype
            assert ours.tobytes() == theirs.tobytes()
        assert (other.id, other.tag, other.reward, other.finish_reason) == ("7/1/0", "maß", reward, finish)
        assert other.metadata is PROMPT.metadata
        if experts is None:
            assert other.routed_experts is None
        else:
            assert (other.routed_experts.dtype, other.routed_experts.shape) == (experts.dtype, experts.shape)
            assert np.array_equal(other.routed_experts, experts)


def turn(number, *media):
    return TurnRecord(
        parent=number - 1 if number else None,
        context_ids=np.array([1, 2]) + number,
        media=media,
        sampled_ids=np.array([3]),
        logprobs=np.array([-0.5], dtype=np.float32),
        loss_mask=np.array([True]),
        versions=np.array([1], dtype=np.int32),
        finish_reason="stop",
    )


def test_images_of_turns_are_saved_as_files(tmp_path):
    one, other = (image_media(Image.new("RGB", (2, 2), colour)) for colour in ("red", "blue"))
    rollout = Rollout(turns=(turn(0, one, other), turn(1), turn(2, one)))
    sample = sample_of_rollout(rollout, id="7/1/0", group_id="7/1", finish_reason="stop")
    assert sample.media == (one, other, one)
    text = json.dumps(saved_group(Group(id="7/1", samples=(sample,)), MediaFolder(tmp_path)))
    assert len(list((tmp_path / "media").iterdir())) == 2
    (restored,) = group_from(json.loads(text), PROMPT, MediaFolder(tmp_path)).samples
    assert [image.read() for image in restored.media] == [one.data, other.data, one.data]
    assert [len(record.media) for record in restored.rollout.turns] == [2, 0, 1]


def test_images_of_prompts_are_those_of_the_rows():
    image = image_media(Image.new("RGB", (2, 2)))
    prompt = replace(PROMPT, media=(image,))
    output = CompletionOutput(
        token_ids=np.array([5]), logprobs=np.zeros(1, np.float32), versions=np.ones(1, np.int32), finish_reason="stop"
    )
    sample = sample_of(output, id="7/1/0", group_id="7/1", prompt_ids=prompt.tokens, media=prompt.media)
    text = json.dumps(saved_group(Group(id="7/1", samples=(sample,))))
    assert image.digest not in text
    assert group_from(json.loads(text), prompt).samples[0].media == (image,)


def test_partial_and_unstarted_outputs_survive_saving():
    drawn = CompletionOutput(
        token_ids=np.array([5, 6]),
        logprobs=np.array([-0.1, -0.2], dtype=np.float32),
        versions=np.array([1, 2], dtype=np.int32),
        finish_reason="stop",
        stop="END",
        routed_experts=np.array([[[300, 2]]], dtype=np.uint16),
    )
    found = outputs_from(json.loads(json.dumps(saved_outputs([drawn, None]))))
    assert found[1] is None
    assert found[0].routed_experts.tolist() == [[[300, 2]]]
    assert found[0].logprobs.tobytes() == drawn.logprobs.tobytes()
    assert (found[0].token_ids.tolist(), found[0].versions.tolist()) == ([5, 6], [1, 2])
    assert (found[0].finish_reason, found[0].stop) == ("stop", "END")
