"""The broker's audit log in a directory, its lines and its verification, for tests."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.audit import (
    GENESIS,
    ChainReader,
    Detail,
    Head,
    Outcome,
    Record,
    verify_log,
)
from sealane.daemon.broker.audit import AuditLog, Cutting
from sealane.daemon.broker.audit_retention import Retention
from sealane.daemon.broker.audit_segments import segment_paths

KEY = ec.derive_private_key(7, ec.SECP256R1())
SMALL = Cutting(bytes_max=1500)
"""A segment's size for some five records."""


class Keeper:
    """Keeps a head outside the log, where an adversary of the log can't change it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> Head:
        if not self._path.exists():
            return GENESIS
        content = self._path.read_bytes()
        return Head(sequence=int.from_bytes(content[:8], "big"), digest=content[8:])

    async def keep(self, head: Head) -> None:
        self._path.write_bytes(head.sequence.to_bytes(8, "big") + head.digest)


class PatientLog(AuditLog):
    """Waits for a cut with each record, so that a test knows which one begins a segment."""

    async def record(
        self, kind: str, *, subject: str, outcome: Outcome, reason: str = "", **detail: Detail
    ) -> None:
        await super().record(kind, subject=subject, outcome=outcome, reason=reason, **detail)
        await self._cut_ended()


async def opened(
    directory: Path, cutting: Cutting | None = None, retention: Retention | None = None
) -> AuditLog:
    return await PatientLog.open(
        directory / "audit.jsonl",
        keeper=Keeper(directory / "head"),
        signing_key=KEY,
        cutting=cutting,
        retention=retention,
    )


async def filled(directory: Path, count: int = 5, cutting: Cutting | None = None) -> Path:
    log = await opened(directory, cutting)
    for number in range(count):
        await log.record("lease.grant", subject="s", outcome="granted", number=number)
    await log.close()
    return log.path


def files(directory: Path) -> list[Path]:
    return segment_paths(directory / "audit.jsonl")


def verified(directory: Path) -> ChainReader:
    lines = [line for path in files(directory) for line in path.read_bytes().splitlines()]
    return verify_log(lines, signer=KEY.public_key())


def records(path: Path) -> list[Record]:
    return [Record.decode(line) for line in path.read_bytes().splitlines()]


def numbers(directory: Path) -> list[object]:
    """Return the numbers of the records of `filled`, in order."""
    found = [record for path in files(directory) for record in records(path)]
    return [record.detail["number"] for record in found if "number" in record.detail]
