"""This gateway's place in the fail-over group of an attached volume (fail-over.md)."""

import uuid
from collections.abc import Awaitable, Callable
from typing import Final, Literal

from sealane.crypto.queue import GroupClaim, group_name

STANDBY: Final = "queue.standby"
"""Reason id of a target that lets another gateway serve the group."""


class GroupMember:
    """A gateway of a group: on standby, or serving in a term that the target has granted."""

    def __init__(self, *, volume_id: uuid.UUID, host_nqn: str) -> None:
        """Begin on standby in the group of the gateways that serve the volume to `host_nqn`."""
        self.group = group_name(volume_id, host_nqn)
        self._term = 0
        self.is_serving = False
        self.accepts_loss = False
        self.is_confirming = False
        self.holder = 0
        """Incarnation of the target that may hold unflushed writes of this gateway; 0: none."""
        self.confirmed = 0
        """Incarnation of the target in which this gateway last began or confirmed its term."""
        self.look: Callable[[], Awaitable[None]] | None = None
        """Observes the group at the target now."""
        self._is_vacant = False
        self.follows_another = False
        """Whether another gateway served last: this one's own unflushed writes are at the target.

        Known once it has observed the group.
        """

    @property
    def state(self) -> Literal["active", "standby"]:
        """Whether this gateway serves the host."""
        return "active" if self.is_serving else "standby"

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
        self.follows_another |= serving_nqn != own_nqn

    def claim(self) -> GroupClaim:
        """Return the claim for a queue: a take-over while on standby."""
        return GroupClaim(
            group=self.group,
            term=self._term,
            is_take_over=not self.is_serving or self.is_confirming,
            accepts_loss=self.accepts_loss and not self.is_serving,
            incarnation=0 if self.follows_another and not self.is_serving else self.holder,
        )

    def serve(self, claim: GroupClaim, *, incarnation: int) -> None:
        """Note that the target has accepted this claim."""
        if claim.is_take_over:
            self._term = claim.term + 1
            self.is_serving = True
            self.confirmed = incarnation

    def stand_by(self) -> None:
        """Note that another gateway has taken over."""
        self.is_serving = False
