"""Attached volumes and their hosts."""

import secrets

from sealane.client import Client
from sealane.daemon.gateway.data_path import AttachedVolume
from sealane.errors import UsageError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController


def new_secret() -> HostSecret:
    """Make a host's secret for one attachment."""
    return HostSecret.generate(secrets.token_bytes)


def host_of(attached: AttachedVolume, host_nqn: str) -> HostController:
    """Return the host that has the secret; not connected yet."""
    export = attached.export
    return HostController(
        traddr=export.traddr,
        trsvcid=export.trsvcid,
        subsystem_nqn=export.subsystem_nqn,
        host_nqn=host_nqn,
        credentials=Credentials(secret=attached.secret),
    )


async def detach_kept(client: Client, name: str) -> None:
    """Detach what an earlier process of this gateway may have left attached, back yet or not."""
    try:
        await client.volumes.detach(name)
    except UsageError as error:
        if error.reason != "volume.detached.state":
            raise
