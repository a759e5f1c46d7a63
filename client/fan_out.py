"""One message to many peers, from memory that their sessions share."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sealane.client.messages import Reliability, Sent
from sealane.client.session import Session
from sealane.errors import SessionError, UsageError

if TYPE_CHECKING:
    from sealane.client.messages import Bytes


async def send_to_all(
    sessions: Sequence[Session],
    data: "Bytes",
    *,
    reliability: Reliability | None = None,
    immediate: int | None = None,
    priority: int = 0,
    deadline_seconds: float | None = None,
) -> list[Sent | SessionError]:
    """Send `data` over each of these sessions, which share a region; return what came of each.

    The bytes exist once; each session seals them with its own key. The sessions don't wait for one
    another: a peer that is slow or gone delays only its own result, and `deadline_seconds` bounds
    how long. Until all have ended, the bytes must not change. Arguments as of `Session.send`.

    Raises UsageError, with nothing sent, for what `Session.send` refuses, and
    `session.post.elsewhere` if the sessions have different regions.
    """
    if len({id(session.ring.region) for session in sessions}) > 1:
        raise UsageError(
            "session.post.elsewhere", "the sessions have different regions: see region_of"
        )

    async def outcome(session: Session) -> Sent | SessionError:
        try:
            return await session.send(
                data,
                reliability=reliability,
                immediate=immediate,
                priority=priority,
                deadline_seconds=deadline_seconds,
            )
        except SessionError as error:
            # The frames of a traceback would hold `data` as long as somebody keeps the result.
            return error.with_traceback(None)

    return await asyncio.gather(*map(outcome, sessions))
