"""The jobs of a fabric: processes that introduced themselves at the ring socket.

A job is identified by the kernel (its pidfd), not by its own claim. All resources of its sessions
are charged to it and are released when it ends, immediately, no matter which other processes hold
its descriptors. A process id is only used while its process is known to be alive, so reuse of
process ids does no harm.
"""

import asyncio
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from sealane._native import JobAccount, SharedLine
from sealane.daemon.fabric.settings import FabricSettings
from sealane.errors import UnavailableError, UsageError

TOKEN_BYTES = 16
JOBS_MAX = 1024
"""Limit of living processes that have introduced themselves."""
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
_PEER_CREDENTIALS = struct.Struct("iII")


@dataclass(slots=True, kw_only=True)
class Job:
    """A process that may have sessions."""

    name: str
    """`jobs/{pid}-{number}`, unique in this fabric."""
    pid: int
    token: bytes
    account: JobAccount
    """Its sessions' use of the shared rate, and their operations."""
    pidfd: int
    regions: dict[str, int] = field(default_factory=dict)
    """Region bytes of its open sessions and listeners, by name."""

    @property
    def is_gone(self) -> bool:
        """Return whether the process has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


class Jobs:
    """Watches the processes; calls `on_gone` for each one that has ended."""

    def __init__(self, settings: FabricSettings, *, on_gone: Callable[[Job], None]) -> None:
        self._settings = settings
        self._on_gone = on_gone
        self._line = SharedLine(settings.rate_max_bits_per_second)
        self._by_pid: dict[int, Job] = {}
        self._by_token: dict[bytes, Job] = {}
        self._count = 0

    def introduce(self, connection: socket.socket) -> bytes:
        """Register the process at the other end, or find it; return its job token.

        UnavailableError `fabric.jobs.gone` if it has ended in the meantime, `.limit` if there are
        too many.
        """
        return self.take_in(*peer_of(connection)).token

    def take_in(self, pid: int, pidfd: int) -> Job:
        """Find or create the job of a process; takes over the descriptor."""
        known = self._by_pid.get(pid)
        if known is not None and not known.is_gone:
            os.close(pidfd)
            return known
        if known is not None:
            # The process id belongs to another process now.
            self._forget(known)
        self._count += 1
        limits = self._settings.limits
        job = Job(
            name=f"jobs/{pid}-{self._count}",
            pid=pid,
            token=secrets.token_bytes(TOKEN_BYTES),
            account=self._line.add_job(
                rate_bits_per_second=self._settings.job_rate_bits_per_second,
                receives=limits.receives,
                sends=limits.sends,
            ),
            pidfd=pidfd,
        )
        if job.is_gone or len(self._by_pid) >= JOBS_MAX:
            os.close(pidfd)
            if len(self._by_pid) >= JOBS_MAX:
                raise UnavailableError(
                    "fabric.jobs.limit", f"{JOBS_MAX} jobs are known already; allowed: {JOBS_MAX}"
                )
            raise UnavailableError("fabric.jobs.gone", f"process {pid} has ended")
        self._by_pid[pid] = job
        self._by_token[job.token] = job
        asyncio.get_running_loop().add_reader(pidfd, self._forget, job)
        return job

    def of(self, token: bytes) -> Job:
        """Return the living job with that token; UsageError `session.job.unknown`."""
        job = self._by_token.get(token)
        if job is None:
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
        del self._by_pid[job.pid]
        del self._by_token[job.token]
        asyncio.get_running_loop().remove_reader(job.pidfd)
        os.close(job.pidfd)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process id and pidfd of the process that made the connection.

    Before Linux 6.5 the kernel doesn't provide the pidfd; it is then opened by process id. If the
    process ended before that and its id was reused, everything registered here ends with the
    process that now has the id, and no honest job is left that could use it.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid: int = _PEER_CREDENTIALS.unpack(packed)[0]
    try:
        return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return pid, os.pidfd_open(pid)
    except OSError as error:
        raise UnavailableError(
            "fabric.jobs.gone", f"process {pid} can't be watched: {error.strerror}"
        ) from error
