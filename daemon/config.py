"""Configuration of `sealaned`: one TOML file, strict, frozen, no secrets (configuration.md).

Anything the schema doesn't know is refused in one line that names the file, the key, the value
found and the values allowed. A daemon has the roles whose sections are in its file.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sealane.crypto.evidence.cmw import COLLATERAL, ITEMS_MAX, LABEL, PRIMARY
from sealane.crypto.roles import Role
from sealane.daemon.nvme.subsystem_config import Nqn, Subsystems
from sealane.daemon.runtime import third_party_evidence
from sealane.daemon.runtime.access_config import ID_MAX, SHARED_RUN_DIR, AccessConfig, mapped
from sealane.daemon.runtime.config_types import (
    AbsolutePath,
    AuditCollectorAddress,
    BindAddress,
    IpAddresses,
    LoopbackAddress,
    NodeName,
    PeerAddress,
    RunDir,
    SecretPath,
    Section,
    is_loopback,
)
from sealane.daemon.runtime.parties import Members, MembersOf, Party
from sealane.daemon.runtime.process import LockMemory
from sealane.daemon.runtime.sections import load_section
from sealane.daemon.runtime.traces_config import TracesConfig
from sealane.daemon.volume.jobs import RATE_MAX
from sealane.daemon.volume.store_kinds import STORE_KINDS, only_with
from sealane.errors import UsageError
from sealane.planning.planned_loss import PLANNED_LOSS_MAX
from sealane.protocol.kinds import AnchorKind, StoreKind

AUTHORIZATION_SECONDS: Final = 30.0
"""The longest time by which an I/O queue outlives its gateway's last authorization."""
PATHS_MAX: Final = 32
"""Largest number of paths of one session."""
UNIT_BYTES: Final = 1408
"""Payload of a packet that fits an MTU of 1500 together with all headers."""

JOBS_IDS_MAX: Final = 1024
"""Largest number of users, and of groups, of `fabric.jobs`."""
THIRD_PARTIES_MAX: Final = 256
CARDS_MAX: Final = 8
"""Accelerator cards of a gateway."""
TARGET_NAMESPACES_MAX: Final = 1024
GATEWAY_TARGETS_MAX: Final = 64
VOLUMES_PLACE: Final = "volumes"
"""Place of the file system that a target's volumes are on."""
# All items but the primary one and its collateral.
SECONDARY_ITEMS_MAX: Final = ITEMS_MAX - 2
EVIDENCE_DRIVERS: Final[Mapping[str, str]] = {
    "software": "software",
    "tpm2": "tpm2_settings",
    "tsm": "tsm",
}
"""Kinds of `enrolment.evidence`, each with its module in `daemon/node/evidence`."""
ROLE_SECTIONS: Final = tuple(Role)


class NodeConfig(Section):
    """The daemon's name, directories and general settings."""

    name: NodeName
    state_dir: AbsolutePath = "/var/lib/sealane"
    run_dir: RunDir = "/run/sealane"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    lock_memory: LockMemory = "prefer"
    space_warning_percent: Annotated[int, Field(ge=1, le=100)] = 90


class HsmConfig(Section):
    """A key encryption key in a PKCS #11 token: library, labels of token and key, PIN file."""

    module: AbsolutePath
    token: str
    label: str
    pin_file: SecretPath


def _hosts(endpoints: list[PeerAddress]) -> list[PeerAddress]:
    if not endpoints or len(set(endpoints)) != len(endpoints):
        raise ValueError("one or more host:port, without duplicates")
    return endpoints


class EtcdConfig(Section):
    """The etcd cluster shared by several brokers."""

    endpoints: Annotated[list[PeerAddress], AfterValidator(_hosts)]
    ca_file: AbsolutePath | None = None
    certificate_file: AbsolutePath | None = None
    key_file: SecretPath | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = {f is None for f in (self.ca_file, self.certificate_file, self.key_file)}
        if len(given) != 1:
            raise ValueError("all of ca_file, certificate_file and key_file, or none of them")
        if self.ca_file is None and not all(map(is_loopback, self.endpoints)):
            raise ValueError("only loopback endpoints without ca_file (mutual TLS)")
        return self


class AuditForwardConfig(Section):
    """The collector that a broker's audit log is forwarded to."""

    address: AuditCollectorAddress
    ca_file: AbsolutePath | None = None

    @property
    def kind(self) -> Literal["otlp", "unix", "tcp"]:
        """What the collector takes: OTLP over gRPC, or syslog at a Unix socket or over TCP."""
        if self.address.startswith("/"):
            return "unix"
        return "otlp" if "://" in self.address else "tcp"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ca_file is not None and (self.kind == "unix" or self.address.startswith("http://")):
            raise ValueError("no ca_file, because the address is one without TLS")
        if self.ca_file is None and not self._is_on_this_machine():
            raise ValueError("only a loopback address without ca_file (TLS)")
        return self

    def _is_on_this_machine(self) -> bool:
        return self.kind == "unix" or is_loopback(self.address.partition("://")[2] or self.address)


# TCG's registry of reserved TPM 2.0 handles leaves this range to the TPM's owner.
NvIndex = Annotated[int, Field(ge=0x0180_0000, le=0x01BF_FFFE)]


class NextKeyConfig(Section):
    """A second key encryption key: the next one, or the one before until all is under the next."""

    key_file: SecretPath | None = None
    hsm: HsmConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.key_file is None) == (self.hsm is None):
            raise ValueError("either key_file or hsm")
        return self


OWNERS_MAX: Final = 16
"""Owners of the policy at the same time."""


class PolicyOwnersConfig(Section):
    """The policy's owners, until a document that they sign names others."""

    keys: Annotated[list[AbsolutePath], Field(min_length=1, max_length=OWNERS_MAX)]
    threshold: Annotated[int, Field(ge=1, le=OWNERS_MAX)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.threshold > len(self.keys):
            raise ValueError("a threshold of at most the number of keys")
        return self


class BrokerConfig(Section):
    """The broker role."""

    listen: BindAddress = "127.0.0.1:7440"
    attestation_listen: BindAddress = "127.0.0.1:7441"
    instance: Annotated[int, Field(ge=1, le=65535)] = 1
    policy_file: AbsolutePath
    policy_owner_key: AbsolutePath | None = None
    policy_owners: PolicyOwnersConfig | None = None
    allow_unsigned_policy: bool = False
    collateral_dir: AbsolutePath | None = None
    key_file: SecretPath | None = None
    hsm: HsmConfig | None = None
    next_key: NextKeyConfig | None = None
    store: Literal["sqlite", "etcd"] = "sqlite"
    etcd: EtcdConfig | None = None
    head_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    audit_segment_bytes: Annotated[int, Field(ge=64 << 10, le=1 << 30)] = 64 << 20
    audit_segment_hours: Annotated[int, Field(ge=1, le=24 * 366)] = 24 * 7
    audit_keep_days: Annotated[int, Field(ge=1, le=36600)] | None = None
    audit_keep_bytes: Annotated[int, Field(ge=64 << 10, le=1 << 50)] | None = None
    audit_forward: AuditForwardConfig | None = None
    device_init: Literal["first-come", "authorized"] = "first-come"
    tpm_roots: AbsolutePath | None = None
    card_roots: AbsolutePath | None = None
    counters: Literal[AnchorKind.FILE, AnchorKind.TPM2] = AnchorKind.FILE
    counter_index: NvIndex = 0x0180_5EA0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.key_file is None) == (self.hsm is None):
            raise ValueError("either key_file or hsm")
        named = (self.policy_owner_key, self.policy_owners)
        if sum(each is not None for each in named) + self.allow_unsigned_policy != 1:
            raise ValueError(
                "one of policy_owner_key, the policy owner's public key, policy_owners, several "
                "with a threshold, or, for development only, allow_unsigned_policy = true"
            )
        if (self.etcd is not None) != (self.store == "etcd"):
            raise ValueError('the section etcd if store is "etcd", and only then')
        return self


class TpmConfig(Section):
    """The TPM 2.0 of this machine, for evidence, anchors and counters."""

    tcti: str = "device:/dev/tpmrm0"


def _registers(indices: list[int]) -> list[int]:
    if not indices or len(set(indices)) != len(indices) or not set(indices) <= set(range(24)):
        raise ValueError("one or more of 0…23, without duplicates")
    return indices


class Tpm2EvidenceConfig(Section):
    """Evidence of this node's TPM."""

    pcrs: Annotated[
        list[int], Field(default_factory=lambda: list(range(8))), AfterValidator(_registers)
    ]
    event_log: AbsolutePath | None = None
    endorsement_key: Literal["ecc", "rsa"] = "ecc"
    endorsement_certificates: AbsolutePath | None = None


class TsmEvidenceConfig(Section):
    """Linux's interface for reports of confidential machines (TSM)."""

    reports: AbsolutePath = "/sys/kernel/config/tsm/report"


def _command(words: list[str]) -> list[str]:
    if not words or not words[0].startswith("/") or any("\0" in word for word in words):
        raise ValueError("the absolute path of a program, then its arguments")
    return words


def _label(text: str) -> str:
    if LABEL.fullmatch(text) is None or text in {PRIMARY, COLLATERAL}:
        raise ValueError(
            f"1…32 of a–z, 0–9, '-', starting with a letter; not {PRIMARY} or {COLLATERAL}"
        )
    return text


def _listed(given: object) -> object:
    """Make a list of one label, which may be written without brackets."""
    return [given] if isinstance(given, str) else given


def _unequal(labels: list[str]) -> list[str]:
    if len({*labels}) != len(labels):
        raise ValueError("labels without duplicates")
    return labels


def _labelled(sources: list["SecondaryEvidenceConfig"]) -> list["SecondaryEvidenceConfig"]:
    if len({source.label for source in sources}) != len(sources):
        raise ValueError("labels without duplicates")
    return sources


class SecondaryEvidenceConfig(Section):
    """A device with evidence besides the node's own: the command that collects it, or a socket."""

    label: Annotated[str, AfterValidator(_label)]
    type: Literal["card", "nvidia"]
    command: Annotated[list[str], AfterValidator(_command)] | None = None
    socket: AbsolutePath | None = None
    timeout_seconds: Annotated[int, Field(ge=1, le=30)] = 10

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_card = self.type == "card"
        if (self.socket is not None) != is_card or (self.command is None) != is_card:
            raise ValueError('socket if type is "card", otherwise command')
        return self


def _evidence(name: str) -> str:
    if name not in EVIDENCE_DRIVERS and name not in third_party_evidence.names():
        *others, last = map(repr, sorted({*EVIDENCE_DRIVERS, *third_party_evidence.names()}))
        raise ValueError(f"{', '.join(others)} or {last}")
    return name


class BrokerAddresses(Section):
    """A broker's node name and addresses."""

    node: NodeName
    address: PeerAddress
    attestation_address: PeerAddress


class EnrolmentConfig(Section):
    """The brokers that certify this node, and its evidence."""

    broker_node: NodeName = "broker"
    broker_address: PeerAddress
    attestation_address: PeerAddress
    other_brokers: Annotated[list[BrokerAddresses], Field(default_factory=list, max_length=16)]
    trust_anchor: AbsolutePath
    evidence: Annotated[str, AfterValidator(_evidence)]
    settings: Annotated[dict[str, str], Field(default_factory=dict)]
    key_file: SecretPath | None = None
    tpm2: Annotated[Tpm2EvidenceConfig, Field(default_factory=Tpm2EvidenceConfig)]
    tsm: Annotated[TsmEvidenceConfig, Field(default_factory=TsmEvidenceConfig)]
    secondary: Annotated[
        list[SecondaryEvidenceConfig],
        Field(default_factory=list, max_length=SECONDARY_ITEMS_MAX),
        AfterValidator(_labelled),
    ]
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.key_file is not None) != (self.evidence == "software"):
            raise ValueError('key_file if evidence is "software", and only then')
        if self.settings and self.evidence in EVIDENCE_DRIVERS:
            raise ValueError("settings only for evidence kinds of other distributions")
        if len({broker.node for broker in self.brokers}) != len(self.brokers):
            raise ValueError("broker_node and the nodes of other_brokers without duplicates")
        return self

    @property
    def brokers(self) -> tuple[BrokerAddresses, ...]:
        """All brokers, in the order in which they are tried."""
        first = BrokerAddresses(
            node=self.broker_node,
            address=self.broker_address,
            attestation_address=self.attestation_address,
        )
        return (first, *self.other_brokers)


class ScrubConfig(Section):
    """Automatic scrubs of a target's volumes."""

    interval_hours: Annotated[int, Field(ge=1, le=24 * 366)] = 24 * 28
    bytes_per_second: Annotated[int, Field(ge=0, le=RATE_MAX)] = 100 << 20


class TargetConfig(Section):
    """The target role."""

    listen: BindAddress = "127.0.0.1:4420"
    control_listen: BindAddress = "127.0.0.1:7442"
    store: Annotated[StoreKind, Field(strict=False)] = StoreKind.FILE
    drive: str | None = None
    namespaces: Annotated[
        list[AbsolutePath], Field(default_factory=list, max_length=TARGET_NAMESPACES_MAX)
    ]
    directory: AbsolutePath | None = None
    thin: bool = False
    anchor: Annotated[AnchorKind, Field(strict=False)] = AnchorKind.BROKER
    anchor_index: NvIndex = 0x0180_5EA2
    anchor_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    discovery_listen: BindAddress | None = None
    authorization_seconds: Annotated[int, Field(ge=3, le=int(AUTHORIZATION_SECONDS))] = int(
        AUTHORIZATION_SECONDS
    )
    allow_plain_network: bool = False
    scrub: ScrubConfig | None = None
    subsystems: Subsystems

    @model_validator(mode="after")
    def _check(self) -> Self:
        kind = STORE_KINDS[self.store]
        if (self.drive is not None) != kind.imitates_drive:
            raise ValueError(only_with("drive", lambda kind: kind.imitates_drive))
        if bool(self.namespaces) != kind.lies_on_namespaces:
            raise ValueError(only_with("namespaces", lambda kind: kind.lies_on_namespaces))
        if len({*self.namespaces}) != len(self.namespaces):
            raise ValueError("namespaces without duplicates")
        if self.subsystems and not (self.allow_plain_network or is_loopback(self.listen)):
            raise ValueError(
                "plain subsystems with a loopback target.listen only, unless allow_plain_network = "
                "true permits their data on the network in the clear"
            )
        return self


class ThirdPartyConfig(Section):
    """A namespace of a third party's target, for one volume (docs/operate/third-party.md)."""

    name: NodeName
    address: PeerAddress
    subsystem_nqn: Nqn
    namespace_id: Annotated[int, Field(ge=1, lt=2**32 - 1)] = 1
    dhchap_key_file: SecretPath | None = None
    dhchap_controller_key_file: SecretPath | None = None
    digests: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dhchap_controller_key_file and not self.dhchap_key_file:
            raise ValueError("dhchap_controller_key_file together with dhchap_key_file only")
        return self


def _distinct(parties: list[ThirdPartyConfig]) -> list[ThirdPartyConfig]:
    places = {(party.address, party.subsystem_nqn, party.namespace_id) for party in parties}
    if len({party.name for party in parties}) != len(parties) or len(places) != len(parties):
        raise ValueError("names and namespaces without duplicates")
    return parties


class TargetAddress(Section):
    """A target on which a gateway's volumes may be."""

    node: NodeName
    address: PeerAddress


def _different(targets: list[TargetAddress]) -> list[TargetAddress]:
    if len({each.node for each in targets}) != len(targets) or len(
        {each.address for each in targets}
    ) != len(targets):
        raise ValueError("nodes and addresses without duplicates")
    return targets


class GatewayConfig(Section):
    """The gateway role."""

    listen: LoopbackAddress = "127.0.0.1:4421"
    target_node: NodeName | None = None
    target_address: PeerAddress | None = None
    targets: Annotated[
        list[TargetAddress],
        Field(default_factory=list, max_length=GATEWAY_TARGETS_MAX),
        AfterValidator(_different),
    ]
    authorization_seconds: Annotated[int, Field(ge=3, le=int(AUTHORIZATION_SECONDS))] = int(
        AUTHORIZATION_SECONDS
    )
    command_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30
    hold_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    journal_bytes_max: Annotated[int, Field(ge=1 << 20, le=1 << 34)] = 64 << 20
    journals_bytes_max: Annotated[int, Field(ge=0, le=1 << 40)] = 1 << 30
    accelerator: Annotated[
        list[Annotated[str, AfterValidator(_label)]],
        Field(default_factory=list, max_length=CARDS_MAX),
        BeforeValidator(_listed),
        AfterValidator(_unequal),
    ]
    third_party: Annotated[
        list[ThirdPartyConfig],
        Field(default_factory=list, max_length=THIRD_PARTIES_MAX),
        AfterValidator(_distinct),
    ]

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_short = self.target_node is not None
        if is_short != (self.target_address is not None) or is_short == bool(self.targets):
            raise ValueError("either target_node and target_address, or [[gateway.targets]]")
        return self

    @property
    def addresses(self) -> Mapping[str, str]:
        """The `control_listen` of each target, by the target's node; in the file's order."""
        if self.target_node is not None and self.target_address is not None:
            return {self.target_node: self.target_address}
        return {each.node: each.address for each in self.targets}


class JobLimitsConfig(Section):
    """Limits of one job at a fabric."""

    sessions: Annotated[int, Field(ge=1, le=1024)] = 16
    region_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 1 << 30
    receives: Annotated[int, Field(ge=1, le=1 << 22)] = 4096
    sends: Annotated[int, Field(ge=1, le=1 << 22)] = 4096
    rate_share: Annotated[float, Field(ge=0.001, le=1)] = 1.0


Ids = Annotated[
    list[Annotated[int, Field(ge=0, le=ID_MAX)]],
    Field(default_factory=list, max_length=JOBS_IDS_MAX),
    AfterValidator(mapped),
]


class UserLimitsConfig(JobLimitsConfig):
    """Limits of all jobs of one user at a fabric."""

    sessions: Annotated[int, Field(ge=1, le=1024)] = 8


class JobsConfig(Section):
    """Jobs of other users than the daemon's, besides those of `[access]`; limits of all."""

    uids: Ids
    groups: Ids
    run_dir: RunDir = SHARED_RUN_DIR
    limits: Annotated[UserLimitsConfig, Field(default_factory=UserLimitsConfig)]

    @property
    def members(self) -> Members:
        """The users and groups named here."""
        return Members(uids=frozenset(self.uids), gids=frozenset(self.groups))


LineRate = Annotated[int, Field(ge=1_000_000, le=1_600_000_000_000)]
RoundTripMicros = Annotated[int, Field(ge=10, le=1_000_000)]


WIRES: Final = ("udp", "verbs")
"""What can carry a session's packets, in the order of a session's paths."""


def _wires(value: object) -> tuple[str, ...]:
    if isinstance(value, list) and value and all(each in WIRES for each in value):
        named = tuple(wire for wire in WIRES if wire in value)
        if len(named) == len(value):
            return named
    raise ValueError('["udp"], ["verbs"] or ["udp", "verbs"]')


Wires = Annotated[tuple[str, ...], BeforeValidator(_wires)]


CongestionName = Literal["rate", "uno", "gemini", "dctcp"]


def _tuple_of(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


CongestionNames = Annotated[tuple[CongestionName, ...], BeforeValidator(_tuple_of)]


def _controllers(info: ValidationInfo) -> dict[str, str]:
    """Return the controllers that settings name, each with the words that say where."""
    found = {info.data.get("congestion", "rate"): "congestion is"}
    for name in info.data.get("congestion_allowed", ()):
        found.setdefault(name, "congestion_allowed has")
    return {name: f'{where} "{name}"' for name, where in found.items()}


class FabricConfig(Section):
    """The fabric role."""

    control_listen: BindAddress = "127.0.0.1:7443"
    data_listen: IpAddresses = ("127.0.0.1",)
    paths: Annotated[int, Field(ge=1, le=PATHS_MAX)] = 1
    rate_max_bits_per_second: Annotated[int, Field(ge=1_000_000, le=400_000_000_000)]
    region_bytes_max: Annotated[int, Field(ge=1 << 20, le=1 << 36)] = 1 << 28
    sessions_max: Annotated[int, Field(ge=1, le=1024)] = 16
    limits: Annotated[JobLimitsConfig, Field(default_factory=JobLimitsConfig)]
    jobs: JobsConfig | None = None
    idle_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    reordering_micros: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    path_threads: Annotated[int, Field(ge=0, le=PATHS_MAX)] = 0
    wires: Wires = ("udp",)
    verbs_mode: Literal["send", "write"] = "send"
    pinned_bytes_max: Annotated[int, Field(ge=0, le=1 << 40)] = 1 << 26
    congestion: CongestionName = "rate"
    congestion_allowed: CongestionNames = ()
    marking: Literal["queue", "phantom", "none"] = "queue"
    line_bits_per_second: LineRate | None = Field(default=None, validate_default=True)
    near_rtt_micros: RoundTripMicros | None = Field(default=None, validate_default=True)
    far_rtt_micros: RoundTripMicros | None = Field(default=None, validate_default=True)
    unit_bytes: Annotated[int, Field(ge=256, le=65_000)] | Literal["auto"] = UNIT_BYTES
    assumed_loss: Annotated[float, Field(ge=0, le=PLANNED_LOSS_MAX)] = 1e-5
    plan_objective: Literal["auto", "mean", "p99", "p999"] = "auto"
    trust_grace_seconds: Annotated[int, Field(ge=3, le=86_400)] = 3600
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=600)] = 10

    @field_validator("paths")
    @classmethod
    def _check_paths(cls, paths: int, info: ValidationInfo) -> int:
        most = PATHS_MAX // len(info.data.get("data_listen", ("",)))
        if paths > most:
            raise ValueError(f"1…{most} for each address of data_listen, {PATHS_MAX} in all")
        return paths

    @field_validator("wires")
    @classmethod
    def _check_wires(cls, wires: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        addresses, paths = info.data.get("data_listen", ("",)), info.data.get("paths", 1)
        if len(addresses) * paths * len(wires) > PATHS_MAX:
            raise ValueError(f"{PATHS_MAX} paths in all: data_listen times paths times wires")
        if "verbs" in wires and info.data.get("path_threads", 0) > 0:
            raise ValueError('"udp" only, because path_threads is above 0')
        return wires

    @field_validator("marking")
    @classmethod
    def _check_marking(cls, marking: str, info: ValidationInfo) -> str:
        dctcp = _controllers(info).get("dctcp")
        if marking == "none" and dctcp:
            raise ValueError(f'"queue" or "phantom", because {dctcp}')
        return marking

    @field_validator("line_bits_per_second", "near_rtt_micros", "far_rtt_micros")
    @classmethod
    def _check_network(cls, value: int | None, info: ValidationInfo) -> int | None:
        for name, words in _controllers(info).items():
            if value is None and name != "rate":
                raise ValueError(f"a number, because {words}")
        near = info.data.get("near_rtt_micros")
        if info.field_name == "far_rtt_micros" and value is not None and value < (near or 0):
            raise ValueError(f"at least near_rtt_micros, {near}")
        return value


class MetricsConfig(Section):
    """The Prometheus endpoint."""

    listen: BindAddress = "127.0.0.1:7449"


class Config(Section):
    """The whole file."""

    node: NodeConfig
    broker: BrokerConfig | None = None
    tpm: Annotated[TpmConfig, Field(default_factory=TpmConfig)]
    enrolment: EnrolmentConfig | None = None
    target: TargetConfig | None = None
    gateway: GatewayConfig | None = None
    fabric: FabricConfig | None = None
    metrics: MetricsConfig | None = None
    traces: TracesConfig | None = None
    access: AccessConfig | None = None

    @property
    def jobs(self) -> JobsConfig | None:
        """The section `[fabric.jobs]`."""
        return None if self.fabric is None else self.fabric.jobs

    @property
    def members(self) -> MembersOf:
        """Who besides the daemon's user and root may call the daemon, by party."""
        found = {} if self.access is None else self.access.members
        if self.jobs is not None:
            found[Party.JOB] = found.get(Party.JOB, Members()) | self.jobs.members
        return {party: named for party, named in found.items() if named}

    @property
    def is_shared(self) -> bool:
        """Whether there are sockets for `members`, of whom there may be none at present."""
        return self.access is not None or self.jobs is not None

    @property
    def shared_run_dir(self) -> tuple[str, str]:
        """The directory of the sockets for `members`, and its key."""
        if self.access is None and self.jobs is not None:
            return self.jobs.run_dir, "fabric.jobs.run_dir"
        run_dir = SHARED_RUN_DIR if self.access is None else self.access.run_dir
        return run_dir, "access.run_dir"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of this daemon, in the order in which they start."""
        return tuple(name for name in ROLE_SECTIONS if getattr(self, name) is not None)

    def listeners(self, role: Role) -> Mapping[str, str]:
        """Return the configured address:port of each listener of a role for peers and hosts."""
        found: dict[str, str | None] = {}
        if role == Role.TARGET and self.target is not None:
            found = {
                "target": self.target.listen,
                "target_control": self.target.control_listen,
                "discovery": self.target.discovery_listen,
            }
        elif role == Role.GATEWAY and self.gateway is not None:
            found = {"gateway": self.gateway.listen}
        elif role == Role.FABRIC and self.fabric is not None:
            found = {"fabric_control": self.fabric.control_listen}
        return {purpose: address for purpose, address in found.items() if address is not None}

    @property
    def target_directory(self) -> str:
        """The directory of the target's sector stores."""
        chosen = self.target.directory if self.target is not None else None
        return chosen or str(Path(self.node.state_dir) / "volumes")

    @property
    def kept_listeners(self) -> Mapping[str, str]:
        """Addresses of the listeners that outlive a restart, by key."""
        kept = {}
        if self.metrics is not None:
            kept["metrics.listen"] = self.metrics.listen
        if self.target is not None:
            kept["target.listen"] = self.target.listen
            if self.target.discovery_listen is not None:
                kept["target.discovery_listen"] = self.target.discovery_listen
        if self.gateway is not None:
            kept["gateway.listen"] = self.gateway.listen
        return kept

    @property
    def places(self) -> Mapping[str, Path]:
        """The directories whose space is watched, by name."""
        places = {"state": Path(self.node.state_dir)}
        if self.target is not None and STORE_KINDS[self.target.store].is_kept:
            places[VOLUMES_PLACE] = Path(self.target_directory)
        return places

    def to_json(self) -> str:
        """Return every setting with its effective value."""
        return json.dumps(self.model_dump(exclude_none=True), indent=2)


def load_config(path: Path) -> Config:
    """Read `path`; UsageError `config.…` with one line about the first fault."""
    config = load_section(Config, path)
    _check_roles(config, path)
    _check_shared(config, path)
    return config


def _check_shared(config: Config, path: Path) -> None:
    jobs, access = config.jobs, config.access
    if jobs is not None:
        if Party.JOB not in config.members and (access is None or not access.jobs):
            raise UsageError(
                "config.value",
                f"{path}: fabric.jobs: names nobody; allowed: at least one number in uids or "
                "groups, or an entry in access.jobs",
            )
        if access is not None and "run_dir" in jobs.model_fields_set:
            raise UsageError(
                "config.value",
                f"{path}: fabric.jobs.run_dir: with a section [access] its run_dir is used instead",
            )
    if config.is_shared:
        named = "access" if access is not None else "fabric.jobs"
        check_writers(path, wherefore=f"with {named}")


def check_writers(path: Path, *, wherefore: str) -> None:
    """Raise UsageError `config.writable` if others than root and we may write the file."""
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {0, os.geteuid()} or mode & 0o022:
        raise UsageError(
            "config.writable",
            f"{path}: mode {mode:04o}, owner {status.st_uid}; allowed {wherefore}: written to by "
            f"root or user {os.geteuid()} only",
        )


def _check_roles(config: Config, path: Path) -> None:
    if not config.roles:
        raise UsageError(
            "config.role",
            f"{path}: no role; allowed: one or more of the sections "
            + ", ".join(f"[{r}]" for r in ROLE_SECTIONS),
        )
    others = [r for r in config.roles if r != Role.BROKER]
    if others and config.enrolment is None:
        raise UsageError(
            "config.missing",
            f"{path}: enrolment: missing; the {others[0]} role needs the section [enrolment]",
        )
