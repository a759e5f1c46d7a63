"""What a target reports of a take-over in a fail-over group."""

from dataclasses import dataclass

from sealane.protocol.kinds import TakeOverCause


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """A gateway, `host_nqn`, serves a group from `term` on; `fenced` served before."""

    tenant: str
    group: bytes
    host_nqn: str
    fenced: str
    term: int
    cause: TakeOverCause
    accepts_loss: bool
