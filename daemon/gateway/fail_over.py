"""This gateway's place in the fail-over group of an attached volume (fail-over.md)."""

import uuid
from collections.abc import Awaitable, Callable
from typing import Literal

from sealane.crypto.queue import GroupClaim, group_name


class GroupMember:
    """A gateway of a group: on standby, or serving in a term that the target has granted."""

    def __init__(self, *, volume_id: uuid.UUID, host_nqn: str) -> None:
        """Begin on standby in the group of the gateways that serve the volume to `host_nqn`."""
        self.group = group_name(volume_id, host_nqn)
        self._term = 0
        self.is_serving = False
        self.accepts_loss = False
        self.by_operator = False
        """Whether an operator asks for the take-over in progress; otherwise its host does."""
        self.is_confirming = False
        self.holder = 0
        """Incarnation of the target that may hold unflushed writes of this gateway; 0: none.

        While it confirms: the one that has all of them.
        """
        self.confirmed = 0
        """Incarnation of the target in which this gateway last began or confirmed its term."""
        self.look: Callable[[], Awaitable[None]] | None = None
        """Observes the group at the target now, for the next take-over."""
        self.leave: Callable[[], Awaitable[None]] | None = None
        """Ends its term at the target, which then has all that it has acknowledged."""
        self._is_vacant = False
        self.follows_another = False
        """Whether another gateway served last, or nobody serves: this one's own writes are durable.

        A term ends with a flush. Known once it has observed the group.
        """

    @property
    def state(self) -> Literal["active", "standby"]:
        """Whether this gateway serves the host."""
        return "active" if self.is_serving else "standby"

    def group_of(self, tenant: str) -> str:
        """Return what tells this group from others at the target, where each tenant has its own."""
        return f"{tenant}/{self.group.hex()}"

    async def is_vacant(self) -> bool:
        """Ask the target whether no other gateway serves the host."""
        if self.look is None:
            return False
        await self.look()
        return self._is_vacant

    def observe(self, *, term: int, serving_nqn: str, own_nqn: str) -> None:
        """Note the group's state at the target, for the next claim."""
        self._term = term
        self._is_vacant = serving_nqn in {"", own_nqn}
        self.follows_another = serving_nqn != own_nqn

    def claim(self) -> GroupClaim:
        """Return the claim for a queue: a take-over while on standby.

        A take-over is of the term that was observed last; only who decides on one observes.
        """
        says = self.is_confirming if self.is_serving else not self.follows_another
        return GroupClaim(
            group=self.group,
            term=self._term,
            is_take_over=not self.is_serving,
            accepts_loss=self.accepts_loss and not self.is_serving,
            incarnation=self.holder if says else 0,
            by_operator=self.by_operator and not self.is_serving,
        )

    def serve(self, claim: GroupClaim, *, incarnation: int) -> None:
        """Note that the target, of this incarnation, has accepted this claim."""
        if claim.is_take_over:
            self._term = claim.term + 1
            self.is_serving = True
        if claim.is_take_over or claim.incarnation == incarnation:
            self.confirmed = incarnation

    @property
    def term(self) -> int:
        """Term that it serves in, or that it observed last."""
        return self._term

    def stand_by(self) -> None:
        """Note that another gateway has taken over."""
        self.is_serving = False
