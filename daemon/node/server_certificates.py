"""Gives a gRPC server its renewed certificates without crashing it.

Before every handshake gRPC asks for a configuration. Given one, it replaces its handshaker factory
and frees the old one, although another thread may be about to use it (grpc/grpc issue 36693). Some
hundred concurrent handshakes that each get a configuration crash the process. So a server gets one
only if it has changed, and no handshake begins shortly before and after.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import grpc

# gRPC takes microseconds from the answer "unchanged" to holding the factory.
QUIET_SECONDS: Final = 0.01


class CertificateFeed:
    """What one server was given, and what it gets next. Called from gRPC's threads."""

    def __init__(self, current: Callable[[], grpc.ServerCertificateConfiguration]) -> None:
        self._current = current
        self._given = current()
        self._lock = threading.Lock()
        self._quiet_until = 0.0

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Return credentials that follow `current`; `mutual` requires a client certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            self._changed,  # type: ignore[arg-type]  # None says "unchanged", which the stub omits
            require_client_authentication=mutual,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            # Handshakes that begin while the factory is replaced wait for the new one.
            time.sleep(max(self._quiet_until - time.monotonic(), 0))
            current = self._current()
            if current is self._given:
                return None
            # By the end of this, earlier handshakes hold the old factory.
            time.sleep(QUIET_SECONDS)
            self._given = current
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            return current
