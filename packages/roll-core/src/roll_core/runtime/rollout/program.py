"""Rollout programs on the request queue: their `generate` and `score` calls, and the single-turn program.

program ── generate(prompt_ids, key) ──► GenerateRequest ──► RequestQueue.submit ──► Completion
        ── score(group) ──► RewardRouter ──► group with rewards
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from roll_core.data.pack import sample_of
from roll_core.errors import ContractError
from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.spec.rollout import RolloutContext, RolloutProgram
from roll_core.types import GenerateRequest, Group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from typing import Any, TypeAlias

    from roll_core.runtime.rollout.queue import RequestQueue
    from roll_core.runtime.rollout.requests import Outputs, PendingRequest
    from roll_core.spec.rollout import Prompt
    from roll_core.types import Completion, Media, SamplingParams, TokenIds

    Scorer: TypeAlias = Callable[[Prompt, Group], Awaitable[Group]]
    """Scores a group of a prompt and returns it with rewards."""


PROBE, EVALUATION, ROLLOUT = -2, -1, 0
"""Priorities of a run's requests, lower first. Requests on which the run blocks precede requests for later batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """Settings shared by the groups of one batch or evaluation."""

    params: SamplingParams
    n: int
    seed_of: tuple[int | str, ...] | None
    """Parts of the seeds besides the prompt's id and the call's key; None for requests without a seed. A seed in
    `params` replaces them."""
    id_prefix: str = ""
    """Prefix of request ids."""
    routed_experts: bool = False
    priority: int = ROLLOUT


class GroupContext(RolloutContext):
    """A group's program and its calls. Between two batches the scheduler pauses it, and `generate` blocks."""

    task: asyncio.Task[None]
    """The running program; set by the scheduler."""

    def __init__(
        self,
        queue: RequestQueue,
        prompt: Prompt,
        terms: GroupTerms,
        scorer: Scorer | None,
        sampled: Mapping[str, Outputs] | None = None,
        program: RolloutProgram | None = None,
    ) -> None:
        """`sampled` has the outputs of a restored program's calls, by key. Without `scorer`, groups have no rewards."""
        self.program = program or SingleTurn()
        self.params, self.n = terms.params, terms.n
        self._queue, self._prompt, self._terms, self._scorer = queue, prompt, terms, scorer
        self._restored = dict(sampled or {})
        self._pending: dict[str, PendingRequest] = {}
        self._finished: dict[str, Outputs] = {}
        self._open = asyncio.Event()
        self._open.set()

    @override
    async def generate(
        self,
        prompt_ids: TokenIds,
        *,
        n: int = 1,
        params: SamplingParams | None = None,
        media: tuple[Media, ...] = (),
        key: str = "",
        on_progress: Callable[[Outputs], None] | None = None,
    ) -> Completion:
        if not self._open.is_set():
            await self._open.wait()
        if key in self._finished or key in self._pending:
            raise ContractError(f"{self._program} of {self._prompt.id} calls generate twice with key {key!r}")
        prompt, terms, params = self._prompt, self._terms, params or self._terms.params
        parts = terms.seed_of if params.seed is None else (params.seed,)
        request = GenerateRequest(
            id=f"{terms.id_prefix}{prompt.id}{f':{key}' if key else ''}",
            prompt_ids=prompt_ids,
            media=media,
            # Prompts never share a seed: the same random numbers in every response would make averages far too noisy.
            params=replace(
                params, seed=None if parts is None else stable_seed(*parts, prompt.id, *([key] if key else []))
            ),
            n=n,
            routed_experts=terms.routed_experts,
            priority=terms.priority,
            # The same in later steps and epochs.
            routing_key=prompt.row or prompt.id,
        )
        pending = self._pending[key] = self._queue.submit(
            request, self._restored.pop(key, None), on_progress=on_progress
        )
        try:
            completion = await pending.done
        # Also after a cancellation: the queue would go on sampling for a call that no program awaits.
        finally:
            del self._pending[key]
            self._queue.cancel([pending])
        self._finished[key] = completion.outputs
        return completion

    @override
    async def score(self, group: Group) -> Group:
        return group if self._scorer is None else await self._scorer(self._prompt, group)

    async def run(self) -> Group:
        """Run the program and return its group.

        Raises `ContractError` if the program returns another group, or raises `CancelledError` without being cancelled:
        callers would take that for the end of the run.
        """
        try:
            group = await self.program.run(self, self._prompt)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ContractError(
                f"{self._program} of {self._prompt.id} raised CancelledError, but nothing cancelled it"
            ) from error
        if not isinstance(group, Group):
            raise ContractError(f"{self._program} returned a {type(group).__name__}, expected a Group")
        if group.id != self._prompt.id or group.num_episodes != self.n:
            raise ContractError(
                f"{self._program} returned {group.num_episodes} samples of group {group.id!r}, expected {self.n} of"
                f" {self._prompt.id!r}"
            )
        return group

    @property
    def _program(self) -> str:
        """Module and class of the program, for messages: the module's name shows the package."""
        kind = type(self.program)
        return f"the rollout program {kind.__module__}.{kind.__qualname__}"

    @property
    def pending(self) -> list[PendingRequest]:
        """Requests of the calls in progress."""
        return list(self._pending.values())

    @property
    def sampled(self) -> dict[str, Outputs]:
        """Outputs by key, possibly partial: of finished calls, restored calls, and calls in progress."""
        return self._restored | self._finished | {key: call.sampled for key, call in self._pending.items()}

    @property
    def has_tokens(self) -> bool:
        """True if at least one token is sampled."""
        return any(
            output is not None and len(output.token_ids) for outputs in self.sampled.values() for output in outputs
        )

    def hold(self) -> None:
        """Block further `generate` calls until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Unblock `generate` calls."""
        self._open.set()


class SingleTurn(RolloutProgram):
    """One response per sample: the program of `rlvr`."""

    @override
    async def run(self, context: RolloutContext, prompt: Prompt) -> Group:
        completion = await context.generate(prompt.tokens, n=context.n, media=prompt.media)
        return await context.score(group_of(prompt, completion))

    @override
    def snapshot(self) -> Mapping[str, Any]:
        return {}


class GreedyBaseline(SingleTurn):
    """`SingleTurn` with one more response, of the most likely tokens, as the group's baseline (ReMax)."""

    @override
    async def run(self, context: RolloutContext, prompt: Prompt) -> Group:
        most_likely = replace(context.params, temperature=0.0)
        sampled, greedy = await gather(
            [
                context.generate(prompt.tokens, n=context.n, media=prompt.media),
                context.generate(prompt.tokens, params=most_likely, media=prompt.media, key="greedy"),
            ]
        )
        baseline = replace(group_of(prompt, greedy).samples[0], id=f"{prompt.id}/greedy")
        together = Group(id=prompt.id, samples=(*group_of(prompt, sampled).samples, baseline))
        scored = (await context.score(together)).samples
        return Group(id=prompt.id, samples=scored[:-1], baseline=scored[-1])


async def run_groups(
    queue: RequestQueue,
    prompts: Sequence[Prompt],
    terms: GroupTerms,
    scorer: Scorer | None,
    program: Callable[[], RolloutProgram] | None = None,
) -> list[Group]:
    """Sample one group per prompt, all concurrently, and return them in prompt order."""
    programs = [None if program is None else program() for _ in prompts]
    contexts = [
        GroupContext(queue, prompt, terms, scorer, program=program)
        for prompt, program in zip(prompts, programs, strict=True)
    ]
    return await gather([context.run() for context in contexts])


def group_of(prompt: Prompt, completion: Completion) -> Group:
    """Convert a completion to the group of its prompt, one sample per output."""
    samples = tuple(
        sample_of(
            output,
            id=f"{prompt.id}/{index}",
            group_id=prompt.id,
            prompt_ids=prompt.tokens,
            media=prompt.media,
            tag=prompt.tag,
            metadata=prompt.metadata,
        )
        for index, output in enumerate(completion.outputs)
    )
    return Group(id=prompt.id, samples=samples)
