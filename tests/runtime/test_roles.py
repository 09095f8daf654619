"""Groups called as one: how work is spread, cut and put together again."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from roll_core.algorithms.losses import sft_objective
from roll_core.data.media import image_media
from roll_core.errors import CheckpointError, UnsupportedError
from roll_core.runtime.cluster.executors.base import Member
from roll_core.runtime.run.roles import GroupInferRole, GroupTrainRole, average, even_chunks
from roll_core.runtime.workers.infer import EngineReading, join_readings
from roll_core.runtime.workers.train import combine
from roll_core.spec.config import InferWorkerConfig, TrainingArguments, TrainWorkerConfig
from roll_core.spec.pipeline import ScoredSequences
from roll_core.spec.providers import TrainCapabilities
from roll_core.spec.train import StepStats, WantedOutputs
from roll_core.types import Completion, CompletionOutput, DataRank, GenerateRequest, SamplingParams, TrainSequence
from roll_testing.errors import raises_error


def sequence(number: int, length: int) -> TrainSequence:
    mask = np.ones(length, dtype=bool)
    mask[0] = False
    return TrainSequence(id=str(number), tokens=np.full(length, number, dtype=np.int64), loss_mask=mask, group=number)


class FakeTrainGroup:
    """Ranks that answer with numbers from which one can tell who got what."""

    role, lost = "actor_train", frozenset()

    def __init__(
        self,
        ranks: list[DataRank],
        learning_rates: list[float] | None = None,
        outcomes: list[dict[str, float]] | None = None,
    ) -> None:
        self.ranks, self.world_size = ranks, len(ranks)
        self.updates: list[list[list[str]]] = []
        self.totals: list[int] = []
        self.learning_rates = learning_rates or []
        self.outcomes = outcomes or []

    async def call(self, method, calls, deadline_s=None):
        if method == "start":
            return self.ranks
        args_by_rank = list(calls.values())
        if method == "score":
            return [
                ScoredSequences(
                    logprobs=[s.tokens.astype(np.float32) for s in share],
                    topk_ids=[np.stack([s.tokens + 1 + k for k in range(want.topk)], 1) for s in share]
                    if want.topk
                    else None,
                )
                for share, want in args_by_rank
            ]
        self.updates.append([[s.id for s in share] for share, _, _ in args_by_rank])
        self.totals.append(args_by_rank[0][2].sequences)
        rate = self.learning_rates[len(self.updates) - 1] if self.learning_rates else 0.1
        outcome = self.outcomes[len(self.updates) - 1] if self.outcomes else {}
        return [
            (
                {"loss": 1.0 * len(share), "ratio/max": float(rank)},
                StepStats(**{"grad_norm": 2.0, "learning_rate": rate, **outcome}),
            )
            for rank, (share, _, _) in enumerate(args_by_rank)
        ]


def train_role(group: FakeTrainGroup, per_device: int, accumulation: int = 1) -> GroupTrainRole:
    args = TrainingArguments(per_device_train_batch_size=per_device, gradient_accumulation_steps=accumulation)
    role = GroupTrainRole("actor", TrainWorkerConfig(training_args=args), group, trains=True)
    asyncio.run(role.start())
    return role


@given(st.integers(0, 200), st.integers(1, 50))
def test_even_chunks_keep_the_order_and_differ_by_one_at_most(count, size):
    items = list(range(count))
    chunks = even_chunks(items, size)
    assert [i for chunk in chunks for i in chunk] == items
    sizes = [len(chunk) for chunk in chunks]
    assert all(0 < s <= size for s in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(chunks) == -(-count // size)


def test_scores_keep_the_order_of_sequences_across_ranks():
    group = FakeTrainGroup([DataRank(index=i, size=3) for i in range(3)])
    sequences = [sequence(i, 2 + (7 * i) % 5) for i in range(11)]
    found = asyncio.run(train_role(group, 4).score(sequences, WantedOutputs(logprobs=True)))
    assert [list(row) for row in found.logprobs] == [[i] * len(s) for i, s in enumerate(sequences)]
    assert found.entropy is None
    assert found.values is None
    assert found.topk_ids is None
    role = train_role(group, 4)
    for undeclared in ({"topk": 2}, {"gathered": True}):
        with raises_error(UnsupportedError, "actor", *undeclared):
            asyncio.run(role.score(sequences, WantedOutputs(**undeclared)))
    picture = image_media(Image.new("RGB", (2, 2)))
    with raises_error(UnsupportedError, "actor", "images"):
        asyncio.run(role.score([replace(sequences[0], media=(picture,))], WantedOutputs(logprobs=True)))
    role.capabilities = TrainCapabilities(topk=True)
    found = asyncio.run(role.score(sequences, WantedOutputs(logprobs=True, topk=2)))
    assert [row.tolist() for row in found.topk_ids] == [[[i + 1, i + 2]] * len(s) for i, s in enumerate(sequences)]


def test_ranks_of_a_replica_get_equal_data_and_the_leader_counts():
    ranks = [DataRank(index=0, size=1, leader=True), DataRank(index=0, size=1, leader=False)]
    group = FakeTrainGroup(ranks)
    result = asyncio.run(train_role(group, 4).update([sequence(i, 3) for i in range(4)], sft_objective()))
    assert group.updates[0][0] == group.updates[0][1]
    assert result.metrics["loss"] == 4.0


def test_update_counts_steps_and_tokens_per_epoch():
    group = FakeTrainGroup([DataRank(index=0, size=2), DataRank(index=1, size=2)])
    role = train_role(group, per_device=2, accumulation=3)
    assert role.sequences_per_step == 12
    sequences = [sequence(i, 5) for i in range(24)]
    result = asyncio.run(role.update(sequences, sft_objective(), epochs=2))
    assert result.num_steps == 4
    assert group.totals == [12] * 4
    assert result.num_tokens == 2 * 24 * 5
    assert role.weight_version == 4
    # 12 sequences at 1.0 each, summed over the two ranks, averaged over steps; the maximum is taken over ranks.
    assert result.metrics["loss"] == 12.0
    assert result.metrics["ratio/max"] == 1.0


def steps_of(sequences, *, epochs=1, shuffle_seed=None, per_device=4, max_steps=None):
    """Ids of the sequences of each optimizer step."""
    group = FakeTrainGroup([DataRank()])
    role = train_role(group, per_device)
    updating = role.update(sequences, sft_objective(), epochs=epochs, shuffle_seed=shuffle_seed, max_steps=max_steps)
    asyncio.run(updating)
    return [shares[0] for shares in group.updates]


def groups_of_two(count: int) -> list[TrainSequence]:
    return [replace(sequence(i, 3), group=i // 2) for i in range(2 * count)]


def test_optimizer_steps_shuffle_groups_by_seed_and_epoch():
    sequences = groups_of_two(8)
    steps = steps_of(sequences, epochs=2, shuffle_seed=7)
    assert steps == steps_of(sequences, epochs=2, shuffle_seed=7)
    for epoch in (steps[:4], steps[4:]):
        assert sorted(int(name) for step in epoch for name in step) == list(range(16))
        for step in epoch:  # whole groups, in the order in which they were given
            assert [int(name) // 2 for name in step[::2]] == [int(name) // 2 for name in step[1::2]]
            assert step == sorted(step, key=int)
    orders = {tuple(map(tuple, steps_of(sequences, shuffle_seed=seed))) for seed in range(20)}
    assert len(orders) == 20
    # Sequences of the second half, of which a last step had four in the order given.
    last = [sum(int(name) >= 8 for name in order[-1]) for order in orders]
    assert {0, 2, 4} == set(last)


@pytest.mark.parametrize("seed", [None, 7])
def test_rows_of_a_rollout_and_units_stay_in_one_step(seed):
    rows = [
        replace(sequence(i, 3), rollout=rollout, group=rollout // 2) for i, rollout in enumerate((0, 0, 1, 2, 3, 3, 3))
    ]
    steps = steps_of(rows, per_device=2, shuffle_seed=seed)
    assert sorted(steps) == [["0", "1", "2"], ["3", "4", "5", "6"]]
    pairs = [replace(sequence(i, 3), unit=i // 2) for i in range(8)]
    assert sorted(steps_of(pairs, per_device=2)) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]


def test_a_batch_above_the_steps_of_an_epoch_has_larger_steps():
    sequences = groups_of_two(8)
    assert [len(step) for step in steps_of(sequences, max_steps=2, epochs=2)] == [8, 8] * 2
    assert [len(step) for step in steps_of(sequences[:5], max_steps=3)] == [2, 3]
    assert steps_of(sequences, max_steps=4) == steps_of(sequences)


def test_unseeded_steps_keep_order_and_one_step_needs_no_seed():
    sequences = groups_of_two(4)
    assert steps_of(sequences) == [[str(i) for i in range(4)], [str(i) for i in range(4, 8)]]
    assert steps_of(sequences, per_device=8, shuffle_seed=3) == [[str(i) for i in range(8)]]
    assert steps_of([], shuffle_seed=3) == []


def test_warm_up_start_is_no_new_version_but_zero_lr_is():
    warming = FakeTrainGroup([DataRank()], learning_rates=[0.0, 0.1])
    role = train_role(warming, 1)
    asyncio.run(role.update([sequence(0, 3), sequence(1, 3)], sft_objective()))
    assert role.weight_version == 1

    frozen = FakeTrainGroup([DataRank()], learning_rates=[0.0])
    args = TrainingArguments(learning_rate=0.0, per_device_train_batch_size=1)
    stuck = GroupTrainRole("actor", TrainWorkerConfig(training_args=args), frozen, trains=True)
    asyncio.run(stuck.start())
    asyncio.run(stuck.update([sequence(0, 3)], sft_objective()))
    assert stuck.weight_version == 1  # so that publishing finds out that nothing changed


def test_step_without_gradient_may_repeat_the_version_before():
    outcomes = [{}, {"grad_norm": 0.0}, {"skipped": True, "grad_norm": math.inf}, {"grad_norm": 0.0}, {}]
    role = train_role(FakeTrainGroup([DataRank()], outcomes=outcomes), 1)
    seen = []
    for i in range(5):
        asyncio.run(role.update([sequence(i, 3)], sft_objective()))
        seen.append((role.weight_version, role.changed_at))
    assert seen == [(1, 1), (2, 1), (2, 1), (3, 1), (4, 4)]


def test_extrema_are_not_summed_or_averaged():
    assert combine([{"a": 1.0, "b/max": 3.0, "c/min": 3.0}, {"a": 2.0, "b/max": 5.0, "c/min": 1.0}]) == {
        "a": 3.0,
        "b/max": 5.0,
        "c/min": 1.0,
    }
    assert average([{"a": 1.0, "b/max": 3.0}, {"a": 3.0, "b/max": 5.0}]) == {"a": 2.0, "b/max": 5.0}
    assert average([]) == {}


class FakeInferGroup:
    """Replicas that answer in an order of their own."""

    lost = frozenset()

    def __init__(self, world_size: int, delays: dict[str, float] | None = None, fails: str = "") -> None:
        self.role, self.world_size, self.delays, self.fails = "actor_infer", world_size, delays or {}, fails
        self.submitted: list[list[str]] = [[] for _ in range(world_size)]
        self.sizes: dict[str, int] = {}
        self.forgotten: list[str] = []

    async def call(self, method, calls, deadline_s=None):
        ((rank, (argument,)),) = calls.items()
        if method == "submit":
            self.submitted[rank] += [request.id for request in argument]
            self.sizes |= {request.id: request.n for request in argument}
            return [None]
        if method == "forget":
            self.forgotten += argument
            return [None]
        assert method == "result"
        assert argument in self.submitted[rank]
        await asyncio.sleep(self.delays.get(argument, 0))
        if argument == self.fails:
            raise ValueError(f"{argument} broke")
        output = CompletionOutput(
            token_ids=np.array([7]),
            logprobs=np.zeros(1, dtype=np.float32),
            versions=np.zeros(1, dtype=np.int32),
            finish_reason="stop",
        )
        return [Completion(id=argument, outputs=(output,) * self.sizes[argument])]


def requests(counts: list[int]) -> list[GenerateRequest]:
    return [
        GenerateRequest(id=str(i), prompt_ids=np.array([1]), params=SamplingParams(), n=n) for i, n in enumerate(counts)
    ]


def test_completions_are_returned_in_request_order():
    group = FakeInferGroup(2, delays={"0": 0.05, "1": 0.02})
    role = GroupInferRole("actor_infer", InferWorkerConfig(), group)
    found = asyncio.run(role.generate(requests([1, 1, 1])))
    assert [completion.id for completion in found] == ["0", "1", "2"]


def test_replica_that_died_twice_before_loading_joins_once():
    class Mortal(FakeInferGroup):
        lost = frozenset({1})

        async def replace(self, rank):
            self.lost = frozenset()

        async def call(self, method, calls, deadline_s=None):
            return [None] if method == "start" else await super().call(method, calls)

    async def main():
        group = Mortal(2)
        role = GroupInferRole("actor_infer", InferWorkerConfig(), group)
        await role.revive()
        group.lost = frozenset({1})
        await role.revive()
        role.received(1)
        await role.generate(requests([1] * 6))
        return [len(asked) for asked in group.submitted]

    assert asyncio.run(main()) == [3, 3]


def test_requests_go_to_the_replica_with_the_fewest_outputs():
    group = FakeInferGroup(2)
    asyncio.run(GroupInferRole("actor_infer", InferWorkerConfig(), group).generate(requests([8, 2, 2, 2, 2, 4])))
    assert group.submitted == [["0", "5"], ["1", "2", "3", "4"]]


def test_metrics_of_replicas_become_one_by_their_kinds():
    kinds = {"running/mean": "mean", "running/max": "max"}
    one = EngineReading(values={"tokens": 7, "running/mean": 2.0, "running/max": 5}, kinds=kinds)
    other = EngineReading(values={"tokens": 4, "running/mean": 4.0, "running/max": 4}, kinds=kinds)
    third = EngineReading(values={"tokens": 0}, kinds={})
    found = join_readings([one, other, third])
    assert found == {"tokens": 11.0, "running/mean": 3.0, "running/max": 5.0}
    assert join_readings([]) == {}


def test_the_failure_of_one_request_is_raised_as_it_is():
    group = FakeInferGroup(1, delays={"0": 30, "2": 30}, fails="1")

    async def fail():
        role = GroupInferRole("actor_infer", InferWorkerConfig(), group)
        with raises_error(ValueError, "1"):
            await role.generate(requests([1, 1, 1]))
        await asyncio.sleep(0.01)

    asyncio.run(fail())
    assert sorted(group.forgotten) == ["0", "2"]  # nobody waits for the others any more


def test_lowered_loss_scale_is_counted_and_trips_no_guard():
    group = FakeTrainGroup([DataRank(index=0, size=1)])
    group.outcomes = [{"skipped": True, "overflow": True}, {}, {"skipped": True}]
    role = train_role(group, per_device=1)
    before = role.weight_version
    result = asyncio.run(role.update([sequence(i, 3) for i in range(3)], sft_objective()))
    assert result.named("train")["train/skipped_steps"] == 2.0
    assert result.num_not_finite == 1
    assert role.weight_version == before + 1


def test_rank_with_files_on_its_own_disk_fails_the_checkpoint(tmp_path):
    class Apart(FakeTrainGroup):
        """The hosts of other ranks than `sees` have another disk at the same path."""

        sees = (0, 1)
        members = tuple(Member(rank=rank, host=f"host-{rank}", pid=rank, node=rank) for rank in (0, 1))

        async def call(self, method, calls, deadline_s=None):
            if method != "save":
                return await super().call(method, calls, deadline_s)
            for rank in self.sees:
                Path(*calls[rank]).mkdir(parents=True)
            return [False, False]

    group = Apart([DataRank(index=0, size=1), DataRank(index=0, size=1, leader=False)])
    role = train_role(group, per_device=1)
    assert asyncio.run(role.save(tmp_path / "shared")) is False
    for sees in ((0,), ()):
        group.sees = sees
        with raises_error(CheckpointError, "host-1", "output_dir"):
            asyncio.run(role.save(tmp_path / f"apart{len(sees)}"))


@pytest.mark.parametrize("order", [(1.0, math.nan, 2.0), (math.nan, 1.0, 2.0), (2.0, 1.0, math.nan)])
def test_nan_in_any_microbatch_is_the_metric(order):
    for name in ("ratio/max", "ratio/min", "loss"):
        assert math.isnan(combine([{name: value} for value in order])[name])
