"""DH-HMAC-CHAP secrets in files."""

from sealane.daemon.runtime.files import read_secret
from sealane.errors import UsageError
from sealane.protocol.nvme.authentication import HostSecret


def read_dhchap(path: str | None, key: str) -> HostSecret | None:
    """Read a DH-HMAC-CHAP secret from a file; None without a path. `key` names it in errors.

    UsageError `secret.…`, `key.file…` or `config.…`.
    """
    if path is None:
        return None
    try:
        return HostSecret.parse(read_secret(path, key=key).decode("ascii").strip())
    except UnicodeDecodeError:
        raise UsageError("secret.format", f"{key} {path}: not a DHHC-1 secret") from None
