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
    """A role that occupies slots, as `SlotLeases` sees it. `offload` and `onload` are idempotent."""

    name: str

    @property
    def slots(self) -> frozenset[int]:
        """Global numbers of the slots that the role occupies."""

    @property
    def movable(self) -> Parts:
        """Parts that can be offloaded; empty for a role that keeps everything on its slots."""

    async def start(self) -> None:
        """Start the role, with every part on the slots."""

    async def offload(self, parts: Parts) -> None:
        """Release the slots' memory of these parts."""

    async def onload(self, parts: Parts) -> None:
        """Allocate the slots' memory of these parts again."""


@dataclass(slots=True)
class _State:
    """State of one role's parts: on the slots, unless a part is in one of the two sets."""

    role: SlotUser
    offloaded: set[str] = field(default_factory=set)
    moving: set[str] = field(default_factory=set)
    """Parts that are moving. A part stays here if its move was interrupted."""


@dataclass(eq=False, slots=True)
class _Lease:
    """One lease. Tasks that started within it may outlive it; they see from `ended` that it ended."""

    roles: frozenset[str]
    ended: bool = False


class SlotLeases:
    """Leases of slots to roles. Lives on the driver's event loop.

    A lease ends when its `take` block ends. Every worker call has a deadline, so the wait for a lease is bounded too.
    """

    def __init__(self, stage: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()) -> None:
        """`stage` is a context manager factory that records the time of each move: `offload` and `onload`."""
        self._stage = stage
        self._states: dict[str, _State] = {}
        self._shared: dict[str, tuple[str, Parts]] = {}
        """Parts that a role uses directly: their owner and their names, by user."""
        self._leases: list[_Lease] = []
        self._ended = asyncio.Event()
        self._moving = asyncio.Lock()
        self._around: ContextVar[tuple[_Lease, ...]] = ContextVar("leases around this", default=())

    async def start(self, role: SlotUser) -> None:
        """Start a role while the roles that share its slots are offloaded.

        Roles that are started later occupy no memory yet.
        """
        async with self._moving:
            for state in self._users_first():
                if state.role.slots & role.slots:
                    await self._offload(state, state.role.movable)
            await role.start()
            self._states[role.name] = _State(role)

    def share(self, owner: str, parts: Collection[str], user: str) -> None:
        """Let `user` use these `parts` of `owner` directly. They stay on the slots until `user` has offloaded."""
        self._shared[user] = owner, frozenset(parts)

    @asynccontextmanager
    async def take(self, needs: Mapping[str, Collection[str]], *, join: bool = False) -> AsyncIterator[None]:
        """Hold a lease for the roles in `needs`, with the named parts of each role on the slots.

        Blocks until no conflicting lease is active. A nested lease does not offload roles of the leases around it,
        unless it names them in `needs`. With `join`, the same holds for active leases that have all roles in `needs`,
        whichever task took them.
        """
        # A task copies its context when it starts and may outlive the leases in it.
        around = tuple(lease for lease in self._around.get() if not lease.ended)
        mine = _Lease(frozenset(needs))
        while True:
            joined = [lease for lease in self._leases if join and mine.roles <= lease.roles]
            keep = frozenset().union(*(lease.roles for lease in (*around, *joined)))
            if not any(
                self._overlap(role, other)
                for lease in self._leases
                for role in mine.roles
                for other in lease.roles - keep - mine.roles
            ):
                break
            await self._ended.wait()
        # No `await` since the test: two waiting takers would both see free slots.
        self._leases.append(mine)
        token = self._around.set((*around, mine))
        try:
            # One move at a time: two leases that do not conflict may still move parts of the same role.
            async with self._moving:
                await self._move({name: frozenset(parts) for name, parts in needs.items()}, keep)
            yield
        finally:
            self._around.reset(token)
            mine.ended = True
            self._leases.remove(mine)
            self._ended.set()
            self._ended = asyncio.Event()

    def _overlap(self, role: str, other: str) -> bool:
        """True if two different started roles share slots."""
        if role == other or role not in self._states or other not in self._states:
            return False
        return bool(self._states[role].role.slots & self._states[other].role.slots)

    async def _move(self, needs: Mapping[str, Parts], keep: frozenset[str]) -> None:
        """Offload roles without a lease on these slots. Roles in `needs` offload only the parts that are not needed."""
        for state in self._users_first():
            name = state.role.name
            if (name in needs or name not in keep) and any(self._overlap(name, other) for other in needs):
                await self._offload(state, state.role.movable - needs.get(name, frozenset()))
        for name, parts in needs.items():
            if name not in self._states:
                continue
            state = self._states[name]
            if away := parts & (state.offloaded | state.moving):
                # `moving` until the call returns: after an interruption the parts count as on neither side, and both
                # directions repeat the move.
                state.offloaded -= away
                state.moving |= away
                with self._stage("onload"):
                    await state.role.onload(away)
                state.moving -= away

    def _users_first(self) -> list[_State]:
        """All roles, users of shared parts first: their offload releases those parts."""
        return sorted(self._states.values(), key=lambda state: state.role.name not in self._shared)

    async def _offload(self, state: _State, parts: Parts) -> None:
        name = state.role.name
        shared = frozenset().union(*(parts for owner, parts in self._shared.values() if owner == name))
        if parts := parts - state.offloaded - shared:
            state.moving |= parts
            with self._stage("offload"):
                await state.role.offload(parts)
            state.moving -= parts
            state.offloaded |= parts
            self._shared.pop(name, None)
