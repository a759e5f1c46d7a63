"""Enumerations that protocol messages carry as strings.

Strings in the .proto and not enums: a field that changes from one to the other breaks every client
that was built before. The words are the same in the configuration file and on the command line.
Roles are in `sealane.crypto.roles`, as certificates carry them.
"""

from enum import StrEnum
from typing import Final


class VolumeMode(StrEnum):
    """Which side keeps a volume fresh (threat-model.md). Empty in a descriptor: remote."""

    REMOTE = "remote"
    """The target, which is a Sealane target."""
    LOCAL = "local"
    """The gateway, for a volume on a third party's target."""
    OFF = "off"
    """None: an older sector is not detected."""


class Freshness(StrEnum):
    """How a store keeps its volume fresh."""

    TREE = "tree"
    """An integrity tree with an anchored root."""
    OWN_MEMORY = "own memory"
    """The store is in the target's memory, so it can't be rolled back."""
    NONE = "none"


class StoreKind(StrEnum):
    """Where a target keeps the sectors of a volume (docs/formats/stores.md).

    What the control plane knows of each: `sealane.daemon.volume.store_kinds`.
    """

    MEMORY = "memory"
    EMULATED = "emulated"
    FILE = "file"
    INLINE = "inline"
    NVME = "nvme"


THIRD_PARTY: Final = "third party"
"""What a status says instead of a store that a target of Sealane keeps."""


class AnchorKind(StrEnum):
    """Who keeps the anchor of a device (docs/understand/anchors.md)."""

    BROKER = "broker"
    TPM2 = "tpm2"
    FILE = "file"
    NONE = "none"


class AuthorityStage(StrEnum):
    """How far the replacement of the brokers' authority is (docs/operate/authority.md)."""

    ANNOUNCED = "announced"
    """Nodes learn to trust the successor."""
    SWITCHED = "switched"
    """The successor signs; the authority before is still trusted."""
    RETIRED = "retired"
    """The authority before is no longer trusted."""


class TenantKeyStage(StrEnum):
    """How far the rotation of a tenant's key is (docs/operate/rotation.md)."""

    PREPARING = "preparing"
    """Volumes are told to derive later key epochs from the new key."""
    PREPARED = "prepared"
    """All volumes were; the operator takes a snapshot, and begins the key epochs."""
    ROTATING = "rotating"
    """Volumes begin a key epoch under the new key."""
    INCOMPLETE = "incomplete"
    """All have begun one, except those that have no key epochs left."""


class AuthorityLag(StrEnum):
    """How a role of a node lags behind a replacement of the authority."""

    NOT_TRUSTING = "not trusting"
    """It never said that it trusts the successor."""
    CERTIFIED = "certified"
    """It has a certificate of the authority before."""
    TRUSTING = "trusting"
    """It said last that it trusts the authority before, which is retired."""


class StoreHealth(StrEnum):
    """How a store is."""

    GOOD = "good"
    """The last whole scrub found nothing wrong."""
    UNKNOWN = "unknown"
    """No whole scrub has ended yet."""
    DAMAGED = "damaged"
    FAILED = "failed"
    """It does nothing until it is opened again."""
    OPENING = "opening"


class JobKind(StrEnum):
    """A job in the background of a volume."""

    SCRUB = "scrub"
    """Read and check every written sector."""
    REFRESH = "refresh"
    """Issue fast-path MACs again."""


class TakeOverCause(StrEnum):
    """Why a gateway of a fail-over group took over from another."""

    HOST = "host"
    """The host's commands arrived at it."""
    OPERATOR = "operator"


class JobOrder(StrEnum):
    """What a job can be told."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


class JobState(StrEnum):
    """How far a job is."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """Its store was closed; it goes on when the store is opened."""
    FAILED = "failed"


class NodeState(StrEnum):
    """Whether a node may act in a role."""

    ACTIVE = "active"
    EXPIRED = "expired"
    """It has no current certificate."""
    REVOKED = "revoked"


class DeviceState(StrEnum):
    """Where a device is between its first opening and its end (docs/operate/devices.md)."""

    ASKING = "asking"
    """For an authorization of its first opening."""
    AUTHORIZED = "authorized"
    """Whatever its node shows next."""
    NEW = "new"
    """Authorized, and nothing of it is anchored."""
    OPEN = "open"
    WAITING = "waiting"
    """For the owner before to end."""
    CLOSED = "closed"
    FORGOTTEN = "forgotten"


class LeaseState(StrEnum):
    """What became of a lease of counters."""

    OUT = "out"
    """Its holder may use it."""
    RETURNED = "returned"
    BURNED = "burned"
    """Its arena is no longer served."""
