"""Verifications per second by type of evidence, on one and on two threads.

The verifier service uses threads the same way. The evidence comes from synthetic vendors
(tests/vendors), with the key types and lengths of the real formats. AMD's RSA keys are the
exception: they are half as long, which saves some 30 µs per signature.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.control.result import Result
from rich import box
from rich.table import Table

from sealane.crypto.evidence import nvidia, snp, tdx
from sealane.crypto.evidence.claims import Binding
from sealane.crypto.evidence.collateral import Collateral, VendorRoots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.software import SoftwareKey, SoftwareVerifier
from sealane.crypto.evidence.tpm2 import Tpm2Verifier
from sealane.crypto.evidence.verifier import NOT_INTRODUCED

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from vendors.amd import amd
from vendors.authority import NOW
from vendors.intel import intel
from vendors.nvidia import nvidia as made_up_nvidia
from vendors.tpm import Manufacturer, SyntheticTpm

THREADS: Final = (1, 2)
_BINDING: Final = Binding(
    runtime_data=b"runtime data", nonce=bytes(32), tls_public_key=b"tls", kem_public_key=b"kem"
)


def cells() -> dict[str, Callable[[], object]]:
    """Return a verification of each evidence type, by name."""
    genoa, vendor, gpu = amd("Genoa"), intel(), made_up_nvidia()
    roots = VendorRoots(
        amd={"Genoa": genoa.ark.certificate},
        intel=vendor.root.certificate,
        nvidia=gpu.root.certificate,
    )
    known: Collateral = load_collateral(
        {"bundle": vendor.collateral()}, roots=roots, high_water={}, now=NOW
    ).collateral
    common = {"binding": _BINDING, "collateral": known, "now": NOW}
    report = genoa.report(report_data=_BINDING.report_data)
    table = genoa.table()
    quote = vendor.quote(report_data=_BINDING.report_data)
    measured = nvidia.encode_evidence(gpu.report(nonce=_BINDING.device_nonce), gpu.chain())
    signed = SoftwareKey.create().evidence(_BINDING)
    software = SoftwareVerifier()
    return {
        "snp": lambda: snp.verify(report, endorsements=table, **common),
        "tdx": lambda: tdx.verify(quote, **common),
        "nvidia": lambda: nvidia.verify(measured, **common),
        "tpm2": _tpm2(),
        "software": lambda: software.verify(
            signed,
            binding=_BINDING,
            introduced=NOT_INTRODUCED,
            endorsements=b"",
            now=NOW,
        ),
    }


def _tpm2() -> Callable[[], object]:
    """Return a verification of a certified TPM's introduction and of its evidence."""
    tpm, maker = SyntheticTpm(), Manufacturer(NOW)
    verifier = Tpm2Verifier([maker.root])
    introduction = tpm.introduction(maker.certify(tpm.ek.public_key())).encode()
    binding = dataclasses.replace(_BINDING, kem_public_key=tpm.kem_point)
    introduced = verifier.introduce(introduction, now=NOW)
    evidence = tpm.evidence(binding, tpm.activate(introduced.activation)).encode()

    def both() -> object:
        verifier.introduce(introduction, now=NOW)
        return verifier.verify(
            evidence, binding=binding, introduced=introduced, endorsements=b"", now=NOW
        )

    return both


def measure(
    verify: Callable[[], object], *, threads: int, seconds: float
) -> list[tuple[float, float]]:
    """Verify on `threads` threads for `seconds`; return wall and processor seconds of each call."""

    def work() -> list[tuple[float, float]]:
        taken = []
        end = time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            busy = time.thread_time()
            verify()
            taken.append((time.perf_counter() - start, time.thread_time() - busy))
        return taken

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work) for _ in range(threads)]
        return [each for future in futures for each in future.result()]


def run(arguments: argparse.Namespace) -> Result:
    """Measure every evidence type with each number of threads, round by round."""
    samples = []
    every = cells()
    for verify in every.values():
        verify()
    for round_number in range(arguments.rounds):
        for evidence_type, verify in every.items():
            for threads in THREADS:
                both = measure(verify, threads=threads, seconds=arguments.seconds)
                taken = sorted(each for each, _ in both)
                samples.append(
                    {
                        "evidence_type": evidence_type,
                        "threads": threads,
                        "round": round_number,
                        "per_second": len(taken) / arguments.seconds,
                        "p50_us": taken[len(taken) // 2] * 1e6,
                        "p99_us": taken[len(taken) * 99 // 100] * 1e6,
                        "cpu_us": statistics.median(busy for _, busy in both) * 1e6,
                    }
                )
    table = Table(box=box.SIMPLE, title="Verification of evidence, medians over rounds")
    for heading in ("evidence", "threads", "verifications/s", "p50 µs", "p99 µs", "CPU µs"):
        table.add_column(heading, justify="left" if heading == "evidence" else "right")
    for evidence_type in every:
        for threads in THREADS:
            row = [
                statistics.median(
                    sample[name]
                    for sample in samples
                    if (sample["evidence_type"], sample["threads"]) == (evidence_type, threads)
                )
                for name in ("per_second", "p50_us", "p99_us", "cpu_us")
            ]
            table.add_row(evidence_type, str(threads), *(f"{value:,.0f}" for value in row))
    return Result(table, samples)
