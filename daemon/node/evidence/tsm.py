"""The `tsm` driver: SEV-SNP and TDX reports through Linux's configfs-tsm, one interface for both.

Kernel documentation: ABI/testing/configfs-tsm-report. A report is a directory: `inblob` (64 bytes)
is what the hardware signs, `outblob` the signed report. `generation` increases with every write,
which reveals another writer to the same report; this driver's reports have unguessable names.
"""

import asyncio
import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.evidence.media_types import SNP_CERTIFICATES, SNP_REPORT, TDX_QUOTE
from sealane.crypto.kem import KemKey, X25519KemKey
from sealane.daemon.config import EnrolmentConfig
from sealane.errors import UnavailableError, UsageError

REPORTS: Final = Path("/sys/kernel/config/tsm/report")

_PROVIDERS: Final = {"sev_guest": ("snp", SNP_REPORT), "tdx_guest": ("tdx", TDX_QUOTE)}
_NAME_BYTES_MAX: Final = 64
_REPORT_DATA_BYTES: Final = 64
# More than any provider returns: an SNP report has 1184 bytes, a TDX quote some 5 to 8 KiB.
_REPORT_BYTES_MAX: Final = 32 << 10
_TABLE_BYTES_MAX: Final = 64 << 10
_ATTEMPTS_MAX: Final = 4
# Intel's quotes begin with their version; no Sealane verifier reads other formats, such as the CWT
# of a DICE platform.
_QUOTE_VERSIONS: Final = {4, 5}


def check(config: EnrolmentConfig) -> None:
    """Check nothing: only the hardware can say."""


def open_driver(config: EnrolmentConfig, *, tcti: str) -> "TsmDriver":  # noqa: ARG001
    """Ask which hardware this machine is; blocking."""
    return TsmDriver(ReportTree(Path(config.tsm.reports)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The signed report, and the host's data for its verification."""

    outblob: bytes
    auxblob: bytes


class ReportTree:
    """The directory of reports. Blocking; raises OSError, also if a file is too long."""

    def __init__(self, root: Path = REPORTS) -> None:
        self.root = root

    def create(self) -> Path:
        """Create a report; configfs fills its directory."""
        directory = self.root / f"sealane-{secrets.token_hex(8)}"
        directory.mkdir(mode=0o700)
        return directory

    def remove(self, directory: Path) -> None:
        """Remove a report; configfs empties its directory."""
        directory.rmdir()

    def write(self, path: Path, content: bytes) -> None:
        """Write an attribute."""
        path.write_bytes(content)

    def read(self, path: Path, *, bytes_max: int) -> bytes:
        """Read an attribute."""
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
        if len(content) > bytes_max:
            raise OSError(errno.EFBIG, f"more than {bytes_max} bytes", str(path))
        return content


class TsmDriver:
    """Driver for the confidential machine that this process runs in."""

    hardware_id = ""
    is_development = False

    def __init__(self, tree: ReportTree) -> None:
        """Find out which hardware it is; blocking.

        UsageError `evidence.tsm.provider` if no verifier supports it; UnavailableError
        `evidence.tsm.failed` if there is no configfs-tsm.
        """
        self._tree = tree
        with self._report_directory() as directory:
            provider = self._text(directory / "provider")
        if provider not in _PROVIDERS:
            raise UsageError(
                "evidence.tsm.provider",
                f"{tree.root}: provider {provider!r}; allowed: {', '.join(_PROVIDERS)}",
            )
        self._provider = provider
        self.evidence_type, self.media_type = _PROVIDERS[provider]

    async def create_kem_key(self) -> KemKey:
        """Create a key in memory, which this hardware encrypts."""
        return X25519KemKey.create()

    async def introduction(self) -> bytes:
        """Return nothing."""
        return b""

    async def endorsements(self) -> Item | None:
        """Return the host's certificates (SNP), from a report over random data, if it has any."""
        if self.evidence_type != "snp":
            return None
        report_data = secrets.token_bytes(_REPORT_DATA_BYTES)
        report = await asyncio.to_thread(self._report, report_data)
        return Item(SNP_CERTIFICATES, report.auxblob) if report.auxblob else None

    async def collect(
        self,
        runtime_data: RuntimeData,
        *,
        activation: bytes,  # noqa: ARG002 - for types with an introduction
    ) -> bytes:
        """Return the report over SHA-512 of the runtime data."""
        report_data = runtime_data.binding().report_data
        report = await asyncio.to_thread(self._report, report_data)
        version = int.from_bytes(report.outblob[:2], "little")
        if self.evidence_type == "tdx" and version not in _QUOTE_VERSIONS:
            raise UnavailableError(
                "evidence.tsm.quote", f"a quote of version {version}; allowed: {_QUOTE_VERSIONS}"
            )
        return report.outblob

    def close(self) -> None:
        """Do nothing: each report is removed after it was read."""

    def _report(self, report_data: bytes) -> Report:
        for _ in range(_ATTEMPTS_MAX):
            with self._report_directory() as directory:
                report = self._take(directory, report_data)
            if report is not None:
                return report
        raise UnavailableError(
            "evidence.tsm.raced",
            f"{self._tree.root}: another process writes to this daemon's report entries",
        )

    def _take(self, directory: Path, report_data: bytes) -> Report | None:
        """Have `report_data` signed; None if another write intervened."""
        before = self._text(directory / "generation")
        self._tree.write(directory / "inblob", report_data)
        outblob = self._tree.read(directory / "outblob", bytes_max=_REPORT_BYTES_MAX)
        auxblob = b""
        if self.evidence_type == "snp":
            auxblob = self._tree.read(directory / "auxblob", bytes_max=_TABLE_BYTES_MAX)
        provider = self._text(directory / "provider")
        after = self._text(directory / "generation")
        if provider != self._provider or int(after) != int(before) + 1:
            return None
        return Report(outblob=outblob, auxblob=auxblob)

    def _text(self, path: Path) -> str:
        return self._tree.read(path, bytes_max=_NAME_BYTES_MAX).decode("ascii", "replace").strip()

    @contextmanager
    def _report_directory(self) -> Iterator[Path]:
        try:
            directory = self._tree.create()
            try:
                yield directory
            finally:
                self._tree.remove(directory)
        except OSError as error:
            raise UnavailableError(
                "evidence.tsm.failed", f"{self._tree.root}: {error.strerror} ({error.filename})"
            ) from error
