"""The broker's key encryption key: a file, or a key in a PKCS #11 token."""

from sealane.crypto.keys import KEY_BYTES, KeyWrapper, WrappingKey
from sealane.daemon.config import BrokerConfig, HsmConfig
from sealane.daemon.runtime.files import read_secret
from sealane.errors import UsageError

try:
    from sealane.daemon.broker.hsm import HsmKey
except ModuleNotFoundError as missing:
    if missing.name != "pkcs11":
        raise
    HsmKey = None  # type: ignore[assignment,misc]


def open_key(config: BrokerConfig) -> KeyWrapper:
    """Open the configured key encryption key; UsageError or UnavailableError in one line."""
    return WrappingKey(read_key(config)) if config.hsm is None else _hsm()(config.hsm)


def read_key(config: BrokerConfig) -> bytes:
    """Read the configured key file; UsageError in one line."""
    assert config.key_file is not None  # noqa: S101 - the configuration requires this or a token
    key = read_secret(config.key_file, key="broker.key_file")
    if len(key) != KEY_BYTES:
        raise UsageError(
            "key.size",
            f"broker.key_file {config.key_file}: {len(key)} bytes; allowed: {KEY_BYTES} "
            "(sealanectl key encryption makes one)",
        )
    return key


def make_hsm_key(place: HsmConfig) -> None:
    """Generate the key in the token; UsageError `hsm.key.exists` if its label is taken."""
    _hsm().create(place).close()


def _hsm() -> "type[HsmKey]":
    if HsmKey is None:
        raise UsageError(
            "hsm.missing", "broker.hsm: python-pkcs11 is not installed (pip install sealane[hsm])"
        )
    return HsmKey
