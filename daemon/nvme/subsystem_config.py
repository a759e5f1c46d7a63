"""Configuration of plain subsystems (docs/operate/configuration.md)."""

from typing import Annotated, Final, Literal, Self
from uuid import UUID, uuid5

from pydantic import AfterValidator, Field, model_validator

from sealane.daemon.runtime.config_types import AbsolutePath, SecretPath, Section
from sealane.daemon.volume.store_kinds import STORE_KINDS, only_with
from sealane.errors import UsageError
from sealane.protocol.kinds import StoreKind
from sealane.protocol.nvme.constants import DISCOVERY_NQN, NAMESPACES_MAX
from sealane.protocol.nvme.nqn import check_nqn
from sealane.protocol.sector import SECTOR_BYTES

_HOSTS_MAX: Final = 256
_SUBSYSTEMS_MAX: Final = 256
_NAMES: Final = UUID("5f1c6f0e-6f1b-5c7e-9a55-0d8f3b1f7a42")  # for namespaces without a UUID

AnaStateName = Literal["optimized", "non-optimized", "inaccessible", "persistent-loss", "change"]
Limit = Annotated[int, Field(ge=0, le=1 << 50)]


def _nqn(value: str) -> str:
    try:
        checked = check_nqn(value)
    except UsageError:
        raise ValueError("an NVMe qualified name") from None
    if checked == DISCOVERY_NQN:
        raise ValueError("a name other than the discovery service's")
    return checked


def _uuid(value: str) -> str:
    try:
        return str(UUID(value))
    except ValueError:
        raise ValueError("a UUID") from None


def _eui64(value: str) -> str:
    if len(value) != 16 or set(value.lower()) - set("0123456789abcdef"):
        raise ValueError("16 hexadecimal digits")
    return value.lower()


def _blocks(value: int) -> int:
    if value % SECTOR_BYTES:
        raise ValueError(f"a multiple of {SECTOR_BYTES}")
    return value


def _serial(value: str) -> str:
    if not 1 <= len(value) <= 20 or not value.isascii() or not value.isprintable():
        raise ValueError("1…20 printable ASCII characters")
    return value


Nqn = Annotated[str, AfterValidator(_nqn)]


class HostConfig(Section):
    """A host that may connect, and the key files of its authentication."""

    nqn: Nqn
    dhchap_key_file: SecretPath | None = None
    dhchap_controller_key_file: SecretPath | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dhchap_controller_key_file and not self.dhchap_key_file:
            raise ValueError("dhchap_controller_key_file together with dhchap_key_file only")
        return self


class LimitsConfig(Section):
    """Limits of a namespace per second (quality of service); 0: no limit."""

    iops: Limit = 0
    bytes_per_second: Limit = 0
    read_iops: Limit = 0
    write_iops: Limit = 0
    read_bytes_per_second: Limit = 0
    write_bytes_per_second: Limit = 0


class NamespaceConfig(Section):
    """A namespace: its store, identifiers, hosts, ANA state and limits."""

    nsid: Annotated[int, Field(ge=1, le=NAMESPACES_MAX)]
    store: Annotated[StoreKind, Field(strict=False)]
    size_bytes: Annotated[int, Field(ge=SECTOR_BYTES, le=1 << 50), AfterValidator(_blocks)]
    path: AbsolutePath | None = None
    drive: str | None = None
    in_place: bool = False
    metadata_bytes: Literal[0, 64] = 0
    uuid: Annotated[str, AfterValidator(_uuid)] | None = None
    eui64: Annotated[str, AfterValidator(_eui64)] | None = None
    hosts: Annotated[list[Nqn], Field(min_length=1, max_length=_HOSTS_MAX)] | None = None
    ana_state: AnaStateName = "optimized"
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = STORE_KINDS[self.store]
        if (self.path is not None) != kind.is_kept:
            raise ValueError(only_with("path", lambda kind: kind.is_kept))
        if self.metadata_bytes == 0 and kind.needs_metadata:
            raise ValueError(f'metadata_bytes = 64 if store is "{self.store}"')
        if self.metadata_bytes != 0 and (self.store == StoreKind.FILE or self.in_place):
            raise ValueError('no metadata_bytes if store is "file" or in_place is true')
        if (self.drive is not None) != kind.imitates_drive:
            raise ValueError(only_with("drive", lambda kind: kind.imitates_drive))
        return self

    @property
    def block_count(self) -> int:
        """Size in blocks."""
        return self.size_bytes // SECTOR_BYTES

    def name(self, subsystem_nqn: str) -> UUID:
        """Return its UUID; if not configured, one derived from its subsystem's NQN and its nsid."""
        if self.uuid is not None:
            return UUID(self.uuid)
        return uuid5(_NAMES, f"{subsystem_nqn}/{self.nsid}")

    def shows_to(self, host_nqn: str) -> bool:
        """Return True if a host of the subsystem may see it."""
        return self.hosts is None or host_nqn in self.hosts

    @property
    def store_options(self) -> tuple[str, int, str | None, str | None, bool]:
        """The options that can change only by removing the namespace and adding it again."""
        return self.store, self.size_bytes, self.path, self.drive, self.in_place


class SubsystemConfig(Section):
    """A plain subsystem of a target."""

    nqn: Nqn
    serial: Annotated[str, AfterValidator(_serial)] | None = None
    hosts: Annotated[list[HostConfig], Field(default_factory=list, max_length=_HOSTS_MAX)]
    allow_any_host: bool = False
    namespaces: Annotated[
        list[NamespaceConfig], Field(default_factory=list, max_length=NAMESPACES_MAX)
    ]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.allow_any_host == bool(self.hosts):
            raise ValueError("either hosts or allow_any_host = true")
        if len({host.nqn for host in self.hosts}) != len(self.hosts):
            raise ValueError("hosts without duplicates")
        if len({each.nsid for each in self.namespaces}) != len(self.namespaces):
            raise ValueError("namespaces without duplicate nsids")
        return self

    @property
    def serial_number(self) -> str:
        """The serial number; if not configured, one derived from the NQN."""
        return self.serial or uuid5(_NAMES, self.nqn).hex[:20]


def check_subsystems(subsystems: list[SubsystemConfig]) -> list[SubsystemConfig]:
    """Check subsystems against each other: ValueError for a repeated NQN or path."""
    if len({each.nqn for each in subsystems}) != len(subsystems):
        raise ValueError("subsystems without duplicate nqns")
    paths = [each.path for one in subsystems for each in one.namespaces if each.path]
    if len(set(paths)) != len(paths):
        raise ValueError("namespaces without duplicate paths")
    return subsystems


Subsystems = Annotated[
    list[SubsystemConfig],
    Field(default_factory=list, max_length=_SUBSYSTEMS_MAX),
    AfterValidator(check_subsystems),
]
