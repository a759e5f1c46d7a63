"""The parties that may call a daemon on its Unix sockets, and the users and groups in each."""

from dataclasses import dataclass
from enum import StrEnum


class Party(StrEnum):
    """What a caller is to this daemon. One caller may be several of them."""

    OPERATOR = "operator"
    JOB = "job"
    READER = "reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The users and groups of one party, by number."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.uids or self.gids)

    def __or__(self, other: "Members") -> "Members":
        return Members(uids=self.uids | other.uids, gids=self.gids | other.gids)


MembersOf = dict[Party, Members]
