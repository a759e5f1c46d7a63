"""The collateral in force: files an operator puts into a directory, and marks that only rise."""

import asyncio
import datetime as dt
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.daemon.clock import utc_now
from sealane.daemon.files import read_bounded, write_durably
from sealane.daemon.logs import get_logger
from sealane.daemon.metrics import Metrics
from sealane.errors import UnavailableError, UsageError, VerificationError

# A certificate for each of ten thousand machines, and the rest.
FILES_MAX: Final = 16384
_MARKS_BYTES_MAX: Final = 1 << 20


class CollateralKeeper:
    """Loads a directory; `current` is what verifiers go by until the next load.

    `marks` is a file of the broker's own. Losing it is as if no collateral had ever been used.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        marks: Path,
        metrics: Metrics,
        roots: VendorRoots | None = None,
    ) -> None:
        self._directory = directory
        self._marks = marks
        self._metrics = metrics
        self._roots = roots or vendor_roots()
        self._current = Collateral(roots=self._roots)

    def current(self) -> Collateral:
        """Return what was loaded last; from any thread."""
        return self._current

    async def reload(self) -> None:
        """Load at the present time, on a thread; raises as `load` does."""
        await asyncio.to_thread(lambda: self.load(now=utc_now()))

    def load(self, *, now: dt.datetime) -> None:
        """Read the directory again and use what holds. Blocking.

        What is refused is logged and left out. UsageError `collateral.unreadable` or
        `collateral.count` for the directory, VerificationError `collateral.marks.malformed` or
        UnavailableError `collateral.marks.unwritable` for the marks: then nothing changes.
        """
        if self._directory is None:
            return
        items = read_items(self._directory)
        before = read_marks(self._marks)
        loaded = load_collateral(items, roots=self._roots, high_water=before, now=now)
        if loaded.high_water != before:
            self._write_marks(loaded.high_water)
        self._current = loaded.collateral
        end = loaded.collateral.next_update
        self._metrics.collateral_refusals.set(len(loaded.refused))
        self._metrics.collateral_next_update.set(0 if end is None else end.timestamp())
        for item, error in loaded.refused:
            get_logger().warning(
                "collateral_refused", file=item, reason=error.reason, message=error.args[0]
            )
        get_logger().info(
            "collateral_loaded",
            files=len(items),
            refused=len(loaded.refused),
            amd_keys=len(loaded.collateral.amd_vceks),
            revocation_lists=len(loaded.collateral.revocation_lists),
            tcb_infos=len(loaded.collateral.tcb_infos),
        )

    def _write_marks(self, marks: Mapping[str, int]) -> None:
        try:
            write_durably(self._marks, json.dumps(dict(marks), sort_keys=True, indent=1).encode())
        except OSError as error:
            raise UnavailableError(
                "collateral.marks.unwritable", f"{self._marks}: {error.strerror}"
            ) from error


def read_items(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory by name; UsageError `collateral.unreadable` or `.count`."""
    try:
        paths = sorted(
            path for path in directory.iterdir() if path.is_file() and path.name[0] != "."
        )
        if len(paths) > FILES_MAX:
            raise UsageError(
                "collateral.count", f"{directory}: {len(paths)} files; allowed: {FILES_MAX}"
            )
        return {path.name: read_bounded(path) for path in paths}
    except OSError as error:
        raise UsageError("collateral.unreadable", f"{directory}: {error.strerror}") from error


def read_marks(path: Path) -> dict[str, int]:
    """Return the marks a broker wrote, none if there is no file.

    VerificationError `collateral.marks.malformed`, UsageError `collateral.unreadable`.
    """
    try:
        encoded = read_bounded(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError("collateral.unreadable", f"{path}: {error.strerror}") from error
    try:
        marks = json.loads(encoded) if len(encoded) <= _MARKS_BYTES_MAX else None
    except (ValueError, RecursionError):
        marks = None
    if not isinstance(marks, dict) or not all(type(each) is int for each in marks.values()):
        raise VerificationError(
            "collateral.marks.malformed",
            f"{path}: not what the broker wrote; without it older collateral can't be told from "
            "newer",
        )
    return marks
