"""Types of configuration values: strict, each with an error that says what is allowed."""

import contextlib
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from sealane.crypto.certificates import NAME_PATTERN
from sealane.daemon.runtime.credentials import CREDENTIAL_PREFIX, credential_path

# A Unix socket's path has at most 108 bytes including the terminating zero.
_RUN_DIR_BYTES_MAX: Final = 80


# Allows nothing that gRPC would read as the scheme of another kind of address.
_HOST: Final = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]|[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("host:port, port 0…65535")
    if not _HOST.fullmatch(host):
        raise ValueError("host:port, host a name or an address ([…] around IPv6)")
    # What a resolver can't encode; the last label may be empty.
    labels = host.removesuffix(".").split(".")
    if not host.startswith("[") and not all(1 <= len(label) <= 63 for label in labels):
        raise ValueError("host:port, each part of the host 1…63 characters")
    return value


def peer_address(value: str) -> str:
    """Return `value` if it is an address to connect to; ValueError says what is allowed."""
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


def is_loopback(value: str) -> bool:
    """Return True if the host of an address:port is a loopback IP address; False for names."""
    try:
        return ipaddress.ip_address(value.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _loopback_address(value: str) -> str:
    if not is_loopback(_bind_address(value)):
        raise ValueError("a loopback address:port, because its data is not encrypted")
    return value


def _collector_url(value: str) -> str:
    scheme, separator, address = value.partition("://")
    if not separator or scheme not in {"http", "https"}:
        raise ValueError("https://host:port, or http:// and a loopback address:port")
    if scheme == "http" and not is_loopback(peer_address(address)):
        raise ValueError("a loopback address:port after http://, because that is not encrypted")
    peer_address(address)
    return value


def _audit_collector(value: str) -> str:
    if value.startswith("/"):
        return _path(value)
    return _collector_url(value) if "://" in value else peer_address(value)


def _ip_address(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("an IP address") from None


def _ip_addresses(value: object) -> tuple[str, ...]:
    named = [value] if isinstance(value, str) else value
    if isinstance(named, list) and named and all(isinstance(each, str) for each in named):
        with contextlib.suppress(ValueError):
            return tuple(_ip_address(each) for each in named)
    raise ValueError("an IP address, or a list of them")


def _name(value: str) -> str:
    if NAME_PATTERN.fullmatch(value) is None:
        raise ValueError("1…63 of a to z, 0 to 9 and '-', no '-' at either end")
    return value


def _path(value: str) -> str:
    if not value or "\0" in value or not Path(value).is_absolute():
        raise ValueError("an absolute path")
    return value


def _secret_path(value: str) -> str:
    if value.startswith(CREDENTIAL_PREFIX):
        return credential_path(value.removeprefix(CREDENTIAL_PREFIX))
    try:
        return _path(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {CREDENTIAL_PREFIX}NAME") from None


def _run_dir(value: str) -> str:
    if len(_path(value).encode()) > _RUN_DIR_BYTES_MAX:
        raise ValueError(f"an absolute path of at most {_RUN_DIR_BYTES_MAX} bytes")
    return value


BindAddress = Annotated[str, AfterValidator(_bind_address)]
PeerAddress = Annotated[str, AfterValidator(peer_address)]
AuditCollectorAddress = Annotated[str, AfterValidator(_audit_collector)]
CollectorUrl = Annotated[str, AfterValidator(_collector_url)]
LoopbackAddress = Annotated[str, AfterValidator(_loopback_address)]
IpAddresses = Annotated[tuple[str, ...], BeforeValidator(_ip_addresses)]
NodeName = Annotated[str, AfterValidator(_name)]
AbsolutePath = Annotated[str, AfterValidator(_path)]
SecretPath = Annotated[str, AfterValidator(_secret_path)]
"""The file of a secret: a path, or a credential of the service manager."""
RunDir = Annotated[str, AfterValidator(_run_dir)]


class Section(BaseModel):
    """A table of the file: strict types, no unknown keys, frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
