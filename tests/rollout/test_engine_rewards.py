"""Samples that an engine judges: what it is asked, with which seeds, and what its replies are worth."""

import asyncio

import numpy as np
import pytest

from roll_core.data.encode import Encoder
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.runtime.rollout.model_rewards import EngineRewardRole
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.spec.rollout import RewardRequest
from roll_core.types import Completion, CompletionOutput, Reward, Sample
from roll_rewards.config import JudgeModelConfig
from roll_rewards.judges import JudgeModelReward

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[judge]{% endif %}"
)


@pytest.fixture
def encoder(tmp_path):
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), (), tmp_path)
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer, DataArguments(), chats=True)


class Engine:
    """Replies to each request with the next texts, and writes down the requests.

    A text with … is cut there: the engine reports `length`.
    """

    def __init__(self, encoder, *texts):
        self.encoder, self.texts, self.requests = encoder, list(texts), []

    async def __call__(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        texts = self.texts.pop(0)
        if isinstance(texts, Exception):
            raise texts
        assert len(texts) == request.n
        return Completion(id=request.id, outputs=tuple(map(self._output, texts)))

    def _output(self, text):
        whole, cut, _ = text.partition("…")
        ids = np.asarray([*self.encoder.encode(whole, ""), *([] if cut else [1])])
        return CompletionOutput(
            token_ids=ids,
            logprobs=np.zeros(len(ids)),
            versions=np.zeros(len(ids), dtype=np.int32),
            finish_reason="length" if cut else "stop",
        )


def request(response, index=0, **row):
    none = np.zeros(0)
    sample = Sample(
        id=f"7/0/{index}", group_id="7/0", prompt_ids=np.array([1]), response_ids=np.array([1]), logprobs=none,
        loss_mask=none, versions=none, finish_reason="stop", metadata=row,
    )  # fmt: skip
    return RewardRequest(sample=sample, prompt="2+2", response=response)


def role_of(engine, *, seed=0, **keys):
    config = JudgeModelConfig(
        **{
            "reward": "judge_model",
            "strategy_args": {"strategy_name": "hf_infer"},
            "judge_prompt": "{prompt}|{response}",
            "weight": 2.0,
        }
        | keys
    )
    function = JudgeModelReward(config)
    return EngineRewardRole(
        "rewards.x", config, engine.encoder, function, owner="roll-rewards", generate=engine, seed=seed
    )


def test_judge_uses_its_template_and_its_reply_is_the_reward(encoder):
    engine = Engine(encoder, ["no, YES"], ["NO"])
    found = asyncio.run(role_of(engine, max_tokens=9).score([request("4"), request("5", 1)]))
    assert found == [
        Reward(value=2.0, detail={"votes": 1.0, "reply": "no, YES"}),
        Reward(value=0.0, detail={"votes": 1.0, "reply": "NO"}),
    ]
    texts = [encoder.tokenizer.decode(each.prompt_ids) for each in engine.requests]
    assert texts == ["[user]2+2|4[judge]", "[user]2+2|5[judge]"]
    assert {(each.params.temperature, each.params.max_new_tokens, each.n) for each in engine.requests} == {(0, 9, 1)}


def test_majority_of_votes_is_the_reward_and_few_scores_fail(encoder):
    engine = Engine(encoder, ["yes", "no", "yes"], ["no", "?", "yes"], ["?", "?", "yes"])
    role = role_of(engine, num_votes=3, temperature=1.0)
    most, tie, few = asyncio.run(role.score([request("4", at) for at in range(3)]))
    assert (most.value, tie.value, few.value) == (2.0, 0.0, None)
    assert "1 of 3" in few.failure
    assert tie.detail["votes"] == 2.0


SCORES = {"judge_scale": "score", "score_range": [0, 10]}


@pytest.mark.parametrize(
    ("keys", "reply", "whole"),
    [
        ({}, "Is it right? The answer says yes, but… NO", 0.0),
        (SCORES, "Score (0-10): 1…0", 1.0),  # a number of which digits are missing
        (SCORES, "Score: 9 by one measure,… but the score: 2", 0.2),
        (SCORES, "The score: 4…", 0.4),
    ],
)
def test_a_reply_that_is_cut_has_no_score(encoder, keys, reply, whole):
    engine = Engine(encoder, [reply], [reply.replace("…", "")])
    cut, complete = asyncio.run(role_of(engine, weight=1.0, **keys).score([request("4", at) for at in range(2)]))
    assert (cut.value, bool(cut.failure)) == (None, True)
    assert complete.value == pytest.approx(whole)


def test_a_vote_that_is_cut_does_not_count(encoder):
    engine = Engine(encoder, ["yes", "no…", "yes"], ["yes", "no…", "no…"])
    role = role_of(engine, num_votes=3, temperature=1.0, weight=1.0)
    most, few = asyncio.run(role.score([request("4", at) for at in range(2)]))
    assert (most.value, most.detail["votes"], few.value) == (1.0, 2.0, None)


def test_seeds_depend_on_the_run_and_the_sample_alone(encoder):
    def seeds(seed, indices):
        engine = Engine(encoder, *[["yes"]] * len(indices))
        asyncio.run(role_of(engine, seed=seed, temperature=1.0).score([request("4", at) for at in indices]))
        assert len({each.id for each in engine.requests}) == len(indices)
        return [each.params.seed for each in engine.requests]

    assert seeds(3, [0, 1]) == seeds(3, [1, 0])[::-1] == [seeds(3, [0, 0])[1], seeds(3, [1])[0]]
    assert len({*seeds(3, [0, 1]), *seeds(4, [0, 1])}) == 4


def test_sample_errors_are_failures_and_others_end_the_batch(encoder):
    engine = Engine(encoder, DataError("too long"), ["yes"])
    found = asyncio.run(role_of(engine).score([request("4"), request("5", 1)]))
    assert [(each.value, "too long" in each.failure) for each in found] == [(None, True), (2.0, False)]
    with pytest.raises(RuntimeError):
        asyncio.run(role_of(Engine(encoder, RuntimeError("gone"))).score([request("4")]))


def test_invalid_samples_are_failures_without_a_request(encoder, monkeypatch):
    engine = Engine(encoder)
    role = role_of(engine, judge_prompt="{response}{ground_truth}", ground_truth="gone")
    assert "gone" in asyncio.run(role.score([request("4")]))[0].failure
    monkeypatch.setattr(JudgeModelReward, "messages", lambda *_: 1 / 0)
    (found,) = asyncio.run(role_of(engine).score([request("4")]))
    assert (found.value, "ZeroDivisionError" in found.failure, engine.requests) == (None, True, [])
