"""What a node trusts: the operator's file, and the successions that it has learned since."""

from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from sealane.crypto.anchors import Succession, TrustAnchors
from sealane.daemon.config import EnrolmentConfig
from sealane.daemon.runtime.directories import replace_file
from sealane.daemon.runtime.files import read_file
from sealane.daemon.runtime.logs import get_logger
from sealane.errors import VerificationError
from sealane.protocol.v1 import attestation_pb2

SUCCESSIONS_NAME: Final = "successions"
SUCCESSIONS_MAX: Final = 64
"""Successions that a node keeps; its operator's file must not be older."""
_BYTES_MAX: Final = 1 << 20


class KeptAnchors:
    """The trust anchors of a daemon's roles; `learn` changes them, durably."""

    def __init__(self, configured: TrustAnchors, path: Path) -> None:
        self._path = path
        self._kept: list[Succession] = []
        self.anchors = configured
        self._load()

    @classmethod
    def open(cls, config: EnrolmentConfig, state: Path) -> "KeptAnchors":
        """Read the operator's file and what was learned; VerificationError if either is faulty."""
        key = "enrolment.trust_anchor"
        configured = TrustAnchors.parse(
            read_file(config.trust_anchor, key=key), source=f"{key} {config.trust_anchor}"
        )
        return cls(configured, state / SUCCESSIONS_NAME)

    def learn(self, message: attestation_pb2.Succession) -> bool:
        """Follow a succession that the broker stated; return whether that changed anything.

        VerificationError `anchors.succession.…`; nothing has changed. Errors of `replace_file` if
        it can't be kept; nothing has changed either.
        """
        learned = _succession(message)
        before = self.anchors.certificates
        after = learned.follow(before)
        if after == before:
            return False
        others = [each for each in self._kept if each.predecessor != learned.predecessor]
        kept = [*others, learned][-SUCCESSIONS_MAX:]
        encoded = attestation_pb2.Successions(successions=map(succession_message, kept))
        replace_file(self._path, encoded.SerializeToString())
        self._kept = kept
        self.anchors.certificates = after
        get_logger().info(
            "trust_anchors_changed", sha256=[each.hex() for each in self.anchors.digests]
        )
        return True

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                encoded = file.read(_BYTES_MAX)
        except FileNotFoundError:
            return
        try:
            messages = attestation_pb2.Successions.FromString(encoded).successions
        except DecodeError as error:
            raise VerificationError(
                "anchors.succession.malformed", f"{self._path}: can't be parsed"
            ) from error
        for message in messages:
            succession = _succession(message)
            try:
                after = succession.follow(self.anchors.certificates)
            except VerificationError as error:
                # The operator's file is newer, or of other brokers.
                if error.reason != "anchors.succession.foreign":
                    raise
                continue
            self.anchors.certificates = after
            self._kept.append(succession)


def _succession(message: attestation_pb2.Succession) -> Succession:
    return Succession(
        predecessor=message.predecessor,
        certificate=message.certificate,
        signature=message.signature,
        retirement=message.retirement,
    )


def succession_message(succession: Succession) -> attestation_pb2.Succession:
    """Return a succession as brokers state it and nodes keep it."""
    return attestation_pb2.Succession(
        predecessor=succession.predecessor,
        certificate=succession.certificate,
        signature=succession.signature,
        retirement=succession.retirement,
    )
