"""The broker's key encryption keys: each a file, or a key in a PKCS #11 token."""

from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KEY_BYTES, KeyWrapper, WrappingKey
from sealane.daemon.broker.keyring import Keyring
from sealane.daemon.config import BrokerConfig, HsmConfig
from sealane.daemon.runtime.files import read_secret
from sealane.errors import UsageError

try:
    from sealane.daemon.broker.hsm import HsmKey
except ModuleNotFoundError as missing:
    if missing.name != "pkcs11":
        raise
    HsmKey = None  # type: ignore[assignment,misc]


def open_keys(config: BrokerConfig) -> list[KeyWrapper]:
    """Open the configured key, then `broker.next_key` if any.

    UsageError or UnavailableError in one line.
    """
    opened: list[KeyWrapper] = []
    places = [(config.key_file, config.hsm, "broker.key_file")]
    if config.next_key is not None:
        places.append((config.next_key.key_file, config.next_key.hsm, "broker.next_key.key_file"))
    try:
        for key_file, hsm, name in places:
            if hsm is not None:
                opened.append(_hsm()(hsm))
            elif key_file is not None:
                opened.append(read_key(key_file, name=name))
    except BaseException:
        Keyring(opened).close()
        raise
    return opened


def read_key(path: str, *, name: str) -> WrappingKey:
    """Read a key file that the configuration key `name` names; UsageError in one line."""
    key = bytearray(read_secret(path, key=name))
    try:
        if len(key) != KEY_BYTES:
            raise UsageError(
                "key.size",
                f"{name} {path}: {len(key)} bytes; allowed: {KEY_BYTES} "
                "(sealanectl key encryption makes one)",
            )
        return WrappingKey(key)
    finally:
        wipe(key)


def make_hsm_key(place: HsmConfig) -> bytes:
    """Generate a key in the token and return its id; UsageError `hsm.key.exists`."""
    made = _hsm().create(place)
    made.close()
    return made.key_id


def _hsm() -> "type[HsmKey]":
    if HsmKey is None:
        raise UsageError(
            "hsm.missing", "broker.hsm: python-pkcs11 is not installed (pip install sealane[hsm])"
        )
    return HsmKey
