"""Single-use, short-lived tokens for fetching the rings of a session."""

import asyncio
import secrets
from dataclasses import dataclass
from pathlib import Path

from sealane.daemon.fabric.ring_socket import TOKEN_BYTES
from sealane.daemon.fabric.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A session and the token for its rings."""

    session: Session
    ring_socket: str
    ring_token: bytes


class Grants:
    """Unclaimed grants of a fabric; a session whose grant expires is closed."""

    def __init__(self, ring_socket: Path, *, timeout_seconds: float) -> None:
        self._ring_socket = ring_socket
        self._timeout_seconds = timeout_seconds
        self._unclaimed: dict[bytes, tuple[Session, asyncio.TimerHandle]] = {}

    def add(self, session: Session) -> Grant:
        """Create the token of a session."""
        token = secrets.token_bytes(TOKEN_BYTES)
        timer = asyncio.get_running_loop().call_later(self._timeout_seconds, self._expire, token)
        self._unclaimed[token] = (session, timer)
        return Grant(session=session, ring_socket=str(self._ring_socket), ring_token=token)

    def claim(self, token: bytes, uid: int) -> tuple[int, int, int, int, int] | None:
        """Hand over the descriptors of the token's session to its user; the caller closes them.

        None if that user has no such grant (any longer), or the session is closed. Another user
        who knows the token doesn't use it up.
        """
        granted = self._unclaimed.get(token)
        if granted is None or granted[0].job.user.uid != uid:
            return None
        session, timer = self._unclaimed.pop(token)
        timer.cancel()
        return session.take_job_descriptors()

    def close(self) -> None:
        """Revoke all grants; the caller closes their sessions."""
        for _, timer in self._unclaimed.values():
            timer.cancel()
        self._unclaimed.clear()

    def _expire(self, token: bytes) -> None:
        session, _ = self._unclaimed.pop(token)
        session.close("session.grant.expired")
