"""Credentials of the service manager: secrets that a unit's `LoadCredential=` names.

systemd copies them from its credential store into a directory that only the daemon can read
(systemd.exec(5), "Credentials"). A configuration names one as `credential:NAME`.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CREDENTIAL_PREFIX: Final = "credential:"
STORES: Final = (
    "/run/credentials/@system",
    *("/etc/credstore", "/run/credstore", "/usr/local/lib/credstore", "/usr/lib/credstore"),
)
"""Where systemd looks for a credential's file, in this order; the first has the machine's own."""
ENCRYPTED_STORES: Final = tuple(
    f"{parent}/credstore.encrypted" for parent in ("/etc", "/run", "/usr/local/lib", "/usr/lib")
)
"""Where it looks for those of `LoadCredentialEncrypted=`."""
OWN_STORE: Final = "/etc/credstore"
"""Where this machine's operator puts them."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,126}")


def credential_path(name: str) -> str:
    """Return the file of a credential; ValueError says which names are allowed.

    In the unit it is the copy that the daemon was given. Elsewhere, as in a check by hand, it is
    the file that systemd would copy: the first in the stores, or where it belongs if there is none.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"an absolute path, or {CREDENTIAL_PREFIX}NAME, NAME 1…127 of letters, digits and ._@-"
        )
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    if given is not None:
        return str(Path(given, name))
    places = [f"{store}/{name}" for store in (*STORES, *ENCRYPTED_STORES)]
    # Unlike Path.exists, returns False for a store that is closed to us.
    found = filter(os.path.exists, places)
    return next(found, f"{OWN_STORE}/{name}")


@contextlib.contextmanager
def store_access(path: str) -> Iterator[None]:
    """Open the stores to a check by root that otherwise acts as the daemon's user."""
    user = os.geteuid()
    if user == 0 or os.getuid() != 0 or not is_stored(path):
        yield
        return
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(user)


def is_encrypted(path: str) -> bool:
    """Return True if this is the file of a credential that only the service manager decrypts."""
    return str(Path(path).parent) in ENCRYPTED_STORES


def is_stored(path: str) -> bool:
    """Return True if this is, or would be, the file of a credential in a store."""
    return str(Path(path).parent) in {*STORES, *ENCRYPTED_STORES}


def is_credential(path: str) -> bool:
    """Return True if this is the file of a credential that the daemon was given."""
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    return given is not None and Path(path).parent == Path(given)
