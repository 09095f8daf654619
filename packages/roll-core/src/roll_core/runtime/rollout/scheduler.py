"""Prompts in, batches of judged groups out, in prompt order and as far ahead of training as the plan allows.

    a tag's prompts   0  1  2  3  4  5  6  7  8  9 ...
                      └── line ──────────┘
                      ready ready x  running          x: left out, so that the next prompt joins at the end
    batch             first `count` of the line, once all of them are ready

With `first_ready` a batch takes what is ready first, but whatever it passes over is in the next one.

A line holds at most the batch that is asked for and `ahead` more, so a group is trained on at most `ceil(ahead)` steps
after it was begun: the bound on staleness is kept by not beginning too early, not by throwing work away.

Where nothing is generated ahead, prompts that replace others are asked when the whole round is judged: what runs
together then does not depend on timing, and neither do the last bits of what is drawn.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointMismatchError
from roll_core.runtime.concurrency import background
from roll_core.runtime.rollout.groups import BatchFacts, Verdicts, group_of, request_for
from roll_core.runtime.rollout.lines import Entry, Line
from roll_core.runtime.rollout.saved import group_from, outputs_from, saved_group, saved_outputs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from roll_core.runtime.rollout.dispatcher import Dispatcher
    from roll_core.spec.pipeline import Prompt, RolloutPlan
    from roll_core.types import Completion, Group


REPLAYED = "replayed"
"""In the state of rollouts that were not generated, instead of lines."""

CHECK_S = 600.0
"""How often one who waits for a batch looks whether something is lost."""


class RolloutScheduler:
    """Lives on the event loop of its dispatcher. One `batch` at a time."""

    def __init__(
        self,
        plan: RolloutPlan,
        dispatcher: Dispatcher,
        judge: Callable[[Prompt, Group], Awaitable[Group]] | None,
        *,
        seed: int | None,
        turn: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
        served: Callable[[Coroutine[Any, Any, None]], Awaitable[None]] | None = None,
    ) -> None:
        """`judge` gives the samples of a group their rewards. Without a `seed` requests have none, and engines draw as
        it comes. `turn` is the engine's turn on its slots; `served` waits within it for what replicas draw, and sees to
        it that there are some."""
        self.plan = plan
        self._dispatcher, self._judge, self._seed, self._turn = dispatcher, judge, seed, turn
        self._lines = [
            Line.of(tag, count, ahead=plan.ahead, max_tries=plan.max_tries, first_ready=plan.first_ready)
            for tag, count in plan.counts.items()
        ]
        self._by_request: dict[str, tuple[Line, Entry]] = {}
        dispatcher.accounts.askers.append(lambda: self._by_request)
        self._served = served
        self._judging: set[asyncio.Task[None]] = set()
        self._step = 0
        self._wanted = False
        """Whether a batch is being waited for, or what is ahead of it alone."""
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._verdicts = Verdicts()

    async def batch(self, step: int) -> tuple[list[Group], BatchFacts]:
        """The groups to train on in `step`, with the weights that the engine holds now for what is yet to be drawn.

        Raises the first error of an engine or a judge, also of what failed since the last batch.
        """
        self._step, self._wanted = step, True
        for line in self._lines:
            line.begin()
        async with self._turn():
            try:
                self._drop_stale()
                self._ask_again()
                self._admit()
                while self._failure is None and not all(line.is_complete for line in self._lines):
                    self._changed.clear()
                    await (self._change() if self._served is None else self._served(self._change()))
                if self._failure is not None:
                    raise self._failure
            except BaseException:
                await self.close()
                raise
            finally:
                self._wanted = False
            taken, passed_over = self._take()
            if not self.plan.concurrent:
                await self._rest()
        if self.plan.concurrent:
            self._admit()
        self._dispatcher.check()
        facts = BatchFacts(
            ages=tuple(step - entry.born for entry in taken),
            left_out=self._counts.pop("left out", 0),
            stale=self._counts.pop("stale", 0),
            surplus=sum(map(len, self._lines)),
            passed_over=passed_over,
            positions=tuple(entry.position for entry in taken),
            verdicts=self._verdicts,
        )
        self._verdicts = Verdicts()
        return [entry.group for entry in taken if entry.group is not None], facts

    async def _change(self) -> None:
        """Wait until a line is complete or something fails. What is lost would be waited for in vain."""
        while not self._changed.is_set():
            try:
                await asyncio.wait_for(self._changed.wait(), CHECK_S)
            except TimeoutError:
                self._dispatcher.check()

    def _take(self) -> tuple[list[Entry], int]:
        taken: list[Entry] = []
        passed_over = 0
        for line in self._lines:
            entries, passed = line.take()
            taken += entries
            passed_over += passed
        return taken, passed_over

    async def close(self) -> None:
        """End everything."""
        self._dispatcher.forget(list(self._by_request))
        self._by_request.clear()
        judging, self._judging = self._judging, set()
        for task in judging:
            task.cancel()
        await asyncio.gather(*judging, return_exceptions=True)

    # -- what is saved -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Lines as plain values. What an engine is drawing right now is saved as far as it was drawn when it was last
        cut short."""
        return {
            line.tag: {
                "next": line.next,
                "kept": [
                    {
                        "position": entry.position,
                        "born": entry.born,
                        "group": None if entry.group is None else saved_group(entry.group),
                        "drawn": None if entry.drawn is None else saved_outputs(entry.drawn),
                    }
                    for entry in line.entries
                ],
            }
            for line in self._lines
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Tags that it does not know begin at their first prompt.

        Raises `CheckpointMismatchError`.
        """
        if state.get(REPLAYED) is True:
            raise CheckpointMismatchError(
                "the checkpoint is of a run that replayed rollouts and does not know which prompts are next: go on with"
                " replay_rollouts"
            )
        for line in self._lines:
            saved = state.get(line.tag)
            if saved is None:
                continue
            try:
                line.next = saved["next"]
                line.replace([self._entry_from(line, each) for each in saved["kept"]])
            except CheckpointMismatchError:
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointMismatchError(
                    f"the saved rollouts of {line.tag!r} cannot be read: {error!r}"
                ) from error

    def _entry_from(self, line: Line, saved: Mapping[str, Any]) -> Entry:
        prompt = self.plan.prompt(line.tag, saved["position"])
        entry = Entry(prompt, saved["position"], saved["born"])
        if saved["group"] is not None:
            entry.group = group_from(saved["group"], prompt)
        if saved["drawn"] is not None:
            entry.drawn = outputs_from(saved["drawn"])
        if entry.group is not None:
            lengths = [len(sample.response_ids) for sample in entry.group.samples]
        else:
            lengths = [0 if output is None else len(output.token_ids) for output in entry.drawn or ()]
        if lengths and len(lengths) != self.plan.n:
            raise CheckpointMismatchError(
                f"the checkpoint keeps {len(lengths)} answers to prompt {prompt.id}, this config asks for"
                f" {self.plan.n}: leave num_return_sequences_in_group as it was"
            )
        if (longest := max(lengths, default=0)) > (limit := self.plan.params.max_new_tokens):
            raise CheckpointMismatchError(
                f"the checkpoint keeps an answer of {longest} tokens to prompt {prompt.id}, this config allows"
                f" {limit}: leave response_length (max_new_tokens) as it was"
            )
        return entry

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _ask_again(self) -> None:
        """What waited since the last batch goes on."""
        self._ask(
            (line, entry)
            for line in self._lines
            for entry in line.entries
            if entry.group is None and not entry.request_id
        )

    def _admit(self) -> None:
        """Ask for the next prompts, as many as may be under way."""
        if not self.plan.ahead and any(line.unsettled for line in self._lines):
            return
        self._ask(
            (line, entry)
            for line in self._lines
            for entry in line.joining((line.count if self._wanted else 0) + line.extra, self.plan.prompt, self._step)
        )

    def _ask(self, entries: Iterable[tuple[Line, Entry]]) -> None:
        requests, drawn = [], {}
        for line, entry in entries:
            if entry.drawn is None:
                entry.born = self._step
            entry.request_id = id = f"train/{self._step}/{entry.prompt.id}"
            self._by_request[id] = line, entry
            if entry.drawn is not None:
                drawn[id] = entry.drawn
            seed_of = None if self._seed is None else (self._seed, "train", entry.born)
            plan = self.plan
            requests.append(
                request_for(
                    entry.prompt, plan.params, n=plan.n, seed_of=seed_of, id=id, routed_experts=plan.routed_experts
                )
            )
        if requests:
            self._dispatcher.ask(requests, self._answered, drawn)

    def _drop_stale(self) -> None:
        """Groups that would be older than the bound when their turn comes begin again, in their place."""
        if self.plan.stale == "reuse":
            return
        bound = math.ceil(self.plan.ahead)
        dropped = []
        for line in self._lines:
            kept = line.entries
            for at, entry in enumerate(kept):
                if entry.is_begun and self._step + at // line.count - entry.born > bound:
                    entry.dropped = True
                    if entry.request_id:
                        dropped.append(entry.request_id)
                        self._by_request.pop(entry.request_id, None)
                    kept[at] = Entry(entry.prompt, entry.position, self._step, waited=entry.waited)
                    self._counts["stale"] += 1
            line.replace(kept)
        self._dispatcher.forget(dropped)

    async def _rest(self) -> None:
        """The engine is needed for something else: what is unfinished waits."""
        if not self._by_request:
            return
        open_ids = list(self._by_request)
        taken = await self._dispatcher.take_back(open_ids)
        for id in open_ids:
            if id in taken and id in self._by_request:
                _, entry = self._by_request.pop(id)
                entry.request_id = ""
                begun = any(output is not None and len(output.token_ids) for output in taken[id])
                entry.drawn = taken[id] if self.plan.keep_partials and begun else None

    # -- what the dispatcher and the judges say ------------------------------------------------------------------------

    def _answered(self, id: str, outcome: Completion | BaseException) -> None:
        line, entry = self._by_request.pop(id)
        if isinstance(outcome, BaseException):
            self._fail(outcome)
            return
        entry.drawn = outcome.outputs
        group = group_of(entry.prompt, outcome)
        if self._judge is None:
            try:
                self._settle(line, entry, group)
            except Exception as error:  # of the filter, or of what makes prompts
                self._fail(error)
            return
        task = background(self._judged(self._judge, line, entry, group), name=f"rewards of {group.id}")
        self._judging.add(task)
        task.add_done_callback(self._judging.discard)

    async def _judged(
        self, judge: Callable[[Prompt, Group], Awaitable[Group]], line: Line, entry: Entry, group: Group
    ) -> None:
        try:
            self._settle(line, entry, await judge(entry.prompt, group))
        except Exception as error:
            self._fail(error)

    def _settle(self, line: Line, entry: Entry, group: Group) -> None:
        if entry.dropped:
            return
        self._verdicts += Verdicts.of([group])
        kept = self.plan.keep is None or self.plan.keep(group)
        self._counts["left out"] += not kept
        line.settle(entry, group if kept else None)
        if self._wanted or self.plan.concurrent:
            self._admit()
        if line.is_complete:
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()
