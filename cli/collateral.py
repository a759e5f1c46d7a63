"""`sealanectl collateral list`: check a directory as a new broker would; needs no broker."""

import argparse
import datetime as dt
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sealane.cli.output import Output
from sealane.crypto.evidence.chain import common_name
from sealane.crypto.evidence.collateral import Collateral, SignedDocument, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.snp import parse_vcek
from sealane.daemon.broker.collateral import read_items
from sealane.daemon.runtime.clock import utc_now
from sealane.errors import VerificationError


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `collateral`."""
    listing = verbs.add_parser("list", help="check a directory as a broker would, and show it")
    listing.add_argument(
        "directory", type=Path, metavar="DIRECTORY", help="as broker.collateral_dir"
    )
    listing.add_argument(
        "--at",
        type=_time,
        metavar="TIME",
        help="check as of this time, such as 2026-11-21T12:00:00Z (default: now)",
    )
    listing.set_defaults(run=collateral_list, is_offline=True)


def collateral_list(options: argparse.Namespace, output: Output) -> None:
    """Print valid and refused items; VerificationError `collateral.refused` if any is refused."""
    items = read_items(options.directory)
    loaded = load_collateral(
        items, roots=vendor_roots(), high_water={}, now=options.at or utc_now()
    )
    rows = [*_rows(loaded.collateral)]
    rows += [
        {"what": "refused", "of": item, "version": error.reason, "until": "", "why": error.args[0]}
        for item, error in loaded.refused
    ]
    output.show(rows)
    if loaded.refused:
        raise VerificationError(
            "collateral.refused", f"{len(loaded.refused)} refusals among {len(items)} files"
        )


def _rows(known: Collateral) -> Iterator[Mapping[str, Any]]:
    for each in known.amd_signers:
        yield _row("signer", common_name(each.subject), "", each.not_valid_after_utc)
    for each in known.amd_vceks.values():
        product, chip_id, tcb = parse_vcek(each)
        numbers = ", ".join(f"{name} {number}" for name, number in tcb.items())
        of = f"{product} {chip_id.hex()}"
        yield _row("VCEK", of, numbers, each.not_valid_after_utc)
    for listed in known.revocation_lists.values():
        updated = f"of {listed.last_update_utc:%Y-%m-%d}"
        yield _row("revocation list", common_name(listed.issuer), updated, listed.next_update_utc)
    documents: list[SignedDocument] = [*known.tcb_infos.values()]
    if known.qe_identity is not None:
        documents.append(known.qe_identity)
    for document in documents:
        version = f"evaluation {document.tcb_evaluation_data_number}"
        yield _row("document", document.name, version, document.next_update)


def _row(what: str, of: str, version: str, until: dt.datetime | None) -> Mapping[str, Any]:
    return {"what": what, "of": of, "version": version, "until": until, "why": ""}


def _time(text: str) -> dt.datetime:
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 2026-11-21T12:00:00Z") from error
    if time.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; allowed: {text}Z")
    return time
