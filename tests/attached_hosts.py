"""Hosts of attached volumes."""

import secrets

from sealane.daemon.ports import AttachedPort
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController


def new_secret() -> HostSecret:
    """Make a host's secret for one attachment."""
    return HostSecret.generate(secrets.token_bytes)


def host_of(attached: AttachedPort, host_nqn: str) -> HostController:
    """Return the host that has the secret; not connected yet."""
    export = attached.export
    return HostController(
        traddr=export.traddr,
        trsvcid=export.trsvcid,
        subsystem_nqn=export.subsystem_nqn,
        host_nqn=host_nqn,
        credentials=Credentials(secret=attached.secret),
    )
