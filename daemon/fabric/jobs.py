"""The jobs of a fabric: processes that introduced themselves at the ring socket.

A job is named by the kernel (its pidfd), not by what it says of itself. All that its sessions use
is counted for it, and ends with it: at once, whoever else holds its descriptors. A process number
is only looked at while the process that has it is known to live, so its reuse changes nothing.
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
"""Processes that live and have introduced themselves."""
_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
_PEER_CREDENTIALS = struct.Struct("iII")


@dataclass(slots=True, kw_only=True)
class Job:
    """A process with sessions, or without any yet."""

    name: str
    """`jobs/{pid}-{number}`, unique at this fabric."""
    pid: int
    token: bytes
    account: JobAccount
    """What its sessions use of the shared rate, and of its operations."""
    pidfd: int
    regions: dict[str, int] = field(default_factory=dict)
    """Region bytes of its open sessions and listeners, by their names."""

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


class Jobs:
    """Watches the processes; `on_gone` is told of each that has ended."""

    def __init__(self, settings: FabricSettings, *, on_gone: Callable[[Job], None]) -> None:
        self._settings = settings
        self._on_gone = on_gone
        self._line = SharedLine(settings.rate_max_bits_per_second)
        self._by_pid: dict[int, Job] = {}
        self._by_token: dict[bytes, Job] = {}
        self._count = 0

    def introduce(self, connection: socket.socket) -> bytes:
        """Take the process at the other end in, or find it; return its job token.

        UnavailableError `fabric.jobs.gone` if it has ended meanwhile, `.limit` if there are too
        many.
        """
        return self.take_in(*peer_of(connection)).token

    def take_in(self, pid: int, pidfd: int) -> Job:
        """Find the job of a process, or make it; the descriptor is taken over."""
        known = self._by_pid.get(pid)
        if known is not None and not known.is_gone:
            os.close(pidfd)
            return known
        if known is not None:
            # The number is another process's now.
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
        """Return the living job of that token; UsageError `session.job.unknown`."""
        job = self._by_token.get(token)
        if job is None:
            raise UsageError(
                "session.job.unknown",
                "no running process has introduced itself with that token at the ring socket",
            )
        return job

    def list(self) -> list[Job]:
        """Return the jobs, in the order in which they came."""
        return list(self._by_token.values())

    def close(self) -> None:
        """Watch none of them any more."""
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
    """Return process number and pidfd of the process that made the connection.

    A kernel before 6.5 can't tell the second. There it is opened by number: should the process have
    ended before that, and its number be another's, nothing lives for it longer than that other one,
    and an honest job is not there any more to use what it gets.
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
