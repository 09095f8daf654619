"""Rollouts and judging: order, seeds, and the three states of a reward."""

import asyncio
import json
import sys
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest

from roll_core.errors import DataError, RewardFailure
from roll_core.runtime.cluster.executors.base import Peers
from roll_core.runtime.cluster.placement import Place
from roll_core.runtime.rollout.program import GroupTerms, SingleTurn, group_of, run_groups
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.runtime.rollout.scoring import RewardRouter
from roll_core.runtime.run.active_run import late_length_ratio
from roll_core.runtime.workers.reward import RewardWorker
from roll_core.spec.config import RewardConfig
from roll_core.spec.providers import RewardProvider
from roll_core.spec.rollout import Prompt, RewardFunction, RewardRequest
from roll_core.types import Completion, CompletionOutput, Group, Reward, Sample, SamplingParams
from roll_testing.errors import raises_error


class Letters:
    """A tokenizer of single letters."""

    added_tokens_decoder: ClassVar = {}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(97 + i) for i in ids)


class EchoQueue:
    """Completes with the last prompt token and the output's index; finishes in the reverse order."""

    def __init__(self):
        self.requests = []

    def submit(self, request, sampled=None, **others):
        if not self.requests:
            asyncio.get_running_loop().call_later(0.01, self.complete)
        outputs = tuple(
            CompletionOutput(
                token_ids=np.array([int(request.prompt_ids[-1]), i]),
                logprobs=np.zeros(2, dtype=np.float32),
                versions=np.zeros(2, dtype=np.int32),
                finish_reason="length",
            )
            for i in range(request.n)
        )
        pending = SimpleNamespace(done=asyncio.get_running_loop().create_future())
        self.requests.append(request)
        self.ends = [(pending, Completion(id=request.id, outputs=outputs)), *getattr(self, "ends", [])]
        return pending

    def complete(self):
        for pending, completion in self.ends:
            pending.done.set_result(completion)

    def cancel(self, pending):
        assert all(each.done.done() for each in pending)


class LengthJudge:
    """One point for each letter of the answer before the last."""

    async def score(self, requests):
        await asyncio.sleep(0)
        return [Reward(value=float(ord(request.response[-1]) - 97)) for request in requests]


def prompts(count: int, tags: tuple[str, ...] = ("",)) -> list[Prompt]:
    return [Prompt(id=f"{i}/0", tokens=np.array([3, i]), text="?", tag=tags[i % len(tags)]) for i in range(count)]


def run(found, router=None, **given):
    """The groups, and the requests for them."""
    terms = GroupTerms(**({"params": SamplingParams(), "n": 2, "seed_of": (1, "train", 0)} | given))
    scorer = None if router is None else partial(router.score, tokenizer=Letters())
    queue = EchoQueue()
    return asyncio.run(run_groups(queue, found, terms, scorer)), queue.requests


def seeds(found, **given):
    return [request.params.seed for request in run(found, **given)[1]]


def test_groups_are_in_prompt_order_and_samples_in_index_order():
    groups, _ = run(prompts(4), RewardRouter({"only": LengthJudge()}, {}))
    assert [group.id for group in groups] == ["0/0", "1/0", "2/0", "3/0"]
    assert [[sample.id for sample in group.samples] for group in groups[:1]] == [["0/0/0", "0/0/1"]]
    assert [[sample.reward.value for sample in group.samples] for group in groups] == [[0.0, 1.0]] * 4
    assert all(sample.loss_mask.all() for group in groups for sample in group.samples)


def test_seeds_depend_on_run_step_and_prompt_only():
    first = seeds(prompts(3))
    assert len(set(first)) == 3
    assert seeds(prompts(3)[::-1]) == first[::-1]
    assert not set(first) & set(seeds(prompts(3), seed_of=(1, "train", 1)))


def test_fixed_seed_samples_differently_per_prompt():
    first = seeds(prompts(3), params=SamplingParams(seed=0), seed_of=(1,))
    assert len(set(first)) == 3
    assert seeds(prompts(3), params=SamplingParams(seed=0), seed_of=(2,)) == first


def test_stable_seed_is_the_same_on_every_machine():
    assert stable_seed(1, "train", 0, "5/0") == stable_seed(1, "train", 0, "5/0")
    assert 0 <= stable_seed("x") < 2**63
    assert stable_seed(1, 11) != stable_seed(11, 1)


def test_tag_selects_its_judge_and_unknown_tag_lists_known_ones():
    router = RewardRouter({"math": "m", "code": "c"}, {"code": ["python"]})
    assert router.role_of("math") == "m"
    assert router.role_of("python") == "c"
    with raises_error(DataError, "'poetry'"):
        router.role_of("poetry")
    assert RewardRouter({"only": "o"}, {}).role_of("anything") == "o"


def test_a_program_gets_its_baseline_back_with_a_reward():
    class OneMore(SingleTurn):
        async def run(self, context, prompt):
            samples = group_of(prompt, await context.generate(prompt.tokens, n=context.n + 1)).samples
            return await context.score(Group(id=prompt.id, samples=samples[:-1], baseline=samples[-1]))

    router = RewardRouter({"only": LengthJudge()}, {})
    scorer, terms = partial(router.score, tokenizer=Letters()), GroupTerms(params=SamplingParams(), n=2, seed_of=None)
    (group,) = asyncio.run(run_groups(EchoQueue(), prompts(1), terms, scorer, OneMore))
    assert [sample.reward.value for sample in group.samples] == [0.0, 1.0]
    assert (group.baseline.id, group.baseline.reward.value) == ("0/0/2", 2.0)


RETURNED = {
    "nothing": None,
    "a number": 1.0,
    "no reason": Reward(value=None),
    "no number": Reward(value="high"),
    "a part that is nothing": Reward(value=1.0, detail={"format": None}),
    "a part that is NaN": Reward(value=1.0, detail={"format": np.float32("nan")}),
    "numpy": Reward(value=np.float32(0.5), detail={"format": np.float64(1), "right": np.True_, "why": "ünï"}),
}
"""What `Moody` returns for a text."""


class Moody(RewardFunction):
    """Answers, fails, raises, exits or says nonsense, as the sample's text says."""

    def score(self, request: RewardRequest) -> Reward:
        if request.response == "failure":
            raise RewardFailure("the sandbox died")
        if request.response == "bug":
            raise KeyError("oops")
        if request.response == "exit":
            sys.exit(0)
        if request.response in RETURNED:
            return RETURNED[request.response]
        return Reward(value=float(request.response))


def judge(*answers: str, weight: float = 1.0) -> list[Reward]:
    provider = RewardProvider(name="moody", target=f"{__name__}:Moody", summary="")  # keys that all rewards have
    config = RewardConfig(reward="moody", weight=weight)
    with mock.patch("roll_core.runtime.workers.reward.load_target", side_effect=[Moody]):
        worker = RewardWorker(
            place=Place(rank=0, world_size=1),
            peers=Peers(),
            role="rewards.moody",
            provider=provider,
            owner="reward 'moody' of roll-moody 1",
            config=config.model_dump(),
        )
    sample = Sample(
        id="0",
        group_id="0",
        prompt_ids=np.array([1]),
        response_ids=np.array([1]),
        logprobs=np.zeros(1, dtype=np.float32),
        loss_mask=np.ones(1, dtype=bool),
        versions=np.zeros(1, dtype=np.int32),
        finish_reason="stop",
    )

    async def score():
        try:
            return await worker.score([RewardRequest(sample=sample, prompt="", response=text) for text in answers])
        finally:
            await worker.close()

    return asyncio.run(score())


def test_a_failure_is_never_a_value():
    value, failure, bug, nan, infinite = judge("0.5", "failure", "bug", "nan", "inf", weight=2.0)
    assert value.value == 1.0
    assert (failure.value, failure.failure) == (None, "the sandbox died")
    assert bug.value is None
    assert "KeyError" in bug.failure
    assert nan.failed
    assert infinite.failed


@pytest.mark.parametrize(
    ("text", "names_package"),
    [
        ("nothing", True),
        ("a number", True),
        ("no number", True),
        ("a part that is nothing", True),
        ("exit", True),
        ("no reason", False),
        ("a part that is NaN", False),
    ],
)
def test_invalid_reward_fails_only_its_sample(text, names_package):
    before, failure, after = judge("1", text, "2")
    assert (before.value, failure.value, after.value) == (1.0, None, 2.0)
    assert failure.failure
    assert ("roll-moody 1" in failure.failure) == names_package


def test_numbers_of_a_reward_can_be_saved_whatever_their_type():
    (found,) = judge("numpy", weight=2.0)
    assert json.loads(json.dumps(asdict(found))) == {
        "value": 1.0,
        "failure": "",
        "detail": {"format": 1.0, "right": 1.0, "why": "ünï"},
    }


def test_how_much_longer_answers_are_that_were_passed_over():
    def group(*lengths):
        return Group(
            id="g",
            samples=tuple(
                Sample(
                    id="g/0",
                    group_id="g",
                    prompt_ids=np.array([1]),
                    response_ids=np.zeros(length, dtype=np.int64),
                    logprobs=np.zeros(length, dtype=np.float32),
                    loss_mask=np.ones(length, dtype=np.bool_),
                    versions=np.zeros(length, dtype=np.int32),
                    finish_reason="stop",
                )
                for length in lengths
            ),
        )

    groups = [group(2, 4), group(9, 9), group(3)]
    assert late_length_ratio(groups, (0, 1, 0)) == 3.0
    assert late_length_ratio(groups, (0, 0, 0)) == late_length_ratio(groups, (1, 2, 1)) == 1.0
    assert late_length_ratio([group(0), group(5)], (0, 1)) == 1.0
    assert late_length_ratio([], ()) == 1.0
