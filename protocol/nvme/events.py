"""Asynchronous events of a controller (NVMe Base 2.0 §5.2): parked requests, masks, pending events.

A reported event stays masked until the host reads its log page. The mask is kept per event, not per
event type as the specification says: a host that is slow to read one log must still learn at once
that a namespace's access has changed. Hosts can't otherwise tell the difference.
"""

from enum import Enum
from typing import Self

from sealane.protocol.nvme.constants import EVENT_REQUESTS_MAX, LogPage
from sealane.protocol.nvme.subsystem import Subsystem

_NOTICE = 2
_COMMAND_SET = 6


class Event(Enum):
    """An event: (type, information, log page, bit in OAES and feature 0Bh; 0 if always on)."""

    NAMESPACE_CHANGED = (_NOTICE, 0x00, LogPage.CHANGED_NAMESPACES, 1 << 8)
    ANA_CHANGED = (_NOTICE, 0x03, LogPage.ANA, 1 << 11)
    DISCOVERY_CHANGED = (_NOTICE, 0xF0, LogPage.DISCOVERY, 1 << 31)
    RESERVATION_CHANGED = (_COMMAND_SET, 0x00, LogPage.RESERVATION_NOTIFICATION, 0)

    def __init__(self, kind: int, information: int, page: LogPage, bit: int) -> None:
        self.page = page
        self.bit = bit
        self.result = kind | information << 8 | page << 16

    @classmethod
    def offered(cls, subsystem: Subsystem) -> tuple[Self, ...]:
        """Return the events that a controller of this subsystem can report."""
        offers = {
            cls.NAMESPACE_CHANGED: not subsystem.is_discovery,
            cls.ANA_CHANGED: subsystem.is_multipath,
            cls.DISCOVERY_CHANGED: subsystem.is_discovery,
            cls.RESERVATION_CHANGED: subsystem.has_reservations,
        }
        return tuple(event for event, is_offered in offers.items() if is_offered)


class AsyncEvents:
    """Matches parked requests with events. An event is pending at most once: a natural limit."""

    def __init__(self, subsystem: Subsystem) -> None:
        self._offered = Event.offered(subsystem)
        self._configuration = 0
        self._parked: list[int] = []
        self._pending: list[Event] = []
        self._masked: set[Event] = set()

    # Commands

    def park(self, command_id: int) -> bool:
        """Keep a request for the next event; False if too many are parked."""
        if len(self._parked) >= EVENT_REQUESTS_MAX:
            return False
        self._parked.append(command_id)
        return True

    def configure(self, configuration: int) -> None:
        """Set feature 0Bh, restricted to the events offered: hosts may name others."""
        self._configuration = configuration & sum(event.bit for event in self._offered)
        self._pending = [event for event in self._pending if self._is_enabled(event)]

    def clear(self, page: int, *, is_whole: bool) -> None:
        """Unmask the event of a log page that the host read without asking to retain the event.

        A pending event is dropped only if the page was read `is_whole`: a change between reads of
        two parts of a page must be reported.
        """
        self._masked = {event for event in self._masked if event.page != page}
        if is_whole:
            self._pending = [event for event in self._pending if event.page != page]

    def abort(self, command_id: int) -> bool:
        """Abort a parked request; return whether it was parked."""
        if command_id not in self._parked:
            return False
        self._parked.remove(command_id)
        return True

    def reset(self) -> None:
        """Forget everything, as at a controller reset."""
        self._configuration = 0
        self._parked.clear()
        self._pending.clear()
        self._masked.clear()

    # Inputs

    def report(self, event: Event) -> None:
        """Make an event pending, unless the host has disabled it."""
        is_wanted = event in self._offered and self._is_enabled(event)
        if is_wanted and event not in self._pending:
            self._pending.append(event)

    # Outputs

    def next_completion(self) -> tuple[int, int] | None:
        """Return command id and result of a request that an event completes, if any."""
        for event in self._pending:
            if self._parked and event not in self._masked:
                self._pending.remove(event)
                self._masked.add(event)
                return self._parked.pop(0), event.result
        return None

    # Questions

    @property
    def configuration(self) -> int:
        """Value of feature 0Bh."""
        return self._configuration

    def _is_enabled(self, event: Event) -> bool:
        return event.bit == 0 or bool(self._configuration & event.bit)
