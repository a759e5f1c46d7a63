"""What a target reports of a take-over in a fail-over group."""

from dataclasses import dataclass

from sealane.protocol.kinds import TakeOverCause


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """A gateway, `host_nqn`, serves a group from `term` on; `fenced` served before.

    `fenced` is empty if nobody did; `host_nqn` is empty if the group was forgotten in `term`.
    """

    tenant: str
    group: bytes
    host_nqn: str
    fenced: str
    term: int
    cause: TakeOverCause
    accepts_loss: bool
