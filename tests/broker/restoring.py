"""A broker's place on disk, whose store is lost and restored, for tests."""

import asyncio
import io
import re
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from brokers import MemoryAudit
from control_plane import Site
from sealane.crypto.snapshot import RecipientKey
from sealane.daemon.broker.opening import OpenedBroker, opened_broker
from sealane.daemon.broker.restore import Restore, check_empty, filled, prepared
from sealane.daemon.broker.restored import Accepted
from sealane.daemon.broker.snapshot import Snapshots
from sealane.daemon.config import Config, load_config
from sealane.daemon.runtime.metrics import Metrics

ANCHOR = "trust-anchor.pem"


@dataclass
class Place:
    """The configuration and state directory of broker `broker`."""

    root: Path
    recipient: RecipientKey = field(default_factory=RecipientKey.create)

    def __post_init__(self) -> None:
        self.site = Site(self.root)
        self.site.write_policy({"g": ["gateway"]})
        self.site.broker_config()
        self.state.mkdir(mode=0o700)

    @property
    def state(self) -> Path:
        return self.root / "broker"

    @property
    def config(self) -> Config:
        return load_config(self.root / "broker.toml")

    @property
    def anchor(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate((self.root / ANCHOR).read_bytes())

    def opened(self):  # type: ignore[no-untyped-def]
        config = self.config
        assert config.broker is not None
        return opened_broker(
            config.broker, node="broker", state=self.state, metrics=Metrics(), tcti=""
        )

    async def snapshot(self, opened: OpenedBroker) -> bytes:
        """Take a snapshot, and note the trust anchor."""
        registry = opened.service.registry
        (self.root / ANCHOR).write_bytes(registry.authority.anchor_pem)
        snapshots = Snapshots(registry, node="broker", audit=MemoryAudit(), metrics=Metrics())
        public = self.recipient.kem.public_key
        return b"".join([part async for part in snapshots.take(public)])

    def lose(self, *, instance: int = 7) -> None:
        """Lose store and counters; prepare the configuration and policy of a restore."""
        for path in [*self.state.glob("broker.sqlite*"), *self.state.glob("*.counter")]:
            path.unlink()
        path = self.root / "broker.toml"
        text = re.sub(r"(?m)^instance = \d+\n", "", path.read_text())
        path.write_text(text.replace("[broker]\n", f"[broker]\ninstance = {instance}\n"))
        self.site.write_policy({"g": ["gateway"]})

    def prepared(
        self,
        snapshot: bytes,
        *,
        accepted: Accepted = Accepted(),  # noqa: B008
        restored_before: int = 0,
    ) -> Restore:
        return prepared(
            io.BytesIO(snapshot),
            self.config,
            key=self.recipient,
            anchor=self.anchor,
            accepted=accepted,
            restored_before=restored_before,
        )

    async def restore(
        self,
        snapshot: bytes,
        *,
        accepted: Accepted = Accepted(),  # noqa: B008
        restored_before: int = 0,
    ) -> Restore:
        restore = await asyncio.to_thread(
            self.prepared, snapshot, accepted=accepted, restored_before=restored_before
        )
        await check_empty(self.config)
        await filled(restore, self.config)
        return restore
