"""The roles of a daemon that enrol at a broker: their identities, and authorizations of peers."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sealane.crypto.roles import Role
from sealane.daemon.config import AUTHORIZATION_SECONDS, Config, EnrolmentConfig
from sealane.daemon.node.authorizations import Ask, Authorizations, Lost
from sealane.daemon.node.enrolment import Enrolment
from sealane.daemon.node.evidence.choose import open_driver, open_sources
from sealane.daemon.node.evidence.driver import Driver
from sealane.daemon.node.identity import Identity
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.node.peers import PeerIncarnation
from sealane.daemon.node.trust_client import TrustClient
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics, by_owner
from sealane.errors import UsageError


class EnrolledRoles:
    """Identities, evidence driver and peer authorizations of a daemon's roles.

    `spawn` runs tasks for the life of the daemon, `stack` closes what ends with it.
    """

    def __init__(
        self,
        config: Config,
        *,
        metrics: Metrics,
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
        stack: contextlib.AsyncExitStack,
        addresses: Mapping[str, str],
    ) -> None:
        """Enrol nothing yet. `addresses` are those that the daemon has bound so far."""
        self._config = config
        self._metrics = metrics
        self._spawn = spawn
        self._stack = stack
        self._addresses = addresses
        self._driver: Driver | None = None
        self._kept: KeptAnchors | None = None
        self.identities: list[Identity] = []
        self.is_development = False
        """Whether any role uses evidence that proves nothing about the machine."""

    @property
    def config(self) -> EnrolmentConfig:
        """Return the enrolment configuration; UsageError if there is none."""
        if self._config.enrolment is None:
            raise UsageError("config.missing", "enrolment: missing")
        return self._config.enrolment

    def authorize_peers(
        self,
        identity: Identity,
        ask: Ask,
        *,
        uses: Callable[[], Iterable[PeerIncarnation]],
        lost: Lost,
        fresh_seconds: float = AUTHORIZATION_SECONDS,
        keep_seconds: float | None = None,
    ) -> Authorizations:
        """Start to ask the broker about the peers of a role that is about to serve."""
        role = identity.role

        async def count_and_end(peer: PeerIncarnation, reason: str) -> None:
            self._metrics.authorizations_lost.labels(role, reason).inc()
            await lost(peer, reason)

        authorizations = Authorizations(
            ask=ask,
            uses=uses,
            lost=count_and_end,
            fresh_seconds=fresh_seconds,
            keep_seconds=keep_seconds,
        )
        identity.on_barred.append(authorizations.lose_all)
        self._metrics.broker_away.labels(role).set_function(
            lambda: int(authorizations.is_broker_away)
        )
        self._metrics.add_statistics(
            f"{role}_authorization", ("peer",), lambda: by_owner(authorizations.ages())
        )
        self._spawn(f"{role}-authorizations", authorizations.run())
        return authorizations

    async def enrol(self, role: Role) -> tuple[Identity, TrustClient]:
        """Attest as `role`, then keep its certificate renewed and its channels open."""
        driver = await self._evidence_driver()
        enrolment = Enrolment(
            self.config,
            node=self._config.node.name,
            role=role,
            driver=driver,
            kept=await self._kept_anchors(),
            sources=open_sources(self.config),
            addresses=partial(self._listening, role),
        )
        if driver.is_development:
            self.is_development = True
            get_logger().warning(
                "software_evidence",
                role=role,
                evidence=driver.evidence_type,
                message="this node only proves possession of a key file; for development only",
            )
        identity = Identity(
            node=self._config.node.name,
            role=role,
            anchors=(await self._kept_anchors()).anchors,
            obtain=enrolment.obtain,
            metrics=self._metrics,
            kem=await driver.create_kem_key(),
        )
        await self.keep(identity)
        trust = TrustClient(self.config, identity)
        identity.find_peer = trust.leaves
        self._stack.push_async_callback(identity.channels.close)
        self._metrics.channels.labels(role).set_function(lambda: identity.channels.count)
        return identity, trust

    def _listening(self, role: Role) -> Mapping[str, str]:
        """Return the role's listeners: as configured until they are bound, but no unknown port."""
        configured = {
            purpose: address
            for purpose, address in self._config.listeners(role).items()
            if not address.endswith(":0")
        }
        bound = {
            purpose: self._addresses[purpose]
            for purpose in self._config.listeners(role)
            if purpose in self._addresses
        }
        return {**configured, **bound}

    async def _kept_anchors(self) -> KeptAnchors:
        """Return what all roles trust; read for the first one."""
        if self._kept is None:
            state = Path(self._config.node.state_dir)
            self._kept = await asyncio.to_thread(KeptAnchors.open, self.config, state)
        return self._kept

    async def _evidence_driver(self) -> Driver:
        """Open the driver for the first role; other roles share it."""
        if self._driver is None:
            config, tcti = self.config, self._config.tpm.tcti
            self._driver = await asyncio.to_thread(open_driver, config, tcti=tcti)
            self._stack.callback(self._driver.close)
            get_logger().info(
                "evidence_opened",
                evidence=self._driver.evidence_type,
                hardware_id=self._driver.hardware_id,
            )
        return self._driver

    async def keep(self, identity: Identity) -> None:
        """Get a role its first certificate and keep it renewed."""
        await identity.renew()
        self.identities.append(identity)
        self._spawn(f"renew-{identity.role}", identity.keep_renewed())
