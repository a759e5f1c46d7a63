"""Secondary evidence: a device's statement, obtained by an operator's command.

A policy may require evidence of a device in addition to the node's own. The device is queried with
its vendor's library, which is not part of Sealane, so a command does that. It gets the device's
nonce (`device_nonce`, in hexadecimal) as its last argument and writes one JSON object to standard
output; for `nvidia` `{"report": base64 of SPDM request and response, "certificates": chain in PEM,
leaf first}`. The operator provides the command; it runs as the daemon's user. Its output is not
trusted: the verifier checks it.
"""

import asyncio
import base64
import binascii
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Final, cast

from sealane.crypto.evidence import nvidia
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.evidence.media_types import NVIDIA_EVIDENCE
from sealane.daemon.config import SecondaryEvidenceConfig
from sealane.daemon.node.evidence.driver import SecondarySource
from sealane.errors import UnavailableError
from sealane.reasons import ReasonId

OUTPUT_BYTES_MAX: Final = 128 << 10
"""Twice the size of the largest report, which base64 makes a third larger, plus its
certificates."""
_COMPLAINT_BYTES_MAX: Final = 200
_READ_BYTES: Final = 16 << 10
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"


class CommandSource:
    """Runs a command for each challenge."""

    evidence_type = nvidia.EVIDENCE_TYPE

    def __init__(self, config: SecondaryEvidenceConfig) -> None:
        self.label = config.label
        self._command = config.command or []
        self._seconds = config.timeout_seconds

    async def collect(self, nonce: bytes) -> Item:
        """Return the item that answers `nonce`; UnavailableError `evidence.secondary.…`."""
        try:
            async with asyncio.timeout(self._seconds):
                output = await self._run(nonce.hex())
        except TimeoutError as error:
            raise self._error(
                "evidence.secondary.timeout", f"no answer within {self._seconds} s"
            ) from error
        return Item(NVIDIA_EVIDENCE, self._parse(output))

    async def _run(self, argument: str) -> bytes:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                argument,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": _PATH},
                start_new_session=True,
            )
        except OSError as error:
            raise self._error("evidence.secondary.failed", str(error.strerror)) from error
        try:
            output, complaint = await asyncio.gather(
                self._read(cast("asyncio.StreamReader", process.stdout), OUTPUT_BYTES_MAX),
                self._read(cast("asyncio.StreamReader", process.stderr), _COMPLAINT_BYTES_MAX),
            )
            status = await process.wait()
        finally:
            # Including processes that it started and left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status != 0:
            text = complaint[:_COMPLAINT_BYTES_MAX].decode("ascii", "replace").strip()
            raise self._error("evidence.secondary.failed", f"status {status}: {text}")
        if len(output) > OUTPUT_BYTES_MAX:
            raise self._error("evidence.secondary.size", f"more than {OUTPUT_BYTES_MAX} bytes")
        return output

    @staticmethod
    async def _read(stream: asyncio.StreamReader, bytes_max: int) -> bytes:
        """Return the output, at most one byte more than `bytes_max`; the rest is dropped."""
        kept = b""
        while chunk := await stream.read(_READ_BYTES):
            kept += chunk[: bytes_max + 1 - len(kept)]
        return kept

    def _parse(self, output: bytes) -> bytes:
        try:
            said = json.loads(output)
            report, certificates = said["report"], said["certificates"]
            return nvidia.encode_evidence(
                base64.b64decode(report, validate=True), certificates.encode("ascii")
            )
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            binascii.Error,
        ) as error:
            raise self._error(
                "evidence.secondary.malformed",
                "not a JSON object with report (base64) and certificates (PEM)",
            ) from error

    def _error(self, reason: ReasonId, message: str) -> UnavailableError:
        return UnavailableError(
            reason,
            f"enrolment.secondary {self.label}, {self._command[0]}: {message}",
        )


async def collect_all(sources: Sequence[SecondarySource], nonce: bytes) -> dict[str, Item]:
    """Return the items of all sources by label, collected concurrently; raises the first error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = {s.label: tasks.create_task(s.collect(nonce)) for s in sources}
    except ExceptionGroup as group:
        # The errors differ only by device; a retry asks all of them again.
        raise group.exceptions[0] from group
    return {label: task.result() for label, task in running.items()}
