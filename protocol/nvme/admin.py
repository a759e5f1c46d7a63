"""Admin queue of a controller, without I/O.

A submission entry goes in; the answer (data, completion) comes out, or nothing for an event request
that stays parked. Events complete parked requests later (`next_answer`). The listener owns sockets
and time, the data path owns I/O queues.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sealane.protocol.nvme.command import Answer, Command, RefusedError, encode_completion
from sealane.protocol.nvme.constants import (
    BROADCAST_NSID,
    ERROR_ENTRIES_MAX,
    NO_FLOW_CONTROL_HEAD,
    NOTIFICATIONS_MAX,
    QUEUE_DEPTH_MAX,
    AdminOpcode,
    ControllerStatus,
    FabricsType,
    Feature,
    LogPage,
    Property,
    Status,
)
from sealane.protocol.nvme.events import AsyncEvents, Event
from sealane.protocol.nvme.features import (
    HOST_BEHAVIOR_BYTES,
    FeatureRefusedError,
    Features,
    encode_feature_effects,
)
from sealane.protocol.nvme.identify import IdentifyRequest, identify
from sealane.protocol.nvme.in_band import Authentication, QueueAuthentication
from sealane.protocol.nvme.logs import (
    LoggedFailure,
    Notification,
    ana_bytes_max,
    encode_ana,
    encode_changed_namespaces,
    encode_command_effects,
    encode_errors,
    encode_firmware_slot,
    encode_health,
    encode_notification,
    encode_supported,
)
from sealane.protocol.nvme.properties import Properties, Transition
from sealane.protocol.nvme.subsystem import (
    CommandFailure,
    ControllerResources,
    NoResources,
    Subsystem,
)

_GROUPS_ONLY = 0x01
_NOT_ABORTED = 1
_OTHER_CONTENT: Final = 0xFF80_0000
"""CDW14 of Get Log Page: command set identifier and offset type."""
_DISCOVERY_OPCODES: Final = frozenset(AdminOpcode) - {AdminOpcode.ABORT}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    result: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogRequest:
    page: int
    specific: int
    retain_event: bool
    offset: int
    length: int
    nsid: int


class AdminController:
    """One controller: properties, features, identify, logs, events."""

    def __init__(
        self,
        subsystem: Subsystem,
        *,
        controller_id: int,
        keep_alive_ms: int,
        host_id: bytes = bytes(16),
        queue_size: int = QUEUE_DEPTH_MAX,
        flow_control: bool = True,
        authentication: Authentication | None = None,
    ) -> None:
        self._subsystem = subsystem
        self._controller_id = controller_id
        self._queue_size = queue_size
        self._flow_control = flow_control
        self._resources: ControllerResources = NoResources()
        self._properties = Properties(is_discovery=subsystem.is_discovery)
        self._features = Features(subsystem, keep_alive_ms=keep_alive_ms, host_id=host_id)
        self._events = AsyncEvents(subsystem)
        self._authentication = QueueAuthentication(authentication)
        self._completions: deque[Answer] = deque()
        self._changed: set[int] = set()
        self._ana_changes = 0
        self._failures: deque[LoggedFailure] = deque(maxlen=ERROR_ENTRIES_MAX)
        self._failure_count = 0
        self._failures_taken = 0
        self._notifications: deque[tuple[int, Notification, int]] = deque(maxlen=NOTIFICATIONS_MAX)
        self._notification_count = 0
        self._discovery_log = b""
        self._head = 1  # Connect was the first entry
        self._has_io_queues = False
        self._transition = Transition.NONE
        self._handlers = self._make_handlers()
        self._pages = self._make_pages()

    # Commands

    def update(self, subsystem: Subsystem) -> None:
        """Replace the subsystem; reports events for changes of namespaces and their access."""
        before, self._subsystem = self._subsystem, subsystem
        old = {namespace.nsid: namespace for namespace in before.namespaces}
        new = {namespace.nsid: namespace for namespace in subsystem.namespaces}
        for nsid in old.keys() | new.keys():
            was, now = old.get(nsid), new.get(nsid)
            if was is None or now is None or was.block_count != now.block_count:
                self._changed.add(nsid)
                self._events.report(Event.NAMESPACE_CHANGED)
        if {(each.nsid, each.ana_state) for each in before.namespaces} != {
            (each.nsid, each.ana_state) for each in subsystem.namespaces
        }:
            self._ana_changes += 1
        if any(old[nsid].ana_state != new[nsid].ana_state for nsid in old.keys() & new.keys()):
            self._events.report(Event.ANA_CHANGED)

    def set_discovery_log(self, page: bytes) -> None:
        """Set log page 70h; reports an event if its content has changed."""
        if self._discovery_log and page != self._discovery_log:
            self._events.report(Event.DISCOVERY_CHANGED)
        self._discovery_log = page

    def notify_reservation(self, nsid: int, kind: Notification) -> None:
        """Log a reservation notification, unless the host masked it (feature 82h)."""
        if self._features.notification_mask(nsid) >> kind & 1:
            return
        self._notification_count += 1
        self._notifications.append((self._notification_count, kind, nsid))
        self._events.report(Event.RESERVATION_CHANGED)

    def set_resources(self, resources: ControllerResources) -> None:
        """Set the source of the data path's statistics."""
        self._resources = resources

    def set_io_queues(self, *, connected: bool) -> None:
        """Set whether I/O queues exist: while they do, their number can't be negotiated."""
        self._has_io_queues = connected

    # Inputs

    def handle(self, entry: bytes, data: bytes = b"") -> Answer | None:
        """Execute one admin command; None if it is parked."""
        command = Command.decode(entry, data)
        self._head = (self._head + 1) % self._queue_size
        try:
            outcome = self._execute(command)
            if outcome is None:
                return None
            command.check_room(len(outcome.data))
        except (RefusedError, FeatureRefusedError) as error:
            self._log_failure(command, error.status)
            return self._answer(command.command_id, status=error.status)
        return self._answer(command.command_id, result=outcome.result, data=outcome.data)

    def refuse(self, entry: bytes) -> Answer:
        """Answer a command whose data was damaged in transit: it may be sent again."""
        self._head = (self._head + 1) % self._queue_size
        command = Command.decode(entry, b"")
        self._log_failure(command, Status.TRANSIENT_TRANSPORT_ERROR)
        return self._answer(command.command_id, status=Status.TRANSIENT_TRANSPORT_ERROR, retry=True)

    # Outputs

    def next_answer(self) -> Answer | None:
        """Return the completion of a parked event request, if one is due."""
        if self._completions:
            return self._completions.popleft()
        due = self._events.next_completion()
        return None if due is None else self._answer(due[0], result=due[1])

    def take_transition(self) -> Transition:
        """Return the effect of the last Property Set on the controller, once."""
        taken, self._transition = self._transition, Transition.NONE
        return taken

    # Questions

    @property
    def is_ready(self) -> bool:
        """Whether the host has enabled the controller and not shut it down."""
        return self._properties.is_ready

    @property
    def is_shut_down(self) -> bool:
        """Whether the host has shut the controller down."""
        return bool(self._properties.status & ControllerStatus.SHUTDOWN_COMPLETE)

    @property
    def is_authenticated(self) -> bool:
        """Whether the host has authenticated, or needn't."""
        return self._authentication.is_open

    @property
    def is_ending(self) -> bool:
        """Whether the connection must end: the host failed to authenticate."""
        return self._authentication.is_ending

    @property
    def queue_count(self) -> int:
        """I/O queues granted by Set Features; before that, the maximum."""
        return self._features.queue_count

    @property
    def keep_alive_ms(self) -> int:
        """Keep-alive timeout in milliseconds, rounded up to its granularity; 0: none."""
        return self._features.keep_alive_ms

    def _answer(
        self,
        command_id: int,
        *,
        status: int = 0,
        result: int = 0,
        data: bytes = b"",
        retry: bool = False,
    ) -> Answer:
        head = self._head if self._flow_control else NO_FLOW_CONTROL_HEAD
        completion = encode_completion(
            command_id, status=status, result=result, queue_head=head, retry=retry
        )
        return Answer(command_id=command_id, completion=completion, data=data)

    def _execute(self, command: Command) -> _Outcome | None:
        # A host that reuses the id of a parked request for another command has abandoned the
        # request; SPDK does this before it shuts a controller down. Its answer could only be
        # misunderstood.
        self._events.abort(command.command_id)
        command.check_flags()
        if command.opcode == AdminOpcode.FABRICS:
            return self._fabrics(command)
        if not self.is_authenticated:
            raise RefusedError(Status.AUTHENTICATION_REQUIRED)
        handler = self._handlers.get(command.opcode)
        if handler is None:
            raise RefusedError(Status.INVALID_OPCODE)
        if not self.is_ready:
            raise RefusedError(Status.SEQUENCE_ERROR)
        return handler(command)

    def _make_handlers(self) -> Mapping[int, Callable[[Command], _Outcome | None]]:
        handlers: dict[int, Callable[[Command], _Outcome | None]] = {
            AdminOpcode.GET_LOG_PAGE: self._log_page,
            AdminOpcode.IDENTIFY: self._identify,
            AdminOpcode.ABORT: self._abort,
            AdminOpcode.SET_FEATURES: self._set_feature,
            AdminOpcode.GET_FEATURES: self._get_feature,
            AdminOpcode.ASYNC_EVENT_REQUEST: self._park,
            AdminOpcode.KEEP_ALIVE: lambda _: _Outcome(),
        }
        if self._subsystem.is_discovery:
            return {op: handlers[op] for op in handlers if op in _DISCOVERY_OPCODES}
        return handlers

    # Fabrics commands and properties

    def _fabrics(self, command: Command) -> _Outcome:
        data = self._authentication.execute(command)
        if data is not None:
            return _Outcome(data=data)
        if not self.is_authenticated:
            raise RefusedError(Status.AUTHENTICATION_REQUIRED)
        kind, size = command.entry[4], command.entry[40] & 0x07
        offset = command.words[1]
        if kind == FabricsType.PROPERTY_GET:
            value = self._properties.read(offset, size)
            if value is None:
                raise RefusedError(Status.INVALID_FIELD)
            return _Outcome(result=value)
        if kind == FabricsType.PROPERTY_SET:
            if offset != Property.CONFIGURATION or size:
                raise RefusedError(Status.INVALID_FIELD)
            self._configure(command.words[2])
            return _Outcome()
        if kind == FabricsType.CONNECT:
            raise RefusedError(Status.SEQUENCE_ERROR)
        raise RefusedError(Status.INVALID_OPCODE)

    def _configure(self, value: int) -> None:
        transition = self._properties.configure(value)
        if transition is Transition.RESET:
            self._logged()
            self._failures_taken = 0  # the owner of the next queues starts to count from 0
            self._features.reset()
            self._events.reset()
            self._completions.clear()
            self._changed.clear()
            self._notifications.clear()
        if transition is not Transition.NONE:
            self._transition = transition

    # Admin commands

    def _identify(self, command: Command) -> _Outcome:
        request = IdentifyRequest(
            structure=command.words[0] & 0xFF,
            nsid=command.nsid,
            command_set=command.words[1] >> 24,
            controller_id=command.words[0] >> 16,
        )
        try:
            data = identify(request, self._subsystem, controller_id=self._controller_id)
        except LookupError:
            raise RefusedError(Status.INVALID_NAMESPACE) from None
        except ValueError:
            raise RefusedError(Status.INVALID_FIELD) from None
        if data is None:
            raise RefusedError(Status.INVALID_FIELD)
        return _Outcome(data=data)

    def _set_feature(self, command: Command) -> _Outcome:
        selector, value = command.words[0], command.words[1]
        feature = selector & 0xFF
        if feature == Feature.NUMBER_OF_QUEUES and self._has_io_queues:
            raise RefusedError(Status.SEQUENCE_ERROR)
        takes_data = feature == Feature.HOST_BEHAVIOR and feature in self._features.known
        data = command.in_capsule(HOST_BEHAVIOR_BYTES) if takes_data else b""
        result = self._features.set(
            selector, value, nsid=command.nsid, data=data, subsystem=self._subsystem
        )
        if feature == Feature.ASYNC_EVENT_CONFIGURATION:
            self._events.configure(value)
        return _Outcome(result=result)

    def _get_feature(self, command: Command) -> _Outcome:
        selector, variant = command.words[0], command.words[1]
        result, data = self._features.get(
            selector, variant, nsid=command.nsid, subsystem=self._subsystem
        )
        is_current = selector >> 8 & 0x07 == 0
        if selector & 0xFF == Feature.ASYNC_EVENT_CONFIGURATION and is_current:
            result = self._events.configuration
        return _Outcome(result=result, data=data)

    def _park(self, command: Command) -> None:
        if not self._events.park(command.command_id):
            raise RefusedError(Status.EVENT_REQUESTS_EXCEEDED)

    def _abort(self, command: Command) -> _Outcome:
        queue_id, command_id = command.words[0] & 0xFFFF, command.words[0] >> 16
        if queue_id == 0:
            is_aborted = self._events.abort(command_id)
            if is_aborted:
                self._completions.append(self._answer(command_id, status=Status.ABORTED))
        else:
            is_aborted = self._resources.abort(queue_id=queue_id, command_id=command_id)
        return _Outcome(result=0 if is_aborted else _NOT_ABORTED)

    # Log pages

    def _make_pages(self) -> Mapping[int, Callable[[_LogRequest], bytes]]:
        pages: dict[int, Callable[[_LogRequest], bytes]] = {
            LogPage.SUPPORTED: lambda _: encode_supported(self._pages),
            LogPage.ERROR: lambda _: encode_errors(self._logged()),
        }
        if self._subsystem.is_discovery:
            return pages | {LogPage.DISCOVERY: lambda _: self._discovery_log}
        pages |= {
            LogPage.HEALTH: self._health,
            LogPage.FIRMWARE_SLOT: lambda _: encode_firmware_slot(self._subsystem),
            LogPage.CHANGED_NAMESPACES: lambda _: encode_changed_namespaces(self._changed),
            LogPage.COMMAND_EFFECTS: lambda _: encode_command_effects(self._subsystem),
            LogPage.FEATURE_EFFECTS: lambda _: encode_feature_effects(self._features.known),
        }
        if self._subsystem.is_multipath:
            pages[LogPage.ANA] = self._ana
        if self._subsystem.has_reservations:
            pages[LogPage.RESERVATION_NOTIFICATION] = self._notification
        return pages

    def _log_page(self, command: Command) -> _Outcome:
        words = command.words
        request = _LogRequest(
            page=words[0] & 0xFF,
            specific=words[0] >> 8 & 0x7F,
            retain_event=bool(words[0] >> 15 & 1),
            offset=words[2] | words[3] << 32,
            length=((words[0] >> 16) | (words[1] & 0xFFFF) << 16) * 4 + 4,
            nsid=command.nsid,
        )
        page = self._pages.get(request.page)
        if page is None:
            raise RefusedError(Status.INVALID_LOG_PAGE)
        # Offsets that count entries, and command sets other than the first, request data that
        # doesn't exist. Fields that a page doesn't use are ignored, because hosts may fill them.
        is_plain = not words[4] & _OTHER_CONTENT
        is_sized = request.length <= self._subsystem.transfer_max and not request.offset % 4
        if not (is_plain and is_sized):
            raise RefusedError(Status.INVALID_FIELD)
        command.check_room(request.length)  # before reading a page has a side effect
        content = page(request)
        if request.offset > len(content):
            raise RefusedError(Status.INVALID_FIELD)
        if not request.retain_event:
            is_whole = request.offset == 0 and request.length >= len(content)
            self._events.clear(request.page, is_whole=is_whole)
            self._consume(request.page)
        part = content[request.offset : request.offset + request.length]
        return _Outcome(data=part.ljust(request.length, b"\0"))

    def _health(self, request: _LogRequest) -> bytes:
        nsid = None if request.nsid in {0, BROADCAST_NSID} else request.nsid
        if nsid is not None and self._subsystem.namespace(nsid) is None:
            raise RefusedError(Status.INVALID_NAMESPACE)
        self._logged()
        return encode_health(self._resources.health(nsid), error_count=self._failure_count)

    def _ana(self, request: _LogRequest) -> bytes:
        page = encode_ana(
            self._subsystem.namespaces,
            change_count=self._ana_changes,
            groups_only=bool(request.specific & _GROUPS_ONLY),
        )
        # Hosts (nvme-cli) read the maximum size in parts: after the groups there are zeros.
        return page.ljust(ana_bytes_max(self._subsystem), b"\0")

    def _notification(self, _: _LogRequest) -> bytes:
        if not self._notifications:
            return encode_notification(count=0, kind=None, remaining=0, nsid=0)
        count, kind, nsid = self._notifications[0]
        remaining = len(self._notifications) - 1
        return encode_notification(count=count, kind=kind, remaining=remaining, nsid=nsid)

    def _consume(self, page: int) -> None:
        """Clear what a page reported, now that the host has read it."""
        if page == LogPage.CHANGED_NAMESPACES:
            self._changed.clear()
        elif page == LogPage.RESERVATION_NOTIFICATION and self._notifications:
            self._notifications.popleft()
            if self._notifications:
                self._events.report(Event.RESERVATION_CHANGED)

    def _log_failure(self, command: Command, status: Status) -> None:
        self._keep_failure(
            CommandFailure(
                queue_id=0,
                command_id=command.command_id,
                status=status,
                nsid=0 if command.opcode == AdminOpcode.FABRICS else command.nsid,
            )
        )

    def _logged(self) -> list[LoggedFailure]:
        """Collect what the data path has logged since; newest first."""
        for failure in reversed(self._resources.failures()):
            if failure.count > self._failures_taken:
                self._failures_taken = failure.count
                self._keep_failure(failure)
        return list(reversed(self._failures))

    def _keep_failure(self, failure: CommandFailure) -> None:
        self._failure_count += 1
        self._failures.append(LoggedFailure(count=self._failure_count, failure=failure))
