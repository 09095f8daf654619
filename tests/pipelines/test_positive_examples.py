"""Which tokens the likelihood of positive responses trains."""

import numpy as np

from roll_core.pipelines.experience import Experience
from roll_core.types import Group, Reward, Sample


def sample(name, reward, mask):
    n = len(mask)
    return Sample(
        id=name,
        group_id="g",
        prompt_ids=np.array([1, 2]),
        response_ids=np.arange(n),
        logprobs=np.zeros(n, np.float32),
        loss_mask=np.array(mask, bool),
        versions=np.zeros(n, np.int32),
        finish_reason="stop",
        reward=Reward(value=reward),
    )


def test_loss_tokens_of_responses_over_threshold_are_positive():
    group = Group(id="g", samples=(sample("a", 1.0, [1, 0, 1]), sample("b", 0.5, [1, 1]), sample("c", 0.6, [1])))
    experience = Experience.of([group]).with_positives(0.5)
    assert [row.streams["positive"].tolist() for row in experience.sequences] == [[0, 0, 1, 0, 1], [0] * 4, [0, 0, 1]]
