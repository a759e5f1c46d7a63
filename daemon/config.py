"""Configuration of `sealaned`: one TOML file, strict, frozen, no secrets (docs/configuration.md).

Anything the schema doesn't know is refused in one line that names the file, the key, the value
found and the values allowed. The roles of a daemon are the role sections its file has.
"""

import difflib
import ipaddress
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from sealane.crypto.certificates import NAME_PATTERN
from sealane.daemon.files import FILE_BYTES_MAX, read_bounded
from sealane.errors import UsageError

ROLE_SECTIONS: Final = ("broker", "target", "gateway", "fabric")

# A Unix socket's path has at most 108 bytes with its end, and gRPC adds nothing to it.
_RUN_DIR_BYTES_MAX: Final = 80


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("host:port, port 0…65535")
    if not host or any(c.isspace() or c == "/" for c in host):
        raise ValueError("host:port, host a name or an address ([…] around IPv6)")
    return value


def _peer_address(value: str) -> str:
    if _address(value).endswith(":0"):
        raise ValueError("host:port, port 1…65535")
    return value


def _bind_address(value: str) -> str:
    host = _address(value).rpartition(":")[0].strip("[]")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("address:port to listen on, an IP address and a port 0…65535") from None
    return value


def _loopback_address(value: str) -> str:
    host = _bind_address(value).rpartition(":")[0].strip("[]")
    if not ipaddress.ip_address(host).is_loopback:
        raise ValueError("a loopback address:port, because what passes there is plain")
    return value


def _ip_address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("an IP address") from None


def _name(value: str) -> str:
    if NAME_PATTERN.fullmatch(value) is None:
        raise ValueError("1…63 of a to z, 0 to 9 and '-', no '-' at either end")
    return value


def _path(value: str) -> str:
    if not value or "\0" in value or not Path(value).is_absolute():
        raise ValueError("an absolute path")
    return value


def _run_dir(value: str) -> str:
    if len(_path(value).encode()) > _RUN_DIR_BYTES_MAX:
        raise ValueError(f"an absolute path of at most {_RUN_DIR_BYTES_MAX} bytes")
    return value


BindAddress = Annotated[str, AfterValidator(_bind_address)]
PeerAddress = Annotated[str, AfterValidator(_peer_address)]
NodeName = Annotated[str, AfterValidator(_name)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
RunDir = Annotated[str, AfterValidator(_run_dir)]


class Section(BaseModel):
    """A table of the file: strict types, no unknown key, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NodeConfig(Section):
    """Who this daemon is and where it keeps things."""

    name: NodeName
    state_dir: AbsolutePath = "/var/lib/sealane"
    run_dir: RunDir = "/run/sealane"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class BrokerConfig(Section):
    """The broker role."""

    listen: BindAddress = "127.0.0.1:7440"
    attestation_listen: BindAddress = "127.0.0.1:7441"
    instance: Annotated[int, Field(ge=1, le=65535)] = 1
    policy_file: AbsolutePath
    key_file: AbsolutePath


class EnrolmentConfig(Section):
    """How this node gets its certificates."""

    broker_node: NodeName = "broker"
    broker_address: PeerAddress
    attestation_address: PeerAddress
    trust_anchor: AbsolutePath
    evidence: Literal["software"]
    key_file: AbsolutePath
    timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30


class TargetConfig(Section):
    """The target role."""

    listen: BindAddress = "127.0.0.1:4420"
    control_listen: BindAddress = "127.0.0.1:7442"
    store: Literal["file", "memory"] = "file"
    directory: AbsolutePath | None = None


class GatewayConfig(Section):
    """The gateway role."""

    listen: Annotated[str, AfterValidator(_loopback_address)] = "127.0.0.1:4421"
    target_node: NodeName
    target_address: PeerAddress
    command_timeout_seconds: Annotated[int, Field(ge=1, le=600)] = 30
    hold_seconds: Annotated[int, Field(ge=0, le=3600)] = 60
    journal_bytes_max: Annotated[int, Field(ge=1 << 20, le=1 << 34)] = 64 << 20


class FabricConfig(Section):
    """The fabric role."""

    control_listen: BindAddress = "127.0.0.1:7443"
    data_listen: Annotated[str, AfterValidator(_ip_address)] = "127.0.0.1"
    rate_max_bits_per_second: Annotated[int, Field(ge=1_000_000, le=400_000_000_000)]
    region_bytes_max: Annotated[int, Field(ge=1 << 20, le=1 << 36)] = 1 << 28
    sessions_max: Annotated[int, Field(ge=1, le=1024)] = 16
    idle_timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 60


class MetricsConfig(Section):
    """The Prometheus endpoint."""

    listen: BindAddress = "127.0.0.1:7449"


_Model = TypeVar("_Model", bound=BaseModel)


class Config(Section):
    """The whole file."""

    node: NodeConfig
    broker: BrokerConfig | None = None
    enrolment: EnrolmentConfig | None = None
    target: TargetConfig | None = None
    gateway: GatewayConfig | None = None
    fabric: FabricConfig | None = None
    metrics: MetricsConfig | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles this daemon runs, in the order they start."""
        return tuple(name for name in ROLE_SECTIONS if getattr(self, name) is not None)

    @property
    def target_directory(self) -> str:
        """Where the target keeps its sector stores."""
        chosen = self.target.directory if self.target is not None else None
        return chosen or str(Path(self.node.state_dir) / "volumes")

    def to_json(self) -> str:
        """Return every setting with its effective value."""
        return json.dumps(self.model_dump(exclude_none=True), indent=2)


def load_config(path: Path) -> Config:
    """Read `path`; UsageError `config.…` with one line at the first thing that is wrong."""
    config = load_section(Config, path)
    _check_roles(config, path)
    return config


def load_section(model: type[_Model], path: Path) -> _Model:
    """Read a TOML file and validate it; UsageError `config.…` with one line for the first fault."""
    try:
        raw = read_bounded(path)
    except OSError as error:
        raise UsageError("config.unreadable", f"{path}: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise UsageError("config.size", f"{path}: more than the allowed {FILE_BYTES_MAX} bytes")
    try:
        document = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("config.syntax", f"{path}: not TOML: {error}") from error
    return parse_section(model, document, source=str(path))


def parse_section(model: type[_Model], document: object, *, source: str) -> _Model:
    """Validate `document`; UsageError with one line for the first fault in it."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # An unknown key often explains a missing one, so it is reported first.
        faults = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise _explain(model, faults[0], source) from None


def _explain(model: type[BaseModel], fault: ErrorDetails, source: str) -> UsageError:
    key = ".".join(str(part) for part in fault["loc"])
    found = _toml(fault["input"])
    context = fault.get("ctx", {})
    kind = fault["type"]
    if kind == "extra_forbidden":
        known = sorted(_fields_beside(model, fault["loc"]))
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return UsageError(
            "config.key.unknown", f"{source}: {key}: unknown key; {hint}allowed: {', '.join(known)}"
        )
    if kind == "missing":
        return UsageError("config.missing", f"{source}: {key}: missing; it has no default")
    if kind == "value_error":
        allowed, reason = str(context["error"]), "config.value"
    elif kind == "literal_error":
        allowed, reason = str(context["expected"]), "config.value"
    elif kind in {"greater_than_equal", "less_than_equal"}:
        allowed, reason = _range_of(model, fault["loc"]), "config.range"
    else:
        allowed, reason = _KINDS.get(kind, fault["msg"]), "config.type"
    return UsageError(reason, f"{source}: {key}: found {found}; allowed: {allowed}")


_KINDS: Final = {
    "string_type": "a string",
    "int_type": "an integer",
    "bool_type": "true or false",
    "list_type": "an array",
    "tuple_type": "an array",
    "model_type": "a section",
    "model_attributes_type": "a section",
}


def _toml(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "…"


def _models_along(model: type[BaseModel], loc: tuple[int | str, ...]) -> Iterator[type[BaseModel]]:
    """Yield the model at every step of `loc` but its last."""
    yield model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = [] if field is None else [*_models_in(field.annotation)]
        if not inner:
            return
        model = inner[0]
        yield model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


def _fields_beside(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    last = [*_models_along(model, loc)][-1]
    return [field.alias or name for name, field in last.model_fields.items()]


def _range_of(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    field = [*_models_along(model, loc)][-1].model_fields[str(loc[-1])]
    bounds = [getattr(m, "ge", None) for m in field.metadata]
    bounds += [getattr(m, "le", None) for m in field.metadata]
    low, high = (b for b in bounds if b is not None)
    return f"{low}…{high}"


def _check_roles(config: Config, path: Path) -> None:
    if not config.roles:
        raise UsageError(
            "config.role",
            f"{path}: no role; allowed is one or more of the sections "
            + ", ".join(f"[{r}]" for r in ROLE_SECTIONS),
        )
    others = [r for r in config.roles if r != "broker"]
    if others and config.enrolment is None:
        raise UsageError(
            "config.missing",
            f"{path}: enrolment: missing; the {others[0]} role needs the section [enrolment]",
        )
