"""Rollout scheduler: produces batches of scored groups in prompt order, at most `ahead` batches before training.

    prompts of a tag   0  1  2  3  4  5  6  7  8  9 ...
                       └── GroupQueue ────┘                 one rollout program runs for each group
                       done  done  x  running               x: filtered, so that the next prompt joins at the end
    batch              the first `count` groups, once all of them are done

With `first_ready` a batch takes the groups that finish first. The next batch takes the groups that were passed over.

`count` is the tag's number of groups in the batch of the step, see `roll_core.spec.pipeline.batch_counts`.

A group queue contains at most the requested batch and `ahead` more. A group is therefore trained on at most
`ceil(ahead)` steps after it was started. Groups start late enough to satisfy this bound, so none is discarded.

If `ahead` is 0, filtered groups are replaced only after all groups of the round are scored. The composition of engine
batches, and with it the last bits of logprobs, then does not depend on timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from bisect import bisect
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointMismatchError
from roll_core.runtime.cluster.concurrency import background, cancel_all
from roll_core.runtime.rollout.program import GroupContext, GroupTerms
from roll_core.runtime.rollout.recording import (
    REPLAYED,
    BatchFacts,
    RewardStats,
    group_from,
    outputs_from,
    saved_group,
    saved_outputs,
)
from roll_core.runtime.rollout.requests import PAUSED
from roll_core.spec.pipeline import batch_counts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from roll_core.runtime.records.media_folder import MediaFolder
    from roll_core.runtime.rollout.program import Scorer
    from roll_core.runtime.rollout.queue import RequestQueue
    from roll_core.runtime.rollout.requests import Outputs
    from roll_core.spec.pipeline import RolloutPlan
    from roll_core.spec.rollout import Prompt
    from roll_core.types import Group

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class GroupSlot:
    """A group in the queue for training: waiting, running (`rollout`) or done (`group`)."""

    prompt: Prompt
    position: int
    """Position of the prompt in the order of its tag."""
    born: int
    """Step at which the group was started; the earliest step of its tokens."""
    rollout: GroupContext | None = None
    """Its running program."""
    saved: SavedRollout | None = None
    """State of an unfinished rollout, restored from a checkpoint."""
    group: Group | None = None
    waited: bool = False
    """True if it was in the queue when the batch was requested."""


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """Checkpointed state of an unfinished program."""

    sampled: Mapping[str, Outputs]
    """Outputs of its `generate` calls, by key."""
    state: Mapping[str, Any]
    """Snapshot of the program."""


@dataclass(eq=False, slots=True)
class GroupQueue:
    """Untrained groups of one tag, in prompt order.

    The first `count` groups form the next batch. With `first_ready`, the batch takes the groups that were queued when
    it was requested, then the first to finish. If `extra` is less than `count`, no group is passed over twice.
    """

    tag: str
    first_ready: bool = False
    counts: Sequence[int] = (0,)
    """Groups in the requested batch, and in those that may be generated ahead of it."""
    extra: int = 0
    """Maximum number of groups beyond the requested batch."""
    limit: int = 0
    """Maximum number of prompts that may join for one batch."""
    next: int = 0
    """Position of the next prompt to join."""
    tried: int = 0
    """Prompts that joined for this batch."""
    slots: dict[int, GroupSlot] = field(default_factory=dict)
    """The groups by position, in prompt order. Rejected groups are removed."""
    num_unfinished: int = 0
    """Groups that are not done."""
    _blocking: GroupSlot | None = None
    """An unfinished group that the batch needs, so that `is_complete` rarely searches for one."""

    @property
    def count(self) -> int:
        """Groups in the requested batch."""
        return self.counts[0]

    @property
    def is_complete(self) -> bool:
        """True if the batch has all its groups of this tag, or if no more prompts may join and all are done."""
        if self.num_unfinished == 0 and self.tried >= self.limit:
            return True
        if len(self.slots) - self.num_unfinished < self.count:
            return False
        if self._blocking is None:
            slots = self.slots.values()
            needed = (slot for slot in slots if slot.waited) if self.first_ready else islice(slots, self.count)
            self._blocking = next((slot for slot in needed if slot.group is None), None)
        return self._blocking is None

    def begin(self, counts: Sequence[int], plan: RolloutPlan) -> None:
        """Begin a batch: set its limits, reset the count of joined prompts and mark the queued groups as `waited`."""
        self.counts, later = counts, counts[1:]
        self.extra = math.floor(plan.ahead * sum(later) / len(later)) if later else 0
        self.limit = math.ceil(plan.max_tries * self.count) + self.extra
        self.tried, self._blocking = 0, None
        for slot in self.slots.values():
            slot.waited = True

    def join(self, capacity: int, prompt: Callable[[str, int], Prompt], step: int) -> list[GroupSlot]:
        """Add the next prompts until the queue has `capacity` groups or the batch's limit of prompts is reached."""
        num = max(0, min(capacity - len(self.slots), self.limit - self.tried))
        joined = [
            GroupSlot(prompt(self.tag, position), position, step) for position in range(self.next, self.next + num)
        ]
        self.next += num
        self.tried += num
        self.num_unfinished += num
        self.slots.update((slot.position, slot) for slot in joined)
        return joined

    def finish(self, slot: GroupSlot, group: Group | None) -> None:
        """Store the group of a slot. If the filter rejected it (None), remove the slot."""
        self.num_unfinished -= 1
        slot.rollout, slot.group = None, group
        if slot is self._blocking:
            self._blocking = None
        if group is None:
            del self.slots[slot.position]

    def take(self) -> tuple[list[GroupSlot], int]:
        """Remove and return the batch, and the number of remaining groups that it passed over."""
        slots = list(self.slots.values())
        if self.first_ready:
            # Groups that waited first: otherwise fast groups would pass over a slow one in every batch.
            slots = sorted((slot for slot in slots if slot.group is not None), key=lambda slot: not slot.waited)
        taken = sorted(slots[: self.count], key=lambda slot: slot.position)
        for slot in taken:
            del self.slots[slot.position]
        return taken, sum(position < taken[-1].position for position in self.slots) if taken else 0

    def restart(self, slot: GroupSlot, step: int) -> None:
        """Discard the group of a slot, or its state, so that it is started again in `step`."""
        self.num_unfinished += slot.group is not None
        slot.group, slot.rollout, slot.saved, slot.born = None, None, None, step

    def restore(self, slots: Iterable[GroupSlot]) -> None:
        """Fill an empty queue with the slots of a checkpoint."""
        self.slots = {slot.position: slot for slot in slots}
        self.num_unfinished = sum(slot.group is None for slot in self.slots.values())


class RolloutScheduler:
    """Produces batches on the event loop of its request queue. One `batch` call at a time."""

    def __init__(
        self,
        plan: RolloutPlan,
        requests: RequestQueue,
        scorer: Scorer | None,
        *,
        seed: int | None,
        lease: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
        serve: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]] = asyncio.ensure_future,
        media: MediaFolder | None = None,
    ) -> None:
        """`seed` is the base of request seeds; None for requests without seeds. `lease` leases the engine's slots.
        `serve` awaits a coroutine within the lease, and restarts the replicas if none is alive. `media` stores the
        images of turns, without which they cannot be saved."""
        self.plan, self._media = plan, media
        self._requests, self._scorer, self._seed, self._lease = requests, scorer, seed, lease
        self._queues = [GroupQueue(tag, plan.first_ready) for tag in plan.counts]
        self._batches = batch_counts(plan.counts, plan.counts_at)
        self._upcoming: deque[Mapping[str, int]] = deque(maxlen=1 + math.ceil(plan.ahead))
        """Groups by tag of the batch of the step and of those that may be generated ahead of it."""
        self._until = 0
        """Step after those of `_upcoming`."""
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._step = 0
        self._wanted = False
        """True while `batch` is pending; False while groups are only prefetched."""
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._observed: list[tuple[str, int, Group]] = []
        """Tag, position and group of scored groups that `plan.sampled` has not observed yet."""
        self._rewards = RewardStats()
        """Counts of all groups since the last batch. The groups are not kept: the filter may reject most of them."""

    async def batch(self, step: int) -> tuple[list[Group], BatchFacts]:
        """Sample with the engine's current weights and return the groups to train on in `step`, with facts about them.

        Raises the first error of an engine, a program or a reward worker, including those since the last batch.
        """
        self._begin(step)
        async with self._lease():
            try:
                self._drop_stale()
                self._resume()
                self._admit()
                while self._failure is None and not all(queue.is_complete for queue in self._queues):
                    # No `await` between the check and this line: a group that completes in between would be missed.
                    self._changed.clear()
                    await self._serve(self._changed.wait())
                if self._failure is not None:
                    raise self._failure
            except BaseException:
                await self.close()
                raise
            finally:
                self._wanted = False
            takes = [queue.take() for queue in self._queues]
            taken = [slot for slots, _ in takes for slot in slots]
            # Within the lease: no request may run when another role gets these slots.
            if not self.plan.concurrent:
                await self._pause()
        # The groups just taken left room: the engine generates ahead while the batch is trained on.
        if self.plan.concurrent:
            self._admit()
        facts = BatchFacts(
            ages=tuple(step - slot.born for slot in taken),
            left_out=self._counts.pop("left out", 0),
            stale=self._counts.pop("stale", 0),
            surplus=sum(len(queue.slots) for queue in self._queues),
            passed_over=sum(passed_over for _, passed_over in takes),
            positions=tuple(slot.position for slot in taken),
            tags=tuple(queue.tag for queue, (slots, _) in zip(self._queues, takes, strict=True) for _ in slots),
            rewards=self._rewards,
            restarted=self._counts.pop("restarted", 0),
        )
        self._rewards = RewardStats()
        return [slot.group for slot in taken if slot.group is not None], facts

    async def close(self) -> None:
        """Cancel all programs."""
        tasks, self._tasks = self._tasks, set()
        await cancel_all(tasks)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The group queues as plain values. Running rollouts include the tokens that were sampled until their last
        interruption."""
        self._observe()
        sampled = self.plan.sampled
        return {
            queue.tag: {
                "next": queue.next,
                "kept": [_saved_slot(slot, self._media) for slot in queue.slots.values()],
                **({} if sampled is None else {"sampler": sampled.state(queue.tag)}),
            }
            for queue in self._queues
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Tags missing in it begin at their first prompt. Groups whose prompt has changed are
        sampled again.

        Raises `CheckpointMismatchError`.
        """
        if state.get(REPLAYED) is True:
            raise CheckpointMismatchError(
                "the checkpoint is from a run that replayed rollouts and has no prompt positions: set replay_rollouts"
            )
        for queue in self._queues:
            saved = state.get(queue.tag)
            if saved is None:
                continue
            try:
                if self.plan.sampled is not None and "sampler" in saved:
                    self.plan.sampled.load_state(queue.tag, saved["sampler"])
                queue.next = saved["next"]
                queue.restore([self._slot_from(queue, saved_slot) for saved_slot in saved["kept"]])
            except CheckpointMismatchError:
                raise
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointMismatchError(
                    f"the saved rollouts of {queue.tag!r} cannot be read: {error!r}"
                ) from error

    def _slot_from(self, queue: GroupQueue, saved: Mapping[str, Any]) -> GroupSlot:
        if self.plan.sampled is not None and "id" in saved:
            prompt = self.plan.sampled.restore(queue.tag, saved["id"])
        else:
            prompt = self.plan.prompt(queue.tag, saved["position"])
        slot = GroupSlot(prompt, saved["position"], saved["born"])
        if saved.get("prompt", "") not in ("", _digest(prompt)):
            log.warning("prompt %s is not the one that the checkpoint has responses to: sampling it again", prompt.id)
            self._counts["restarted"] += 1
            return slot
        self._counts["restarted"] += saved.get("restarts", False)
        calls = {key: outputs_from(outputs) for key, outputs in saved.get("calls", {}).items()}
        if saved["group"] is not None:
            slot.group = group_from(saved["group"], prompt, self._media)
        elif calls or "program" in saved:
            slot.saved = SavedRollout(calls, saved.get("program", {}))
        if slot.group is not None and slot.group.multi_turn:
            lengths = [
                max((len(t.sampled_ids) for t in s.rollout.turns), default=0) for s in slot.group.samples if s.rollout
            ]
        elif slot.group is not None:
            lengths = [len(sample.response_ids) for sample in slot.group.samples]
        else:
            lengths = [0 if output is None else len(output.token_ids) for output in calls.get("", ())]
        num_responses = len(lengths) if slot.group is None else slot.group.num_episodes
        if lengths and num_responses != self.plan.n:
            raise CheckpointMismatchError(
                f"the checkpoint has {num_responses} responses to prompt {prompt.id}, but this config samples"
                f" {self.plan.n}: set the size of groups to {num_responses}"
            )
        if (longest := max(lengths, default=0)) > (limit := self.plan.params.max_new_tokens):
            raise CheckpointMismatchError(
                f"the checkpoint has a response of {longest} tokens to prompt {prompt.id}, but this config allows"
                f" {limit}: set response_length (max_new_tokens) as in the run that saved it"
            )
        return slot

    # -- groups --------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[tuple[GroupQueue, GroupSlot]]:
        return ((queue, slot) for queue in self._queues for slot in queue.slots.values())

    def _begin(self, step: int) -> None:
        """Begin the batch of a step in all queues."""
        self._step, self._wanted = step, True
        until = step + 1 + math.ceil(self.plan.ahead)
        # A resumed run iterates over the counts of all earlier steps here; the bounded deque forgets them.
        self._upcoming.extend(islice(self._batches, until - self._until))
        self._until = until
        for queue in self._queues:
            queue.begin([counts[queue.tag] for counts in self._upcoming], self.plan)

    def _resume(self) -> None:
        """Continue or start the groups that have waited since the last batch."""
        for _, slot in self._all():
            if slot.rollout is not None:
                slot.rollout.release()
                self._requests.resume(slot.rollout.pending)
        self._start([(queue, slot) for queue, slot in self._all() if slot.group is None and slot.rollout is None])

    def _admit(self) -> None:
        """Start as many of the next prompts as the queues' capacities allow."""
        # Rounds: engine batches must not depend on which group ends first (see the module's docstring).
        if not self.plan.ahead and any(queue.num_unfinished for queue in self._queues):
            return
        self._observe()
        self._start(
            (queue, slot)
            for queue in self._queues
            for slot in queue.join((queue.count if self._wanted else 0) + queue.extra, self.plan.prompt, self._step)
        )

    def _observe(self) -> None:
        """Report scored groups in the order of their positions, which timing does not change in a round."""
        observed, self._observed = self._observed, []
        if self.plan.sampled is not None:
            for tag, _, group in sorted(observed, key=lambda entry: entry[:2]):
                self.plan.sampled.observe(tag, group)

    def _start(self, slots: Iterable[tuple[GroupQueue, GroupSlot]]) -> None:
        plan = self.plan
        for queue, slot in slots:
            saved, slot.saved = slot.saved, None
            # A restored rollout keeps the step of its first tokens, because its staleness counts from there.
            if saved is None:
                slot.born = self._step
            terms = GroupTerms(
                params=plan.params,
                n=plan.n,
                # With `born`, so that a group that was restarted for staleness gets other random numbers.
                seed_of=None if self._seed is None else (self._seed, "train", slot.born),
                id_prefix=f"train/{self._step}/",
                routed_experts=plan.routed_experts,
            )
            sampled, program = saved.sampled if saved else None, plan.program() if plan.program else None
            rollout = slot.rollout = GroupContext(self._requests, slot.prompt, terms, self._scorer, sampled, program)
            if saved is not None:
                rollout.program.restore(saved.state)
            rollout.task = background(self._run(queue, slot, rollout), name=f"rollout of {slot.prompt.id}")
            self._tasks.add(rollout.task)
            rollout.task.add_done_callback(self._tasks.discard)

    async def _run(self, queue: GroupQueue, slot: GroupSlot, rollout: GroupContext) -> None:
        try:
            group = await rollout.run()
            self._rewards += RewardStats.of([group])
            if self.plan.sampled is not None:
                self._observed.append((queue.tag, slot.position, group))
            is_kept = self.plan.keep is None or self.plan.keep(group)
            self._counts["left out"] += not is_kept
            queue.finish(slot, group if is_kept else None)
            # Otherwise the batch is complete, and the slots are about to be another role's.
            if self._wanted or self.plan.concurrent:
                self._admit()
            if queue.is_complete:
                self._changed.set()
        except Exception as error:
            self._failure = self._failure or error
            self._changed.set()

    def _cancel(self, slot: GroupSlot) -> None:
        """Cancel the running program of a group, if any. The group can be started again."""
        if slot.rollout is not None:
            self._requests.cancel(slot.rollout.pending)
            slot.rollout.task.cancel()
            slot.rollout = None

    def _drop_stale(self) -> None:
        """Restart groups that would exceed the staleness bound when they are trained on."""
        if self.plan.stale == "reuse":
            return
        bound = math.ceil(self.plan.ahead)
        for queue in self._queues:
            ends = list(accumulate(queue.counts))
            for position, slot in enumerate(queue.slots.values()):
                begun = slot.group is not None or slot.rollout is not None or slot.saved is not None
                # `bisect` is the number of batches that are full before this position: the group is trained on so
                # many steps from now.
                if begun and self._step + bisect(ends, position) - slot.born > bound:
                    self._cancel(slot)
                    queue.restart(slot, self._step)
                    self._counts["stale"] += 1

    async def _pause(self) -> None:
        """Interrupt unfinished groups, because other roles need the engine's slots. Keep partial outputs if configured.

        Cancels groups without tokens, and all interrupted groups unless `keep_partials`; they restart later. Without
        `ahead`, unfinished groups exist only after a resume with a smaller bound: they are cancelled as well, because
        `RequestQueue.drained` would wait for them.
        """
        keeps = self.plan.keep_partials and self.plan.ahead > 0
        running = [(slot, slot.rollout) for _, slot in self._all() if slot.rollout is not None]
        # Before the pause: a program whose request ends meanwhile would submit its next one.
        for _, rollout in running:
            rollout.hold()
        await self._requests.pause([pending for _, rollout in running for pending in rollout.pending])
        for slot, rollout in running:
            is_paused = slot.rollout is not None and any(request.state is PAUSED for request in rollout.pending)
            if is_paused and not (keeps and rollout.has_tokens):
                self._cancel(slot)


def _saved_slot(slot: GroupSlot, media: MediaFolder | None) -> dict[str, Any]:
    """A group as plain values: complete as `group`, else with the outputs of each call by its key as `calls`."""
    values: dict[str, Any] = {
        "position": slot.position,
        "id": slot.prompt.id,
        "born": slot.born,
        "group": None if slot.group is None else saved_group(slot.group, media),
    }
    if slot.group is not None or slot.rollout is not None or slot.saved is not None:
        values["prompt"] = _digest(slot.prompt)
    saved = slot.saved
    if slot.rollout is not None:
        state = slot.rollout.program.snapshot()
        if state is None:
            return values | {"restarts": True}
        saved = SavedRollout(slot.rollout.sampled if slot.rollout.has_tokens else {}, state)
    if saved is not None:
        if saved.sampled:
            values["calls"] = {key: saved_outputs(outputs) for key, outputs in saved.sampled.items()}
        if saved.state:
            values["program"] = dict(saved.state)
    return values


def _digest(prompt: Prompt) -> str:
    """Digest of a prompt's id, tokens and images: the responses in a checkpoint belong to this prompt only."""
    images = "".join(f" {media.digest}" for media in prompt.media)
    return hashlib.sha256(f"{prompt.id} {prompt.tokens.tolist()}{images}".encode()).hexdigest()[:16]
