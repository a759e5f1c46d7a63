"""How a gRPC server learns of a renewed certificate without being brought down by it.

gRPC asks before every handshake and, given a configuration, replaces its handshaker factory and
frees the old one, although another thread may be about to use it (grpc/grpc issue 36693). Some
hundred handshakes at once, all of them given a configuration, end the process. So a server is given
one only when it has changed, and no handshake begins shortly before and after.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

import grpc

# From being told "unchanged" to holding the factory are microseconds.
QUIET_SECONDS: Final = 0.01


class CertificateFeed:
    """What one server was given, and what it is given next. Called from gRPC's threads."""

    def __init__(self, current: Callable[[], grpc.ServerCertificateConfiguration]) -> None:
        self._current = current
        self._given = current()
        self._lock = threading.Lock()
        self._quiet_until = 0.0

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """Return credentials that follow `current`; `mutual` demands a client certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._given,
            self._changed,  # type: ignore[arg-type]  # None says "unchanged", which the stub omits
            require_client_authentication=mutual,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        with self._lock:
            # Who comes in while the factory is replaced waits for the new one.
            time.sleep(max(self._quiet_until - time.monotonic(), 0))
            current = self._current()
            if current is self._given:
                return None
            # Who came in before has the old one by the end of this.
            time.sleep(QUIET_SECONDS)
            self._given = current
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            return current
