"""What an operator calls a thing: by its name, its id or the beginning of that, or its label."""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from sealane.cli.output import CALL_SECONDS, pages
from sealane.client import Client, translated
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import (
    broker_pb2,
    devices_pb2,
    operator_pb2,
    sessions_pb2,
    subsystems_pb2,
    trust_pb2,
)

PREFIX_MIN: Final = 4
"""Shortest beginning of an id that stands for it."""
SHOWN_MAX: Final = 5

Find = Callable[[Client, str], Awaitable[str]]
"""Returns the resource name of what is called so; raises if nothing is, or several things are."""


@dataclass(frozen=True, slots=True)
class Thing:
    """A resource and its label, which needn't be unique."""

    name: str
    label: str = ""

    @property
    def id(self) -> str:
        """The resource name without its collection."""
        return self.name.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.name} ({self.label})" if self.label else self.name


def meant(text: str, things: Iterable[Thing], *, noun: str) -> str:
    """Return the name of the thing that `text` means.

    UnavailableError `name.not_found`, or UsageError `name.ambiguous`. A label never hides an id
    that begins so: whoever may give labels could otherwise redirect a command.
    """
    known = list(things)
    for thing in known:
        if text in {thing.name, thing.id}:
            return thing.name
    is_prefix = len(text) >= PREFIX_MIN
    found = [t for t in known if t.label == text or (is_prefix and t.id.startswith(text))]
    if not found:
        raise UnavailableError(
            "name.not_found",
            f"no {noun} is called {text!r}; allowed: a name, the first {PREFIX_MIN} or more "
            f"characters of an id, or a display name, as sealanectl {noun} list shows them",
        )
    if len(found) > 1:
        shown = ", ".join(map(str, found[:SHOWN_MAX]))
        more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        raise UsageError("name.ambiguous", f"{text!r} may mean {shown}{more}")
    return found[0].name


async def find_volume(client: Client, text: str) -> str:
    """Return a volume's name, `volumes/UUID`."""
    if name := _volume_name(text):
        return name
    volumes = await client.volumes.list()
    return meant(text, (Thing(v.name, v.display_name) for v in volumes), noun="volume")


async def find_registered(client: Client, text: str) -> str:
    """Return the name of a volume of any tenant, as the broker's registry has it."""
    if name := _volume_name(text):
        return name
    volumes = await list_registered(client)
    things = (Thing(f"volumes/{v.volume_id}", v.display_name) for v in volumes)
    return meant(text, things, noun="volume")


def _volume_name(text: str) -> str:
    """Return the volume's name if `text` is one or a whole id, else ""."""
    if text.startswith("volumes/"):
        return text
    return f"volumes/{text}" if _is_uuid(text) else ""


async def find_session(client: Client, text: str) -> str:
    """Return a session's name, `sessions/ID`."""
    if text.startswith("sessions/"):
        return text
    found = await list_sessions(client)
    # A closed session leaves its name to the one that follows it.
    living = [s for s in found if s.state != sessions_pb2.Session.CLOSED]
    known = living if any(text in {s.display_name, s.name} for s in living) else found
    return meant(text, (Thing(s.name, s.display_name) for s in known), noun="session")


async def find_device(client: Client, text: str) -> str:
    """Return a device's UUID."""
    if _is_uuid(text):
        return text
    return meant(text, (Thing(d.device_id) for d in await list_devices(client)), noun="device")


async def find_subsystem(client: Client, text: str) -> str:
    """Return the NQN of a plain subsystem."""
    things = (Thing(each.nqn) for each in await list_subsystems(client))
    return meant(text, things, noun="subsystem")


async def list_subsystems(client: Client) -> list[subsystems_pb2.Subsystem]:
    """Return every plain subsystem of the target."""
    request = subsystems_pb2.ListSubsystemsRequest()
    with translated():
        answer = await client.subsystems.ListSubsystems(request, timeout=CALL_SECONDS)
    return [*answer.subsystems]


async def list_sessions(client: Client) -> list[sessions_pb2.Session]:
    """Return every session of the fabric, recently closed ones, too."""
    found = _pages(client.sessions.ListSessions, sessions_pb2.ListSessionsRequest)
    with translated():
        return [session async for page in found for session in page.sessions]


async def list_registered(client: Client) -> list[broker_pb2.VolumeDescriptor]:
    """Return the volumes of all tenants that the broker knows."""
    found = _pages(client.operator.ListRegisteredVolumes, operator_pb2.ListRegisteredVolumesRequest)
    with translated():
        return [volume async for page in found for volume in page.volumes]


async def list_devices(client: Client) -> list[devices_pb2.Device]:
    """Return every device that the broker knows."""
    found = _pages(client.devices.ListDevices, devices_pb2.ListDevicesRequest)
    with translated():
        return [device async for page in found for device in page.devices]


async def list_members(client: Client) -> list[trust_pb2.Member]:
    """Return every node and role that attested at the broker or was revoked."""
    found = _pages(client.membership.ListNodes, trust_pb2.ListNodesRequest)
    with translated():
        return [member async for page in found for member in page.nodes]


def _pages(method: Any, request: Callable[..., Any]) -> AsyncIterator[Any]:
    """Return the answers of a method that lists in pages."""
    return pages(lambda token: method(request(page_token=token), timeout=CALL_SECONDS))


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
