"""The jobs of a fabric: processes that introduced themselves at a ring socket, and their users.

A job is identified by the kernel (its pidfd and its uid), not by its own claim. All resources of
its sessions are charged to it, and to its user, and are released when it ends, immediately, no
matter which other processes hold its descriptors. A process id is only used while its process is
known to be alive, so reuse of process ids does no harm.
"""

import asyncio
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from sealane._native import JobAccount, SharedLine, SharedRegion, UserAccount
from sealane.daemon.fabric.settings import FabricSettings
from sealane.errors import UnavailableError, UsageError

TOKEN_BYTES = 16
JOBS_MAX = 1024
"""Limit of living processes that have introduced themselves."""
JOBS_OF_USER_MAX = 256
"""The same for one user, so that no user takes the places of all others."""
_COUNT_MAX = (1 << 63) - 1
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
_PEER_CREDENTIALS = struct.Struct("iII")


@dataclass(slots=True, kw_only=True)
class User:
    """A user with running jobs."""

    uid: int
    account: UserAccount
    """Its jobs' use of the shared rate, and their operations."""
    jobs: "list[Job]" = field(default_factory=list)

    @property
    def regions(self) -> list[SharedRegion]:
        """Region of each open session and listener of all its jobs."""
        return [region for job in self.jobs for region in job.regions.values()]


@dataclass(slots=True, kw_only=True)
class Job:
    """A process that may have sessions."""

    name: str
    """`jobs/{pid}-{number}`, unique in this fabric."""
    pid: int
    user: User
    """Whom it ran as when it introduced itself."""
    token: bytes
    account: JobAccount
    """Its sessions' use of the shared rate, and their operations."""
    pidfd: int
    regions: dict[str, SharedRegion] = field(default_factory=dict)
    """Regions of its open sessions and listeners, by name; some may share one."""
    created: WeakValueDictionary[str, SharedRegion] = field(default_factory=WeakValueDictionary)
    """Regions in use, by the session or listener that each was created for, also after its end."""

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


def memory_of(regions: Iterable[SharedRegion]) -> int:
    """Return the bytes of these regions; one that sessions share counts once."""
    return sum(region.size_bytes for region in set(regions))


class Jobs:
    """Watches the processes; calls `on_gone` for each one that has ended."""

    def __init__(self, settings: FabricSettings, *, on_gone: Callable[[Job], None]) -> None:
        self._settings = settings
        self._on_gone = on_gone
        self._line = SharedLine(settings.rate_max_bits_per_second)
        self._users: dict[int, User] = {}
        self._by_process: dict[tuple[int, int], Job] = {}
        """By process id and uid: a process that changes its user is another job from then on."""
        self._by_token: dict[bytes, Job] = {}
        self._count = 0

    def introduce(self, connection: socket.socket) -> bytes:
        """Register the process at the other end, or find it; return its job token.

        UnavailableError `fabric.jobs.gone` if it has ended in the meantime, `.limit` if there are
        too many.
        """
        pid, pidfd, uid = peer_of(connection)
        return self.take_in(pid, pidfd, uid).token

    def take_in(self, pid: int, pidfd: int, uid: int) -> Job:
        """Find or create the job of a user's process; takes over the descriptor."""
        known = self._by_process.get((pid, uid))
        if known is not None and not known.is_gone:
            os.close(pidfd)
            return known
        if known is not None:
            # The process id belongs to another process now.
            self._forget(known)
        user = self._users.get(uid) or self._new_user(uid)
        self._count += 1
        limits = self._settings.limits
        job = Job(
            name=f"jobs/{pid}-{self._count}",
            pid=pid,
            user=user,
            token=secrets.token_bytes(TOKEN_BYTES),
            account=user.account.add_job(
                rate_bits_per_second=self._settings.job_rate_bits_per_second,
                receives=limits.receives,
                sends=limits.sends,
            ),
            pidfd=pidfd,
        )
        try:
            self._check_new(job)
        except UnavailableError:
            os.close(pidfd)
            raise
        self._users[uid] = user
        user.jobs.append(job)
        self._by_process[pid, uid] = job
        self._by_token[job.token] = job
        asyncio.get_running_loop().add_reader(pidfd, self._forget, job)
        return job

    def _check_new(self, job: Job) -> None:
        if job.is_gone:
            raise UnavailableError("fabric.jobs.gone", f"process {job.pid} has ended")
        for known, most, whose in (
            (len(self._by_process), JOBS_MAX, "jobs"),
            (len(job.user.jobs), JOBS_OF_USER_MAX, f"jobs of user {job.user.uid}"),
        ):
            if known >= most:
                raise UnavailableError(
                    "fabric.jobs.limit", f"{known} {whose} are known already; allowed: {most}"
                )

    def _new_user(self, uid: int) -> User:
        limits = self._settings.user_limits
        return User(
            uid=uid,
            account=self._line.add_user(
                rate_bits_per_second=self._settings.rate_max_bits_per_second
                if limits is None
                else self._settings.rate_of(limits),
                receives=_COUNT_MAX if limits is None else limits.receives,
                sends=_COUNT_MAX if limits is None else limits.sends,
            ),
        )

    def of(self, token: bytes, *, uid: int | None = None) -> Job:
        """Return the living job with that token, of that user (None: of any).

        UsageError `session.job.unknown`.
        """
        job = self._by_token.get(token)
        if job is None or uid not in (None, job.user.uid):
            raise UsageError(
                "session.job.unknown",
                "no running process has introduced itself with that token at the ring socket",
            )
        return job

    def list(self) -> list[Job]:
        """Return the jobs in order of registration."""
        return list(self._by_token.values())

    def close(self) -> None:
        """Stop watching all processes."""
        for job in self.list():
            self._release(job)

    def _forget(self, job: Job) -> None:
        if self._by_token.get(job.token) is job:
            self._release(job)
            self._on_gone(job)

    def _release(self, job: Job) -> None:
        del self._by_process[job.pid, job.user.uid]
        del self._by_token[job.token]
        job.user.jobs.remove(job)
        if not job.user.jobs:
            del self._users[job.user.uid]
        asyncio.get_running_loop().remove_reader(job.pidfd)
        os.close(job.pidfd)


def peer_of(connection: socket.socket) -> tuple[int, int, int]:
    """Return process id, pidfd and uid of the process that made the connection.

    Before Linux 6.5 the kernel doesn't provide the pidfd; it is then opened by process id. If the
    process ended before that and its id was reused, everything registered here ends with the
    process that now has the id, and no honest job is left that could use it.

    UnavailableError `fabric.jobs.gone`; `fabric.jobs.unseen` for a process of another PID namespace
    that isn't below this one's, which has no number here.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(packed)
    if pid == 0:
        raise UnavailableError(
            "fabric.jobs.unseen",
            f"a process of user {uid} is in a PID namespace that this daemon doesn't see into",
        )
    try:
        return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), uid
    except OSError:
        pass
    try:
        return pid, os.pidfd_open(pid), uid
    except OSError as error:
        raise UnavailableError(
            "fabric.jobs.gone", f"process {pid} can't be watched: {error.strerror}"
        ) from error
