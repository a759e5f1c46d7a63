"""The collateral in force: files in an operator's directory, and high-water marks."""

import asyncio
import datetime as dt
from pathlib import Path
from typing import Final

from sealane.crypto.evidence.collateral import Collateral, VendorRoots, vendor_roots
from sealane.crypto.evidence.collateral_loader import Loaded, load_collateral
from sealane.daemon.broker.records import CollateralRecord
from sealane.daemon.broker.registry import Registry
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.files import read_bounded
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import UsageError

# One certificate for each of ten thousand machines, and other files.
FILES_MAX: Final = 16384
_MARKS: Final = "marks"


class CollateralKeeper:
    """Loads a directory; verifiers use `current` until the next load.

    The high-water marks are in the registry, so brokers that share it share them, and the registry
    detects its own rollback.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        registry: Registry,
        metrics: Metrics,
        roots: VendorRoots | None = None,
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._metrics = metrics
        self._roots = roots or vendor_roots()
        self._current = Collateral(roots=self._roots)

    def current(self) -> Collateral:
        """Return the result of the last load; from any thread."""
        return self._current

    async def load(self, *, now: dt.datetime | None = None) -> None:
        """Read the directory again and use the items valid at `now` (default: the current time).

        Items that are refused are logged and left out. UsageError `collateral.unreadable` or
        `collateral.count` for the directory, or an error of the registry: then nothing changes.
        """
        if self._directory is None:
            return
        items = await asyncio.to_thread(read_items, self._directory)
        loaded = await self._registry.settle(lambda: self._take(items, now or utc_now()))
        self._current = loaded.collateral
        end = loaded.collateral.next_update
        self._metrics.broker.collateral_refusals.set(len(loaded.refused))
        self._metrics.broker.collateral_next_update.set(0 if end is None else end.timestamp())
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

    async def _take(self, items: dict[str, bytes], now: dt.datetime) -> Loaded | None:
        """Check `items` against the marks and raise these; None if another broker just did."""
        stored = await self._registry.collateral.get(_MARKS)
        before = {} if stored is None else stored.record.marks
        loaded = await asyncio.to_thread(
            lambda: load_collateral(items, roots=self._roots, high_water=before, now=now)
        )
        if loaded.high_water == before:
            return loaded
        revision = await self._registry.commit(
            [self._registry.collateral.unchanged(_MARKS, stored)],
            self._registry.collateral.sealed(
                _MARKS, CollateralRecord(marks=dict(loaded.high_water))
            ),
        )
        return None if revision is None else loaded


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
