"""One message to many peers, from memory that their sessions share."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sealane.client.messages import Reliability, Sent
from sealane.client.session import Session, check_terms
from sealane.errors import Error, UsageError

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
) -> list[Sent | Error]:
    """Send `data` over each of these sessions, which share a region; return each one's result.

    The bytes exist once; each session seals them with its own key. A peer that is slow or gone
    delays no other peer's message. The call returns when all have ended; `deadline_seconds` bounds
    that, also while a ring is full. Until then the bytes must not change. Arguments as of
    `Session.send`. A session's error, such as `session.draining`, is its result.

    Raises UsageError, with nothing sent, for arguments out of range, for bytes outside the region,
    and if the sessions have different regions (`session.post.elsewhere`).
    """
    if len({id(session.ring.region) for session in sessions}) > 1:
        raise UsageError(
            "session.post.elsewhere", "the sessions have different regions: see region_of"
        )
    check_terms(immediate, priority, deadline_seconds)
    for session in sessions[:1]:
        session.posts.place(data, 0, None)

    async def outcome(session: Session) -> Sent | Error:
        try:
            return await session.send(
                data,
                reliability=reliability,
                immediate=immediate,
                priority=priority,
                deadline_seconds=deadline_seconds,
            )
        except Error as error:
            # The frames of a traceback would hold `data` as long as somebody keeps the result.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    return await asyncio.gather(*map(outcome, sessions))
