"""Roles that share slots take turns: whoever works has the memory, and the others have moved what they can to the host.

    publish    take(actor_train: weights, actor_infer: engine)    optimizer state and gradients leave, the engine wakes
    rollout    take(actor_infer: engine)                          the trainer's weights leave, unless they are lent
    logprobs   take(reference: weights)                           the engine sleeps, the reference comes back
    train      take(actor_train: weights, grads, optimizer)       the reference leaves, the trainer comes back

Nothing moves before somebody else needs the slots, so roles that share none are never called, and neither is a role
that works twice in a row. Turns of roles that share slots exclude each other; others run side by side.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from contextlib import AbstractContextManager

Parts = frozenset[str]
"""Names of what a role has on its slots: `weights`, `grads`, `optimizer`; `engine`."""


class SlotUser(Protocol):
    """A role on slots, as turn-taking sees it. Parts that are where they shall go already may be named again."""

    name: str

    @property
    def slots(self) -> frozenset[int]:
        """Which it sits on."""

    @property
    def movable(self) -> Parts:
        """What it can move; empty for a role that keeps everything where it is."""

    async def start(self) -> None:
        """Come into being, with every part on the slots."""

    async def leave(self, parts: Parts) -> None:
        """Give the slots' memory back."""

    async def enter(self, parts: Parts) -> None:
        """Take it again."""


@dataclass(slots=True)
class _Stay:
    """Where a tenant's parts are: on the slots, unless they are in one of the sets."""

    tenant: SlotUser
    away: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    """On their way; for good where that was cut short."""


@dataclass(eq=False, slots=True)
class _Turn:
    """What is done in it may go on in tasks that outlive it: these see that it is over."""

    roles: frozenset[str]
    over: bool = False


class SlotLeases:
    """Whose turn it is on every slot. Lives on the driver's event loop.

    A turn ends when what is done in it ends, and every call to a worker has a deadline: so has every wait for a turn.
    """

    def __init__(self, stage: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()) -> None:
        """`stage` accounts for the time that moving takes: `offload` and `onload`."""
        self._stage = stage
        self._stays: dict[str, _Stay] = {}
        self._loans: dict[str, tuple[str, Parts]] = {}
        """By borrower."""
        self._turns: list[_Turn] = []
        self._ended = asyncio.Event()
        self._moving = asyncio.Lock()
        self._around: ContextVar[tuple[_Turn, ...]] = ContextVar("turns around this", default=())

    async def admit(self, tenant: SlotUser) -> None:
        """Start a role with the slots that it shares to itself. Later ones are not there to be moved yet."""
        async with self._moving:
            for stay in self._borrowers_first():
                if stay.tenant.slots & tenant.slots:
                    await self._leave(stay, stay.tenant.movable)
            await tenant.start()
            self._stays[tenant.name] = _Stay(tenant)

    def lend(self, lender: str, parts: Collection[str], borrower: str) -> None:
        """`borrower` works with these very `parts` of `lender`, which stay until it has left."""
        self._loans[borrower] = lender, frozenset(parts)

    @asynccontextmanager
    async def take(self, needs: Mapping[str, Collection[str]]) -> AsyncIterator[None]:
        """A turn of the roles in `needs`, with these parts of each on the slots.

        A turn inside of another sends nobody away whose turn the other is.
        """
        around = tuple(turn for turn in self._around.get() if not turn.over)
        keep = frozenset().union(*(turn.roles for turn in around))
        mine = _Turn(frozenset(needs))
        while any(self._exclude(mine.roles, turn.roles - keep) for turn in self._turns):
            await self._ended.wait()
        self._turns.append(mine)
        token = self._around.set((*around, mine))
        try:
            async with self._moving:
                await self._make_room({name: frozenset(parts) for name, parts in needs.items()}, keep)
            yield
        finally:
            self._around.reset(token)
            mine.over = True
            self._turns.remove(mine)
            self._ended.set()
            self._ended = asyncio.Event()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _exclude(self, roles: frozenset[str], others: frozenset[str]) -> bool:
        """Whether a turn of `roles` has to wait for one of `others`. A role does not exclude itself."""
        return any(self._share(role, other) for role in roles for other in others - roles)

    def _share(self, role: str, other: str) -> bool:
        if role == other or role not in self._stays or other not in self._stays:
            return False
        return bool(self._stays[role].tenant.slots & self._stays[other].tenant.slots)

    async def _make_room(self, needs: Mapping[str, Parts], keep: frozenset[str]) -> None:
        """Who has no turn leaves the slots that are needed; of those who have one together, what nobody needs."""
        for stay in self._borrowers_first():
            name = stay.tenant.name
            if (name in needs or name not in keep) and any(self._share(name, other) for other in needs):
                await self._leave(stay, stay.tenant.movable - needs.get(name, frozenset()))
        for name, parts in needs.items():
            if name in self._stays:
                await self._enter(self._stays[name], parts & self._stays[name].tenant.movable)

    def _borrowers_first(self) -> list[_Stay]:
        """What they have borrowed is free to leave once they have left."""
        return sorted(self._stays.values(), key=lambda stay: stay.tenant.name not in self._loans)

    async def _leave(self, stay: _Stay, parts: Parts) -> None:
        name = stay.tenant.name
        going = (
            parts - stay.away - frozenset().union(*(lent for lender, lent in self._loans.values() if lender == name))
        )
        if going:
            stay.unsettled |= going
            with self._stage("offload"):
                await stay.tenant.leave(going)
            stay.unsettled -= going
            stay.away |= going
            self._loans.pop(name, None)

    async def _enter(self, stay: _Stay, parts: Parts) -> None:
        coming = parts & (stay.away | stay.unsettled)
        if coming:
            stay.away -= coming
            stay.unsettled |= coming
            with self._stage("onload"):
                await stay.tenant.enter(coming)
            stay.unsettled -= coming
