"""The section `[access]` of the configuration: users and groups of each party."""

import grp
import pwd
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, model_validator

from sealane.daemon.runtime.config_types import RunDir, Section
from sealane.daemon.runtime.overflow_ids import overflow_ids
from sealane.daemon.runtime.parties import Members, MembersOf, Party

ID_MAX: Final = 2**32 - 2
ENTRIES_MAX: Final = 1024
"""Of one list."""
SHARED_RUN_DIR: Final = "/run/sealane-jobs"
_ALLOWED: Final = '"user:" or "group:" and a name or number'


def mapped(ids: list[int]) -> list[int]:
    """Return numbers of users or groups; ValueError for duplicates, or one of no single user."""
    if len(set(ids)) != len(ids):
        raise ValueError("numbers without duplicates")
    if set(ids) & {*overflow_ids()}:
        raise ValueError(
            f"other numbers than {' and '.join(str(each) for each in sorted({*overflow_ids()}))}, "
            "which stands for every user or group that isn't mapped here"
        )
    return ids


def _number(kind: str, name: str) -> int | None:
    """Return the number of a name; None if this machine has no such name at present."""
    if name.isascii() and name.isdigit():
        number = int(name)
    else:
        try:
            number = pwd.getpwnam(name).pw_uid if kind == "user" else grp.getgrnam(name).gr_gid
        except KeyError:
            return None
        except ValueError:
            raise ValueError(_ALLOWED) from None
    if number > ID_MAX:
        raise ValueError(f"a number up to {ID_MAX}")
    return number


def _numbered(value: object) -> object:
    """Replace a name by its number, so that a later change of it admits nobody unnoticed.

    A name without one stays, and admits nobody: a directory service that can't be reached must not
    keep the daemon from starting.
    """
    kind, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not colon or kind not in {"user", "group"} or not name:
        raise ValueError(_ALLOWED)
    number = _number(kind, name)
    if number is None:
        return value
    mapped([number])
    return f"{kind}:{number}"


Entries = Annotated[
    list[Annotated[str, BeforeValidator(_numbered)]],
    Field(default_factory=list, max_length=ENTRIES_MAX),
]


class AccessConfig(Section):
    """Who besides the daemon's user and root may call this daemon, and as what."""

    operators: Entries
    jobs: Entries
    readers: Entries
    run_dir: RunDir = SHARED_RUN_DIR

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.operators or self.jobs or self.readers):
            raise ValueError("at least one entry in operators, jobs or readers")
        return self

    @property
    def unknown(self) -> list[str]:
        """The entries whose names this machine doesn't have: they admit nobody."""
        entries = [*self.operators, *self.jobs, *self.readers]
        return [entry for entry in entries if not _is_number(entry)]

    @property
    def members(self) -> MembersOf:
        """The numbers of each party."""
        return {
            Party.OPERATOR: _members(self.operators),
            Party.JOB: _members(self.jobs),
            Party.READER: _members(self.readers),
        }


def _is_number(entry: str) -> bool:
    return entry.partition(":")[2].isdecimal()


def _members(entries: list[str]) -> Members:
    pairs = [entry.split(":") for entry in entries if _is_number(entry)]
    return Members(
        uids=frozenset(int(number) for kind, number in pairs if kind == "user"),
        gids=frozenset(int(number) for kind, number in pairs if kind == "group"),
    )
