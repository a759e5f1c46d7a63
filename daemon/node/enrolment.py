"""The node's side of enrolment: challenge, evidence, certificate (attestation.md)."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from google.protobuf import timestamp_pb2

from sealane import __version__
from sealane.crypto.anchors import TrustAnchors, digest, parse_retired
from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.certificates import anchor_key, server_name, spiffe_id, verify_leaf
from sealane.crypto.evidence.claims import device_nonce
from sealane.crypto.evidence.cmw import (
    COLLATERAL,
    PRIMARY,
    Item,
    encode_collection,
    secondary_digests,
)
from sealane.crypto.roles import Role
from sealane.daemon.config import BrokerAddresses, EnrolmentConfig
from sealane.daemon.node.channels import open_channel
from sealane.daemon.node.evidence.driver import Driver, SecondarySource
from sealane.daemon.node.evidence.secondary import collect_all
from sealane.daemon.node.identity import STALE, Issued, Keys
from sealane.daemon.node.kept_anchors import KeptAnchors
from sealane.daemon.runtime.authorizers import RESULT_KEY, VERIFIER_KEY
from sealane.daemon.runtime.clock import monotonic_ns, utc_now
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.status import error_of
from sealane.protocol.v1 import attestation_pb2, attestation_pb2_grpc

_CALL_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attested:
    """A verifier's answer that isn't a refusal, to evidence with these devices."""

    leaf: x509.Certificate
    devices: Mapping[str, Item]
    anchors: TrustAnchors
    result: attestation_pb2.AttestationResult


class Enrolment:
    """Gets certificates for one role of this node from the broker's verifier."""

    def __init__(
        self,
        config: EnrolmentConfig,
        *,
        node: str,
        role: str,
        driver: Driver,
        kept: KeptAnchors,
        sources: Sequence[SecondarySource] = (),
        addresses: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._config = config
        self._node = node
        self._role = role
        self._kept = kept
        self._in_use: tuple[bytes, ...] = ()
        """Digests of the anchors that the role's server accepts callers by."""
        self._certified_by = b""
        self._driver = driver
        self._sources = sources
        self._addresses = addresses
        self._refused: set[str] = set()
        """Labels of devices that the verifier didn't accept when they were last asked."""
        self._silent: set[str] = set()
        """Labels of devices that didn't answer while this role last attested."""

    async def obtain(self, keys: Keys) -> Issued:
        """Enrol; retry while the broker can't be reached, until the timeout.

        A challenge belongs to one broker. If that broker stops before it is answered, or no longer
        knows it (it restarted or was replaced by another process), the next broker is asked for a
        new challenge.
        """
        deadline = monotonic_ns() + self._config.timeout_seconds * 10**9
        brokers = itertools.cycle(self._config.brokers)
        while True:
            broker = next(brokers)
            try:
                return await self._attest_with_devices(keys, broker)
            except grpc.aio.AioRpcError as failed:
                peer = f"broker {broker.node} at {broker.attestation_address}"
                error = error_of(failed, peer=peer)
                is_stale = error.reason == STALE
                if not is_stale and not isinstance(error, UnavailableError):
                    raise error from failed
                if monotonic_ns() >= deadline:
                    if is_stale:
                        raise error from failed
                    raise UnavailableError(
                        error.reason,
                        f"enrolment.attestation_address {broker.attestation_address}: "
                        f"no answer from the broker within {self._config.timeout_seconds} s "
                        f"({error.args[0]})",
                    ) from error
            await asyncio.sleep(_RETRY_SECONDS)

    async def _attest_with_devices(self, keys: Keys, broker: BrokerAddresses) -> Issued:
        """Attest with every device; if that is refused, without those that are refused.

        A device that is refused must not keep its node from serving without it, nor another device
        from being used. The verifier doesn't say which it refuses, so they are tried one by one:
        first those that weren't accepted last time, because a refusal issues no certificate.
        """
        self._silent.clear()
        good = {source.label for source in self._sources} - self._refused
        tried = {*self._refused}
        attested, refused = await self._add_in_turn(keys, broker, tried, good)
        if attested is None:
            answered: set[str] = set()
            try:
                attested = await self._attest(keys, broker, good, answered)
            except grpc.aio.AioRpcError as failed:
                if not answered or not _is_refusal(failed, broker):
                    raise
                tried |= answered
                good = set()
                attested, more = await self._add_in_turn(keys, broker, answered, good)
                refused |= more
        if attested is None:
            attested = await self._attest(keys, broker, set(), set())
        self._refused = tried - good
        if refused:
            get_logger().warning(
                "devices_refused",
                labels=sorted(refused),
                message="the policy accepts this node, but not with these devices; they are not "
                "used",
            )
        return self._adopt(attested)

    async def _add_in_turn(
        self, keys: Keys, broker: BrokerAddresses, labels: set[str], good: set[str]
    ) -> tuple["_Attested | None", set[str]]:
        """Attest with one more of these devices at a time; add those accepted to `good`.

        Returns what the verifier answered last, if it wasn't a refusal, and which it refused.
        """
        attested, refused = None, set[str]()
        for label in sorted(labels):
            answered: set[str] = set()
            try:
                attested = await self._attest(keys, broker, {*good, label}, answered)
            except grpc.aio.AioRpcError as failed:
                if not _is_refusal(failed, broker):
                    raise
                refused.add(label)
            else:
                if label in answered:
                    good.add(label)
        return attested, refused

    async def _attest(
        self, keys: Keys, broker: BrokerAddresses, asked: set[str], answered: set[str]
    ) -> "_Attested":
        """Attest, and with the devices of these labels of those that aren't required.

        Adds the labels of those that answered to `answered`.
        """
        driver = self._driver
        audience = spiffe_id(broker.node, Role.BROKER)
        anchors = self._kept.anchors
        credentials = grpc.ssl_channel_credentials(anchors.pem)
        async with open_channel(
            broker.attestation_address, server_name(broker.node, Role.BROKER), credentials
        ) as channel:
            stub = attestation_pb2_grpc.AttestationStub(channel)
            challenge = await stub.GetChallenge(
                attestation_pb2.GetChallengeRequest(
                    node=self._node,
                    role=self._role,
                    evidence_types=[driver.evidence_type, *self._secondary_types()],
                    introduction=await driver.introduction(),
                ),
                timeout=_CALL_SECONDS,
            )
            if challenge.audience != audience:
                raise VerificationError(
                    "attestation.audience.mismatch",
                    f"the verifier is {challenge.audience!r}; expected: {audience!r}",
                )
            devices = await self._secondary(challenge, keys, asked, answered)
            items = {**devices}
            endorsements = await driver.endorsements()
            if endorsements is not None:
                items[COLLATERAL] = endorsements
            runtime_data = RuntimeData(
                nonce=challenge.nonce,
                audience=audience,
                node=self._node,
                role=self._role,
                incarnation=keys.incarnation,
                tls_public_key=keys.tls_public,
                kem_public_key=keys.kem_public,
                verifier_key_sha256=key_digest(anchors.newest),
                evidence_type=driver.evidence_type,
                kem_algorithm=keys.kem.algorithm,
                secondary_evidence_sha256=secondary_digests(items),
            )
            evidence = await driver.collect(runtime_data, activation=challenge.activation)
            items[PRIMARY] = Item(driver.media_type, evidence)
            sent = timestamp_pb2.Timestamp()
            sent.FromDatetime(utc_now())
            request = attestation_pb2.AttestRequest(
                session_id=challenge.session_id,
                runtime_data=runtime_data.encode(),
                evidence=encode_collection(items),
                version=__version__,
                send_time=sent,
                addresses=self._addresses(),
                trusted_authorities=self._in_use,
                certifying_authority=self._certified_by,
            )
            try:
                result = await stub.Attest(request, timeout=_CALL_SECONDS)
            except grpc.aio.AioRpcError:
                self._hint(challenge)
                raise
        try:
            leaf = x509.load_pem_x509_certificate(result.certificate_pem.encode())
        except ValueError as error:
            raise VerificationError(
                "certificate.profile", "the broker's answer holds no certificate"
            ) from error
        return _Attested(leaf=leaf, devices=devices, anchors=anchors, result=result)

    def _adopt(self, attested: "_Attested") -> Issued:
        """Use what the verifier answered, and what it says about its authorities."""
        leaf, result, anchors = attested.leaf, attested.result, attested.anchors
        said = (self._in_use, self._certified_by)
        is_changing = result.HasField("succession") and not result.succession.retirement
        if result.HasField("succession"):
            is_changing |= self._kept.learn(result.succession)
        anchors.retired = parse_retired(result.retired_authorities)
        # The identity puts them into its server's configuration with this certificate.
        self._in_use = anchors.digests
        anchors.issuer = anchors.issuing.checked(partial(_issuer, leaf))
        self._certified_by = digest(anchors.issuer)
        is_news = said != (self._in_use, self._certified_by)
        metadata = ((RESULT_KEY, result.token), (VERIFIER_KEY, result.verifier_certificate))
        return Issued(
            leaf=leaf,
            metadata=metadata,
            devices=attested.devices,
            silent=frozenset(self._silent - attested.devices.keys()),
            is_to_be_told=is_changing and is_news,
        )

    def _secondary_types(self) -> list[str]:
        return sorted({source.evidence_type for source in self._sources})

    async def _secondary(
        self,
        challenge: attestation_pb2.Challenge,
        keys: Keys,
        asked: set[str],
        answered: set[str],
    ) -> dict[str, Item]:
        """Collect evidence from devices: of types that the policy requires, and that it knows."""
        nonce = device_nonce(
            nonce=challenge.nonce, tls_public_key=keys.tls_public, kem_public_key=keys.kem_public
        )

        def of_types(types: Iterable[str]) -> list[SecondarySource]:
            wanted = {*types}
            return [source for source in self._sources if source.evidence_type in wanted]

        items = await collect_all(of_types(challenge.required_evidence_types), nonce)
        for source in of_types(challenge.optional_evidence_types):
            if source.label not in asked:
                continue
            try:
                items[source.label] = await source.collect(nonce)
                answered.add(source.label)
            except UnavailableError as error:
                self._silent.add(source.label)
                get_logger().warning(
                    "device_silent",
                    label=source.label,
                    reason=error.reason,
                    message=str(error),
                )
        return items

    def _hint(self, challenge: attestation_pb2.Challenge) -> None:
        """Log a possible cause of a refusal, because the broker's answer gives none."""
        given = {self._driver.evidence_type, *self._secondary_types()}
        if missing := sorted(set(challenge.required_evidence_types) - given):
            get_logger().warning(
                "secondary_evidence_missing",
                types=missing,
                message="the policy may require evidence that enrolment.secondary has no source "
                "for",
            )


def _is_refusal(failed: grpc.aio.AioRpcError, broker: BrokerAddresses) -> bool:
    return isinstance(error_of(failed, peer=broker.node), VerificationError)


def _issuer(leaf: x509.Certificate, anchor: x509.Certificate) -> x509.Certificate:
    # The identity checks whether it is valid now.
    verify_leaf(leaf, anchor=anchor, now=leaf.not_valid_before_utc)
    return anchor


def key_digest(anchor: x509.Certificate) -> bytes:
    """Return SHA-256 of the broker key's SubjectPublicKeyInfo."""
    return hashlib.sha256(
        anchor_key(anchor).public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    ).digest()
