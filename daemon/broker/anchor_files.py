"""The files with the authorities' certificates, which an operator copies from a broker."""

from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.serialization import Encoding

from sealane.daemon.broker.authorities import Authorities
from sealane.daemon.runtime.directories import replace_file
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import Error

TRUST_ANCHOR_NAME: Final = "trust-anchor.pem"
"""What nodes that are set up now should trust."""
AUDIT_ANCHORS_NAME: Final = "audit-anchors.pem"
"""All that audit logs are signed by."""


class AnchorFiles:
    """Both files in a broker's state directory."""

    def __init__(self, state: Path, authorities: Authorities) -> None:
        self._state = state
        self._authorities = authorities
        self._written: dict[str, bytes] = {}

    def write(self) -> None:
        """Write what has changed; errors of `replace_file`."""
        for name, certificates in (
            (TRUST_ANCHOR_NAME, self._authorities.anchors.certificates),
            (AUDIT_ANCHORS_NAME, self._authorities.ever),
        ):
            content = b"".join(each.public_bytes(Encoding.PEM) for each in certificates)
            if self._written.get(name) == content:
                continue
            path = self._state / name
            replace_file(path, content)
            # No secret, and a copy keeps the mode: other nodes' daemons must be able to read it.
            path.chmod(0o644)
            self._written[name] = content

    def try_to_write(self) -> None:
        """Write what has changed, or log why it can't be written."""
        try:
            self.write()
        except (Error, OSError) as error:
            get_logger().error("anchors_unwritten", message=str(error))
