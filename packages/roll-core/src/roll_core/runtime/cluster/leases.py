"""Leases of device slots: roles that share slots use their memory in turn, and offload to the host in between.

    publish    take(actor_train: weights, actor_infer: engine)    optimizer and gradients offload, the engine wakes up
    rollout    take(actor_infer: engine)                          the trainer's weights offload, unless they are shared
    logprobs   take(reference: weights)                           the engine sleeps, the reference model onloads
    train      take(actor_train: weights, grads, optimizer)       the reference model offloads, the trainer onloads

A role offloads only when another role needs its slots. Roles that share no slots are therefore never offloaded, and
neither is a role that takes two leases in a row. Leases of roles that share slots exclude each other; others overlap.
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
"""Names of the parts that a role keeps on its slots: `weights`, `grads`, `optimizer`; `engine`."""


class SlotUser(Protocol):
    """A role that occupies slots, as `SlotLeases` sees it.

    `leave` and `enter` are idempotent: parts that are already in place may be named again.
    """

    name: str

    @property
    def slots(self) -> frozenset[int]:
        """Global numbers of the slots that the role occupies."""

    @property
    def movable(self) -> Parts:
        """Parts that can be offloaded; empty for a role that keeps everything on its slots."""

    async def start(self) -> None:
        """Start the role, with every part on the slots."""

    async def leave(self, parts: Parts) -> None:
        """Offload these parts: release the slots' memory."""

    async def enter(self, parts: Parts) -> None:
        """Onload these parts: allocate the slots' memory again."""


@dataclass(slots=True)
class _Stay:
    """State of one role's parts: on the slots, unless a part is in one of the two sets."""

    tenant: SlotUser
    away: set[str] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    """Parts that are moving. A part stays here if its move was interrupted."""


@dataclass(eq=False, slots=True)
class _Turn:
    """One active lease. Tasks that started within the lease may outlive it; they see from `over` that it ended."""

    roles: frozenset[str]
    over: bool = False


class SlotLeases:
    """Leases of slots to roles. Lives on the driver's event loop.

    A lease ends when its `take` block ends. Every worker call has a deadline, so the wait for a lease is bounded too.
    """

    def __init__(self, stage: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()) -> None:
        """`stage` is a context manager factory that records the time of each move: `offload` and `onload`."""
        self._stage = stage
        self._stays: dict[str, _Stay] = {}
        self._loans: dict[str, tuple[str, Parts]] = {}
        """Shared parts by borrower: the lender and its parts."""
        self._turns: list[_Turn] = []
        self._ended = asyncio.Event()
        self._moving = asyncio.Lock()
        self._around: ContextVar[tuple[_Turn, ...]] = ContextVar("turns around this", default=())

    async def admit(self, tenant: SlotUser) -> None:
        """Start a role while the roles that share its slots are offloaded.

        Roles that are admitted later have not started yet, so they occupy no memory.
        """
        async with self._moving:
            for stay in self._borrowers_first():
                if stay.tenant.slots & tenant.slots:
                    await self._leave(stay, stay.tenant.movable)
            await tenant.start()
            self._stays[tenant.name] = _Stay(tenant)

    def lend(self, lender: str, parts: Collection[str], borrower: str) -> None:
        """Let `borrower` use these `parts` of `lender` directly.

        They stay on the slots until the borrower has offloaded.
        """
        self._loans[borrower] = lender, frozenset(parts)

    @asynccontextmanager
    async def take(self, needs: Mapping[str, Collection[str]]) -> AsyncIterator[None]:
        """Hold a lease for the roles in `needs`, with the named parts of each role on the slots.

        Blocks until no conflicting lease is active. A nested lease does not offload roles of the leases around it,
        unless it names them in `needs`.
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
        """True if a lease of `roles` conflicts with a lease of `others`. A role does not conflict with itself."""
        return any(self._share(role, other) for role in roles for other in others - roles)

    def _share(self, role: str, other: str) -> bool:
        if role == other or role not in self._stays or other not in self._stays:
            return False
        return bool(self._stays[role].tenant.slots & self._stays[other].tenant.slots)

    async def _make_room(self, needs: Mapping[str, Parts], keep: frozenset[str]) -> None:
        """Offload roles without a lease on these slots. Roles in `needs` offload only the parts that are not needed."""
        for stay in self._borrowers_first():
            name = stay.tenant.name
            if (name in needs or name not in keep) and any(self._share(name, other) for other in needs):
                await self._leave(stay, stay.tenant.movable - needs.get(name, frozenset()))
        for name, parts in needs.items():
            if name in self._stays:
                await self._enter(self._stays[name], parts & self._stays[name].tenant.movable)

    def _borrowers_first(self) -> list[_Stay]:
        """All roles, borrowers first: their offload releases the parts that they borrowed."""
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
