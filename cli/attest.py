"""`sealanectl attest`: evidence in files, its claims, and its appraisal under a policy."""

import argparse
import asyncio
import datetime as dt
import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sealane.cli.output import Output
from sealane.cli.result import show_identities, show_token, token_in
from sealane.cli.verbs import offline
from sealane.client import connect
from sealane.crypto.attestation.appraisal import Appraisal, appraise
from sealane.crypto.attestation.ar4si import tier_of
from sealane.crypto.attestation.verifier import found_verifiers
from sealane.crypto.evidence.claims import Binding, Claims
from sealane.crypto.evidence.cmw import (
    COLLATERAL,
    EVIDENCE_BYTES_MAX,
    PRIMARY,
    Item,
    decode_collection,
)
from sealane.crypto.evidence.collateral import Collateral, vendor_roots
from sealane.crypto.evidence.collateral_loader import load_collateral
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.crypto.evidence.verifier import NOT_INTRODUCED, EvidenceVerifier
from sealane.daemon.broker.policy import (
    parse_policy,
    read_document,
)
from sealane.daemon.runtime.clock import utc_now
from sealane.daemon.runtime.third_party_evidence import installed_verifier
from sealane.errors import UsageError, VerificationError

_EXPORT_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatedBinding(Binding):
    """A binding known only by its hash, for evidence from elsewhere."""

    stated: bytes

    @property
    def report_data(self) -> bytes:
        return self.stated

    @property
    def qualifying_data(self) -> bytes:
        return self.stated

    @property
    def device_nonce(self) -> bytes:
        return self.stated


def _attest_show(options: argparse.Namespace, output: Output) -> None:
    if str(options.file) == "self":
        asyncio.run(_show_self(options, output))
        return
    content = _read_evidence(options.file)
    token = token_in(content)
    if token is not None:
        show_token(token, utc_now(), output)
        return
    items = decode_collection(content)
    output.show(
        [
            {
                "item": label,
                "media type": item.media_type,
                "bytes": len(item.value),
                "sha256": hashlib.sha256(item.value).hexdigest(),
            }
            for label, item in items.items()
        ]
    )


async def _show_self(options: argparse.Namespace, output: Output) -> None:
    async with connect(options.socket) as client:
        show_identities((await client.node()).identities, utc_now(), output)


def _attest_verify(options: argparse.Namespace, output: Output) -> None:
    """Verify evidence and print its claims; with a policy, also every rule and the verdict."""
    now = options.now or utc_now()
    known = verifiers(Trusted(collateral=lambda: collateral_of(options.collateral, now)))
    policy = None
    if options.policy is not None:
        policy = parse_policy(read_document(options.policy), source=str(options.policy))
        known += found_verifiers(policy, known, installed_verifier)
    claims = dict(_verified(options, known, now))
    appraisal = None
    if policy is not None:
        appraisal = appraise(
            claims,
            policy=policy,
            node=options.node,
            role=options.role,
            safe_flags={v.evidence_type: v.safe_flags for v in known},
        )
    if output.is_data:
        output.show_one(_as_json(claims, appraisal))
    else:
        for label, item in claims.items():
            output.show([{"item": label, "claim": k, "value": v} for k, v in _claim_rows(item)])
            print()
        if appraisal is not None:
            _print_appraisal(appraisal, output)
    if appraisal is not None:
        appraisal.require()


def _verified(
    options: argparse.Namespace, known: list[EvidenceVerifier], now: dt.datetime
) -> Iterator[tuple[str, Claims]]:
    raw = _read_evidence(options.file)
    by_type = {v.evidence_type: v for v in known}
    if options.type is None:
        items = decode_collection(raw)
    elif options.type in by_type:
        items = {PRIMARY: Item(by_type[options.type].media_type, raw)}
    else:
        raise UsageError(
            "attestation.type.unknown",
            f"type {options.type!r}; allowed: {', '.join(sorted(by_type))}",
        )
    endorsements = read_document(options.endorsements) if options.endorsements else b""
    if COLLATERAL in items:
        endorsements = items[COLLATERAL].value
    by_media_type = {v.media_type: v for v in known}
    for label, item in items.items():
        if label == COLLATERAL:
            continue
        verifier = by_media_type.get(item.media_type)
        if verifier is None:
            raise VerificationError(
                "attestation.evidence.type",
                f"item {label}: media type {item.media_type!r}; allowed: "
                f"{', '.join(sorted(by_media_type))}",
            )
        yield (
            label,
            verifier.verify(
                item.value,
                binding=_binding(options),
                introduced=NOT_INTRODUCED,
                endorsements=endorsements,
                now=now,
            ),
        )


def _binding(options: argparse.Namespace) -> Binding:
    unknown = {"nonce": b"", "tls_public_key": b"", "kem_public_key": b""}
    if options.report_data is not None:
        return _StatedBinding(runtime_data=b"", stated=options.report_data, **unknown)
    return Binding(runtime_data=read_document(options.runtime_data), **unknown)


def collateral_of(directory: Path | None, now: dt.datetime) -> Collateral:
    """Return a directory's collateral; report refused files on standard error."""
    if directory is None:
        return Collateral()
    items = {path.name: read_document(path) for path in sorted(directory.iterdir())}
    loaded = load_collateral(items, roots=vendor_roots(), high_water={}, now=now)
    for name, error in loaded.refused:
        print(f"sealanectl: {name} is ignored: {error}", file=sys.stderr)
    return loaded.collateral


def _claim_rows(claims: Claims) -> Iterator[tuple[str, object]]:
    yield "evidence type", claims.evidence_type
    yield "hardware id", claims.hardware_id
    yield "product", claims.product
    for name, number in sorted(claims.properties.items()):
        yield f"property {name}", number
    for name, component in sorted(claims.tcb.items()):
        yield f"TCB {name}", component
    if claims.tcb_status:
        yield "TCB status", claims.tcb_status
    if claims.advisories:
        yield "advisories", [*claims.advisories]
    for name, flag in sorted(claims.flags.items()):
        yield f"flag {name}", str(flag).lower()
    for name, digest in sorted(claims.measurements.items()):
        yield f"measurement {name}", digest.hex()
    if claims.certified_keys:
        yield "certified keys", sorted(claims.certified_keys)
    yield "valid until", claims.valid_until


def _print_appraisal(appraisal: Appraisal, output: Output) -> None:
    output.show(
        [
            {
                "item": f.item,
                "rule": f.rule,
                "holds": "yes" if f.holds else "NO",
                "found": f.found,
                "wanted": f.wanted,
            }
            for f in appraisal.findings
        ]
    )
    print()
    output.show(
        [
            {"item": label, "trustworthiness": claim, "value": value, "tier": tier_of(value).label}
            for label, item in appraisal.items.items()
            for claim, value in item.vector.items()
        ]
    )
    print()
    decided = appraisal.decided
    output.show_one(
        {
            "verdict": "accepted" if appraisal.is_accepted else "refused",
            "status": appraisal.status.label,
            "decided by": f"{decided.item}: {decided.rule}",
            "reason": "" if decided.holds else decided.reason,
            "policy": appraisal.policy.policy_id,
        }
    )


def _as_json(claims: Mapping[str, Claims], appraisal: Appraisal | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "claims": {label: dict(_claim_rows(item)) for label, item in claims.items()}
    }
    if appraisal is not None:
        decided = appraisal.decided
        result |= {
            "rules": [
                {
                    "item": f.item,
                    "rule": f.rule,
                    "holds": f.holds,
                    "reason": f.reason,
                    "found": f.found,
                    "wanted": f.wanted,
                }
                for f in appraisal.findings
            ],
            "trustworthiness": {
                label: {"status": item.status.label, "vector": dict(item.vector)}
                for label, item in appraisal.items.items()
            },
            "verdict": "accepted" if appraisal.is_accepted else "refused",
            "status": appraisal.status.label,
            "decided_by": f"{decided.item}: {decided.rule}",
            "reason": "" if decided.holds else decided.reason,
            "policy": appraisal.policy.policy_id,
        }
    return result


def _read_evidence(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(EVIDENCE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError("config.unreadable", f"{path}: {error.strerror}") from error


def _time(text: str) -> dt.datetime:
    try:
        time = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 2026-11-21T12:00:00Z") from error
    return time.replace(tzinfo=dt.UTC) if time.tzinfo is None else time


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: hexadecimal digits") from error


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `attest` that are about evidence."""
    offline(
        verbs,
        "show",
        _attest_show,
        "show the identities of the daemon's roles (self), an attestation result, or the items of "
        "an evidence collection",
        file="the running daemon, or a file with a result or evidence",
        metavar="self|FILE",
    )
    made = offline(
        verbs,
        "verify",
        _attest_verify,
        "verify evidence and apply a policy to it",
        file="evidence: a collection, or with --type a single item",
    )
    made.add_argument("--type", help="the file is a single item of this type, not a collection")
    bound = made.add_mutually_exclusive_group(required=True)
    bound.add_argument("--runtime-data", type=Path, metavar="FILE", help="data it commits to")
    bound.add_argument(
        "--report-data", type=_digest, metavar="HEX", help="hash of the data it commits to"
    )
    made.add_argument(
        "--endorsements", type=Path, metavar="FILE", help="endorsements sent with the evidence"
    )
    made.add_argument(
        "--collateral", type=Path, metavar="DIRECTORY", help="as broker.collateral_dir"
    )
    made.add_argument("--policy", type=Path, metavar="FILE", help="policy to apply")
    made.add_argument("--node", default="", help="node name to apply the policy for")
    made.add_argument("--role", default="", help="role to apply the policy for")
    made.add_argument("--now", type=_time, metavar="TIME", help="ISO 8601, UTC; default: now")
