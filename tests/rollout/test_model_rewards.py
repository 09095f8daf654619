"""Groups that a reward model scores: which of them share a pass, in which order, and what is a failure."""

import asyncio

import numpy as np
import pytest
from rollout_fleet import engine, request

from roll_core.runtime.rollout.model_rewards import ModelInput, ModelReward, ModelRewardRole
from roll_core.runtime.rollout.queue import RequestQueue
from roll_core.spec.config import ModelRewardConfig
from roll_core.spec.pipeline import ScoredSequences
from roll_core.spec.rollout import RewardRequest
from roll_core.types import Sample
from shared_tests.simulation import VirtualTimeLoop

CONFIG = ModelRewardConfig(
    reward="model",
    weight=2.0,
    strategy_args={"strategy_name": "hf_infer"},
    model_args={"model_name_or_path": "rm"},
)


def sampled_group(name, responses):
    """Requests to score `responses` to the prompt of token 1."""
    none = np.zeros(0)
    return [
        RewardRequest(
            sample=Sample(
                id=f"{name}/{index}", group_id=name, prompt_ids=np.array([1]), response_ids=np.array(tokens),
                logprobs=none, loss_mask=none, versions=none, finish_reason="stop",
            ),
            prompt="",
            response="",
        )
        for index, tokens in enumerate(responses)
    ]  # fmt: skip


class Model:
    """A role whose score of a sequence is its last token; NaN after token 9. Writes down its passes."""

    name = "rewards.style"

    def __init__(self):
        self.passes = []

    async def score(self, sequences, want):
        assert want.values
        self.passes.append([each.tokens.tolist() for each in sequences])
        await asyncio.sleep(0.01)
        values = [np.where(each.tokens == 9, np.nan, each.tokens).astype(np.float32) for each in sequences]
        return ScoredSequences(values=values)


async def at_once():
    await asyncio.sleep(0)


def role_of(model, *, ready=at_once, vocab_size=100):
    function = ModelReward(CONFIG)
    return ModelRewardRole(
        model, CONFIG, ModelInput(vocab_size=vocab_size, pad_token_id=0), function, owner="roll-core", ready=ready
    )


def test_score_is_the_weighted_last_value_or_a_failure():
    model = Model()
    (good, bad, foreign) = asyncio.run(role_of(model).score(sampled_group("a", [[5, 3, 0], [5, 9], [5, 100]])))
    assert good.value == 6.0
    assert bad.value is None
    assert "nan" in bad.failure
    assert foreign.value is None
    assert "100" in foreign.failure
    assert model.passes == [[[1, 5, 3], [1, 5, 9]]]


def test_groups_that_wait_share_a_pass_in_the_order_of_their_ids():
    async def main():
        model = Model()
        role = role_of(model)
        first = asyncio.create_task(role.score(sampled_group("b", [[2]])))
        await asyncio.sleep(0.005)
        others = [
            asyncio.create_task(role.score(sampled_group(name, [[token]]))) for name, token in (("d", 4), ("c", 3))
        ]
        scores = [reward.value for (reward,) in await asyncio.gather(first, *others)]
        return scores, model.passes

    assert asyncio.run(main()) == ([4.0, 8.0, 6.0], [[[1, 2]], [[1, 3], [1, 4]]])


def test_model_error_reaches_every_caller_and_next_pass_is_new():
    class Broken(Model):
        async def score(self, sequences, want):
            if not self.passes:
                self.passes.append([])
                raise RuntimeError("out of memory")
            return await super().score(sequences, want)

    async def main():
        role = role_of(Broken())
        found = await asyncio.gather(*[role.score(sampled_group(name, [[2]])) for name in "ab"], return_exceptions=True)
        return found, await role.score(sampled_group("c", [[2]]))

    errors, (reward,) = asyncio.run(main())
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert reward.value == 4.0


def test_a_caller_that_is_cancelled_is_not_scored():
    async def main():
        model = Model()
        role = role_of(model, ready=lambda: asyncio.sleep(0.005))
        cancelled = asyncio.create_task(role.score(sampled_group("a", [[2]])))
        await asyncio.sleep(0)
        cancelled.cancel()
        await role.score(sampled_group("b", [[3]]))
        await role.close()
        return model.passes

    assert asyncio.run(main()) == [[[1, 3]]]


@pytest.mark.parametrize("seed", range(4))
def test_synchronous_groups_share_one_pass(seed):
    async def main():
        queue = RequestQueue([engine(f"e{seed}", max_rows=1 + seed)])
        model = Model()
        role = role_of(model, ready=queue.drained)

        async def group(name):
            await queue.submit(request(f"{seed}/{name}")).done
            return await role.score(sampled_group(name, [[2]]))

        await asyncio.gather(*[group(f"g{at}") for at in range(8)])
        await queue.drained()  # returns at once
        return [len(each) for each in model.passes]

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == [8]
