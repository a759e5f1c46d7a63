"""A role that attests at a real broker from inside the test, which has access to its secrets."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from control_plane import Daemon, Site
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.device.broker_calls import DeviceClient
from sealane.daemon.gateway.broker_client import BrokerClient
from sealane.daemon.node.enrolment import Enrolment
from sealane.daemon.node.evidence.choose import open_driver
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.node.trust_client import TrustClient
from sealane.daemon.runtime.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class Insider:
    """A role's keys and certificate, and its calls to the broker."""

    config: EnrolmentConfig
    identity: Identity
    broker: BrokerClient
    devices: DeviceClient
    trust: TrustClient


def enrolment_config(
    site: Site, broker: Daemon, *, node: str, broker_address: str = ""
) -> EnrolmentConfig:
    """Return the enrolment section of the node's configuration."""
    site.key(node)
    return EnrolmentConfig(
        broker_node="broker",
        broker_address=broker_address or broker.addresses["broker"],
        attestation_address=broker.addresses["attestation"],
        trust_anchor=str(site.root / "broker" / "trust-anchor.pem"),
        evidence="software",
        key_file=str(site.root / f"{node}.pem"),
    )


@contextlib.asynccontextmanager
async def insider(
    site: Site, broker: Daemon, *, node: str, role: str = "gateway", broker_address: str = ""
) -> AsyncIterator[Insider]:
    """Attest as `role` of `node`, which the policy must allow."""
    config = enrolment_config(site, broker, node=node, broker_address=broker_address)
    driver = open_driver(config, tcti="")
    kept = KeptAnchors.open(config, Path(config.trust_anchor).parent)
    enrolment = Enrolment(config, node=node, role=role, driver=driver, kept=kept)
    identity = Identity(
        node=node, role=role, anchors=kept.anchors, obtain=enrolment.obtain, metrics=Metrics()
    )
    await identity.renew()
    trust = TrustClient(config, identity)
    identity.find_peer = trust.leaves
    try:
        yield Insider(
            config=config,
            identity=identity,
            broker=BrokerClient(config, identity),
            devices=DeviceClient(config, identity),
            trust=trust,
        )
    finally:
        await identity.channels.close()
        driver.close()
