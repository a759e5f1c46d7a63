"""A broker in its own process, on SQLite, and an open device of a target in this process."""

import contextlib
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.device.anchors.anchor import volume_record
from sealane.daemon.device.anchors.broker import BrokerAnchor
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.node.enrolment import Enrolment
from sealane.daemon.node.evidence.software import SoftwareDriver
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.runtime.metrics import Metrics

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from control_plane import Daemon, Site, daemon

_SECTOR_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class OpenDevice:
    """An anchor at the broker, and the names of its records."""

    anchor: BrokerAnchor
    names: list[str]


@contextlib.asynccontextmanager
async def open_device(*, volumes: int) -> AsyncIterator[OpenDevice]:
    """Start a broker, enrol as a target and as a gateway, register `volumes` volumes."""
    with tempfile.TemporaryDirectory(prefix="sl-") as root:
        site = Site(Path(root))
        site.write_policy({"s": ["target"], "g": ["gateway"]})
        with daemon(site.broker_config()) as broker:
            async with contextlib.AsyncExitStack() as stack:
                config, target = await _enrolled(site, broker, "s", "target", stack)
                client = DeviceClient(config, target)
                opened = await client.open(uuid.uuid4(), anchor="broker", found=())
                config, gateway = await _enrolled(site, broker, "g", "gateway", stack)
                made = [
                    await BrokerClient(config, gateway).register(
                        request_id=str(uuid.uuid4()),
                        display_name="",
                        size_bytes=_SECTOR_BYTES,
                        target_node="s",
                    )
                    for _ in range(volumes)
                ]
                yield OpenDevice(
                    anchor=BrokerAnchor({}, advance=partial(client.advance, opened.served)),
                    names=[volume_record(uuid.UUID(d.volume_id)) for d, _ in made],
                )


async def _enrolled(
    site: Site, broker: Daemon, node: str, role: str, stack: contextlib.AsyncExitStack
) -> tuple[EnrolmentConfig, Identity]:
    key = site.key(node)
    config = EnrolmentConfig(
        broker_address=broker.addresses["broker"],
        attestation_address=broker.addresses["attestation"],
        trust_anchor=str(site.root / "broker" / "trust-anchor.pem"),
        evidence="software",
        key_file=str(site.root / f"{node}.pem"),
    )
    kept = KeptAnchors.open(config, Path(config.trust_anchor).parent)
    enrolment = Enrolment(config, node=node, role=role, driver=SoftwareDriver(key), kept=kept)
    identity = Identity(
        node=node, role=role, anchors=kept.anchors, obtain=enrolment.obtain, metrics=Metrics()
    )
    await identity.renew()
    stack.push_async_callback(identity.channels.close)
    return config, identity
