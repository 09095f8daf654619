"""Groups in checkpoints: exactly what they were."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from roll_core.runtime.rollout.recording import group_from, outputs_from, saved_group, saved_outputs
from roll_core.spec.rollout import Prompt
from roll_core.types import CompletionOutput, Group, Reward, Sample

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
