"""The key encryption key in a hardware security module, through PKCS #11 (extra `hsm`).

The key is generated in the token and can't be extracted. The token itself runs AES-256-GCM over
each key to be wrapped, with the associated data of `sealane.crypto.keys`. Wrapped keys have the
same form as under a key file.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pkcs11
from pkcs11 import Attribute, GCMParams, KeyType, Mechanism, ObjectClass, exceptions

from sealane.crypto.keys import (
    KEY_BYTES,
    KEY_ID_CONTEXT,
    KEY_ID_NONCE,
    WRAP_NONCE_BYTES,
    WRAP_TAG_BYTES,
    key_id_of,
    not_opened,
    wrap_context,
)
from sealane.daemon.config import HsmConfig
from sealane.daemon.runtime.files import read_secret
from sealane.errors import UnavailableError, UsageError, VerificationError

PIN_BYTES_MAX: Final = 255
# SoftHSM reports a wrong tag as a general error.
_NOT_OPENED: Final = (
    exceptions.EncryptedDataInvalid,
    exceptions.EncryptedDataLenRange,
    exceptions.GeneralError,
)


class _Login:
    """The login of this process to a token, which its keys share: a token takes only one."""

    def __init__(self) -> None:
        self.users = 0
        self.lock = threading.Lock()
        self.session: pkcs11.Session | None = None

    def log_out(self) -> None:
        """Close the session, if there is one."""
        if self.session is not None:
            # A token that was removed has already logged out.
            with suppress(exceptions.PKCS11Error):
                self.session.close()
            self.session = None


_logins: Final[dict[tuple[str, str], _Login]] = {}
_sharing: Final = threading.Lock()


class HsmKey:
    """A key encryption key in a token. All keys of a token share a session; calls take turns.

    Calls block. UnavailableError `hsm.failed` while the token doesn't answer; the next call logs in
    again.
    """

    def __init__(self, place: HsmConfig) -> None:
        """Log in and find the key; refuses a key that could be extracted."""
        self._place = place
        self._is_open = True
        with _sharing:
            self._login = _logins.setdefault((place.module, place.token), _Login())
            self._login.users += 1
        try:
            with self._key() as key:
                parameters = GCMParams(KEY_ID_NONCE, b"", WRAP_TAG_BYTES * 8)
                sealed = key.encrypt(
                    KEY_ID_CONTEXT, mechanism=Mechanism.AES_GCM, mechanism_param=parameters
                )
            self.key_id = key_id_of(bytes(sealed))
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, place: HsmConfig) -> "HsmKey":
        """Generate the key in the token; UsageError `hsm.key.exists` if the label is taken."""
        with _failures(place), _log_in(place, writable=True) as session:
            wanted = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.LABEL: place.label}
            if any(True for _ in session.get_objects(wanted)):
                raise UsageError(
                    "hsm.key.exists", f"token {place.token}: a key {place.label!r} already exists"
                )
            session.generate_key(
                KeyType.AES,
                KEY_BYTES * 8,
                label=place.label,
                store=True,
                template={Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False},
            )
        return cls(place)

    def wrap(self, secret: bytes | bytearray, *, purpose: str, owner: str) -> bytes:
        """Encrypt `secret`, bound to `purpose` and `owner`."""
        nonce = secrets.token_bytes(WRAP_NONCE_BYTES)
        with self._key() as key:
            sealed = key.encrypt(bytes(secret), **_gcm(nonce, purpose, owner))
        return nonce + bytes(sealed)

    def unwrap(self, wrapped: bytes, *, purpose: str, owner: str) -> bytearray:
        """Decrypt; VerificationError if key, ciphertext, purpose or owner is wrong."""
        nonce, sealed = wrapped[:WRAP_NONCE_BYTES], wrapped[WRAP_NONCE_BYTES:]
        if len(nonce) < WRAP_NONCE_BYTES or len(sealed) < WRAP_TAG_BYTES:
            raise not_opened(purpose, owner)
        with self._key() as key:
            try:
                return bytearray(key.decrypt(sealed, **_gcm(nonce, purpose, owner)))
            except _NOT_OPENED as error:
                raise not_opened(purpose, owner) from error

    def close(self) -> None:
        """Give up the key, and log out if it was the last one of its token. Idempotent."""
        with _sharing, self._login.lock:
            if not self._is_open:
                return
            self._is_open = False
            self._login.users -= 1
            if self._login.users == 0:
                self._login.log_out()
                del _logins[self._place.module, self._place.token]

    @contextmanager
    def _key(self) -> Iterator[Any]:
        login = self._login
        with login.lock:
            if not self._is_open:
                raise UnavailableError("hsm.failed", "this key of the token was given up")
            try:
                with _failures(self._place):
                    if login.session is None:
                        login.session = _log_in(self._place)
                    yield _find(login.session, self._place)
            except UnavailableError:
                login.log_out()
                raise


def _log_in(place: HsmConfig, *, writable: bool = False) -> pkcs11.Session:
    pin = read_secret(place.pin_file, key="broker.hsm.pin_file").strip()
    if not 1 <= len(pin) <= PIN_BYTES_MAX:
        raise UsageError(
            "hsm.pin",
            f"broker.hsm.pin_file {place.pin_file}: {len(pin)} bytes; allowed: "
            f"1 to {PIN_BYTES_MAX}",
        )
    token = pkcs11.lib(place.module).get_token(token_label=place.token)
    return token.open(user_pin=pin.decode(), rw=writable)


def _find(session: pkcs11.Session, place: HsmConfig) -> Any:
    key = session.get_key(object_class=ObjectClass.SECRET_KEY, label=place.label)
    if not (key[Attribute.ALWAYS_SENSITIVE] and key[Attribute.NEVER_EXTRACTABLE]):
        raise VerificationError(
            "hsm.key.extractable",
            f"token {place.token}: key {place.label!r} can be extracted from the token, or once "
            "could",
        )
    return key


def _gcm(nonce: bytes, purpose: str, owner: str) -> dict[str, Any]:
    parameters = GCMParams(nonce, wrap_context(purpose, owner), WRAP_TAG_BYTES * 8)
    return {"mechanism": Mechanism.AES_GCM, "mechanism_param": parameters}


@contextmanager
def _failures(place: HsmConfig) -> Iterator[None]:
    """Convert PKCS #11 errors to errors that name token and key."""
    try:
        yield
    except exceptions.NoSuchToken as error:
        raise UnavailableError(
            "hsm.token", f"{place.module}: there is no token {place.token!r}"
        ) from error
    except exceptions.NoSuchKey as error:
        raise UsageError(
            "hsm.key.not_found",
            f"token {place.token}: there is no key {place.label!r} (sealanectl key hsm makes one)",
        ) from error
    except exceptions.MultipleObjectsReturned as error:
        raise UsageError(
            "hsm.key.ambiguous", f"token {place.token}: several keys have the label {place.label!r}"
        ) from error
    except (exceptions.PinIncorrect, exceptions.PinLocked, exceptions.PinInvalid) as error:
        raise UsageError(
            "hsm.pin", f"token {place.token}: refuses the PIN in {place.pin_file}"
        ) from error
    except (exceptions.PKCS11Error, RuntimeError, OSError) as error:
        raise UnavailableError(
            "hsm.failed", f"token {place.token} by {place.module}: {type(error).__name__}"
        ) from error
