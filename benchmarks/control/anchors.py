"""Rate of each kind of anchor, and the cost of each TPM operation.

The broker is a separate process, called over mutual TLS; its SQLite database is in the temporary
directory. "volumes at once" flushes 32 volumes concurrently: the operation ends when all of them
are anchored, in one or two calls.

The TPM is swtpm unless SEALANE_TCTI names another one. On a real TPM, three owner NV indices are
defined and then removed. swtpm answers from memory and saves its state to a file, so its figures
measure our code and the disk; a chip takes 5 to 100 ms for each of these commands.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from benchmarks.control.broker_anchor import OpenDevice, open_device
from benchmarks.control.result import Result
from rich import box
from rich.table import Table

from sealane.crypto.attestation.runtime_data import RuntimeData
from sealane.crypto.evidence.tpm2 import Tpm2Verifier
from sealane.crypto.kem import seal, unseal
from sealane.daemon.device.anchors.anchor import CATALOGUE, Anchor, Anchored, Change
from sealane.daemon.device.anchors.device_anchors import DeviceAnchors
from sealane.daemon.device.anchors.file_anchor import FileAnchor
from sealane.daemon.device.anchors.tpm_anchor import TpmAnchor
from sealane.daemon.device.anchors.tpm_counter import TpmCounter
from sealane.daemon.node.evidence.tpm2 import Tpm2Driver
from sealane.daemon.node.tpm import Tpm
from sealane.daemon.runtime.files import write_durably

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from software_tpm import software_tpm
from vendors.authority import NOW

_DEVICE: Final = UUID(int=1)
_ANCHOR_INDEX: Final = 0x0180_5EA8
_COUNTER_INDEX: Final = 0x0180_5EA9
_OTHER_INDEX: Final = 0x0180_5EAA
_AT_ONCE: Final = 32
_BLOB_BYTES: Final = 96

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def run(arguments: argparse.Namespace) -> Result:
    """Measure every operation, round by round."""
    samples = []
    with (
        tempfile.TemporaryDirectory() as directory,
        _connected(Path(directory)) as tpm,
        asyncio.Runner() as runner,
        contextlib.ExitStack() as stack,
    ):
        # One event loop for everything: a channel is bound to the loop that created it.
        run = runner.run
        broker = open_device(volumes=_AT_ONCE)
        device = run(broker.__aenter__())
        stack.callback(lambda: run(broker.__aexit__(None, None, None)))
        cells = _cells(tpm, Path(directory), device, run)
        for operation in cells.values():
            operation()
        for number in range(arguments.rounds):
            for name, operation in cells.items():
                taken = _measure(operation, seconds=arguments.seconds)
                samples.append(
                    {
                        "operation": name,
                        "round": number,
                        "per_second": len(taken) / sum(taken),
                        "p50_ms": taken[len(taken) // 2] * 1e3,
                        "p99_ms": taken[len(taken) * 99 // 100] * 1e3,
                    }
                )
        for index in (_ANCHOR_INDEX, _COUNTER_INDEX, _OTHER_INDEX):
            tpm.call(lambda e, i=index: e.nv_undefine_space(e.tr_from_tpmpublic(i)))
    table = Table(box=box.SIMPLE, title="Anchors and TPM, medians over rounds")
    for heading in ("operation", "operations/s", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for name in cells:
        mine = [sample for sample in samples if sample["operation"] == name]
        per_second, p50, p99 = (
            statistics.median(sample[key] for sample in mine)
            for key in ("per_second", "p50_ms", "p99_ms")
        )
        table.add_row(name, f"{per_second:,.0f}", f"{p50:.2f}", f"{p99:.2f}")
    return Result(table, samples)


@contextlib.contextmanager
def _connected(directory: Path) -> Iterator[Tpm]:
    tcti = os.environ.get("SEALANE_TCTI")
    with contextlib.ExitStack() as stack:
        if tcti is None:
            tcti = stack.enter_context(software_tpm(directory / "tpm")).tcti
        tpm = Tpm(tcti)
        stack.callback(tpm.close)
        yield tpm


def _cells(
    tpm: Tpm, directory: Path, device: OpenDevice, run: Run
) -> dict[str, Callable[[], object]]:
    anchors = directory / "anchors"
    anchors.mkdir()
    counter = TpmCounter(tpm, index=_COUNTER_INDEX)
    tpm2 = TpmAnchor.initialise(tpm, anchors / "tpm2", device_id=_DEVICE, index=_ANCHOR_INDEX)
    file = FileAnchor.initialise(anchors / "file", device_id=_DEVICE)

    anchored: dict[str, Anchor] = {"file": file, "tpm2": tpm2, "broker": device.anchor}

    other: dict[str, Any] = {"device_id": UUID(int=2), "index": _OTHER_INDEX}
    TpmAnchor.initialise(tpm, anchors / "other", **other).release()

    def reopen() -> None:
        TpmAnchor.open(tpm, anchors / "other", **other).release()

    return {
        "a durable file": lambda: write_durably(anchors / "plain", bytes(200)),
        **{
            f"anchor {kind}: advance": partial(_advance, anchor, CATALOGUE, run)
            for kind, anchor in anchored.items()
        },
        **{
            f"anchor {kind}: {_AT_ONCE} volumes at once": _flushes(anchor, device.names, run)
            for kind, anchor in anchored.items()
        },
        "anchor tpm2: open": reopen,
        "counter tpm2: increment": counter.increment,
        **_evidence(tpm),
    }


def _evidence(tpm: Tpm) -> dict[str, Callable[[], object]]:
    driver, verifier = Tpm2Driver(tpm, pcrs=range(8)), Tpm2Verifier()
    key = asyncio.run(driver.create_kem_key())
    introduction = asyncio.run(driver.introduction())
    data = RuntimeData(
        nonce=bytes(32),
        audience="a",
        node="n",
        role="gateway",
        incarnation=bytes(16),
        tls_public_key=b"tls",
        kem_public_key=key.public_key,
        verifier_key_sha256=bytes(32),
        evidence_type=driver.evidence_type,
        kem_algorithm=key.algorithm,
    )
    introduced = verifier.introduce(introduction, now=NOW)
    sealed = seal(bytes(32), algorithm=key.algorithm, public_key=key.public_key, info=b"")

    def collect() -> bytes:
        return asyncio.run(driver.collect(data, activation=introduced.activation))

    return {
        "evidence tpm2: activate, quote, certify": collect,
        "secret: open with the TPM's KEM key": lambda: unseal(sealed, key=key, info=b""),
    }


def _advance(anchor: Anchor, name: str, run: Run) -> None:
    found = anchor.records.get(name)
    number = 0 if found is None else found.number
    record = Anchored(number=number + 1, blob=bytes(_BLOB_BYTES))
    run(anchor.advance([Change(name=name, expected=number, record=record)]))


def _flushes(anchor: Anchor, names: Sequence[str], run: Run) -> Callable[[], None]:
    """Return a function that advances the anchor of every record concurrently."""
    anchors: list[DeviceAnchors] = []
    numbers = itertools.count(1)

    async def flush() -> None:
        if not anchors:
            anchors.append(DeviceAnchors(anchor))
        number = next(numbers)
        await asyncio.gather(
            *(anchors[0].advance(name, number, bytes(_BLOB_BYTES)) for name in names)
        )

    return lambda: run(flush())


def _measure(operation: Callable[[], object], *, seconds: float) -> list[float]:
    taken = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        operation()
        taken.append(time.perf_counter() - start)
    return sorted(taken)
