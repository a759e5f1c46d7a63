"""Files of certificates that a configuration names."""

from collections.abc import Sequence

from cryptography import x509

from sealane.daemon.runtime.files import read_file
from sealane.errors import UsageError


def read_certificates(path: str | None, key: str) -> Sequence[x509.Certificate]:
    """Read certificates in PEM from the file that the configuration key `key` names, if any."""
    if path is None:
        return ()
    content = read_file(path, key=key)
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise UsageError("config.value", f"{key} {path}: allowed: certificates in PEM") from error
