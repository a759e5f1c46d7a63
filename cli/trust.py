"""`sealanectl policy` and `audit`: the verifier's policy and the broker's audit log."""

# ruff: noqa: ARG001 - every command has one signature

import argparse
import asyncio
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import empty_pb2

from sealane.cli.output import Output
from sealane.cli.owners import (
    add_signing_options,
    owners_at,
    owners_of_files,
    show_signers,
    sign_file,
    signatures_of,
)
from sealane.cli.verbs import offline, verb
from sealane.client import Client, connect, translated
from sealane.crypto.anchors import ANCHORS_MAX, RETIRED_MAX, SuccessiveKeys, TrustAnchors
from sealane.crypto.attestation.policy import Policy
from sealane.crypto.audit import GENESIS, ChainReader, Head, verify_log
from sealane.crypto.evidence.kinds import Trusted, verifiers
from sealane.daemon.broker.owners import POLICY_LABEL
from sealane.daemon.broker.policy import cautions, parse_policy, read_document, read_signature
from sealane.errors import UnavailableError, UsageError, VerificationError
from sealane.protocol.v1 import policy_pb2

_CALL_SECONDS: Final = 60.0
_EXPORT_SECONDS: Final = 3600.0


def _policy_check(options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    policy = parse_policy(document, source=str(options.file))
    signature = "not checked"
    if options.owner_key:
        if options.threshold is None and len(options.owner_key) > 1:
            raise UsageError(
                "policy.owners.threshold",
                f"{len(options.owner_key)} keys without --threshold; needed: how many must have "
                "signed",
            )
        owners = owners_of_files(
            options.owner_key, threshold=1 if options.threshold is None else options.threshold
        )
        signatures = signatures_of(options.file)
        owners.verify(POLICY_LABEL, document, signatures, what=str(options.file))
        signature = "valid"
    known = verifiers(Trusted())
    found = cautions(policy, safe_flags={v.evidence_type: v.safe_flags for v in known})
    output.show_one(
        {
            "version": policy.version,
            "sha256": policy.digest.hex(),
            "signature": signature,
            "hardware": len(policy.hardware),
            "reference values": len(policy.references),
            "cautions": len(found) if not output.is_data else found,
        }
    )
    if not output.is_data:
        for line in found:
            print(f"caution: {line}")


def _policy_sign(options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    parse_policy(document, source=str(options.file))
    sign_file(options, output, POLICY_LABEL, document, as_list=options.add)


async def _policy_signers(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Show who of the owners in force has signed a policy."""
    document = read_document(options.file)
    parse_policy(document, source=str(options.file))
    shown = await owners_at(client)
    show_signers(output, [shown.in_force], POLICY_LABEL, document, options.file)


async def _policy_show(client: Client, options: argparse.Namespace, output: Output) -> None:
    in_force = await _in_force(client)
    if output.is_data:
        signed = {"signed_by": [*in_force.signed_by], "owners_version": in_force.owners_version}
        output.show_one({**_brief(in_force), **signed, "document": in_force.document.decode()})
    else:
        print(in_force.document.decode(), end="")


async def _policy_apply(client: Client, options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    parse_policy(document, source=str(options.file))
    with translated():
        applied = await client.policies.ApplyPolicy(
            policy_pb2.ApplyPolicyRequest(
                document=document, signature=read_signature(options.file)
            ),
            timeout=_CALL_SECONDS,
        )
    output.show_one(_brief(applied))


async def _policy_diff(client: Client, options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    after = parse_policy(document, source=str(options.file))
    in_force = await _in_force(client)
    before = parse_policy(in_force.document, source="the policy in force")
    changes = [*_changes(before, after)]
    if output.is_data:
        output.show_one(
            {"version_before": before.version, "version": after.version, "changes": changes}
        )
        return
    output.show([{"change": c["change"], "what": c["what"], "name": c["name"]} for c in changes])
    lines = difflib.unified_diff(
        in_force.document.decode().splitlines(),
        document.decode().splitlines(),
        f"in force, version {before.version}",
        f"{options.file}, version {after.version}",
        lineterm="",
    )
    print("\n".join(lines))


def _changes(before: Policy, after: Policy) -> Iterator[Mapping[str, str]]:
    """Yield the entries that a policy gains, loses and changes."""
    for what, old, new in (
        ("hardware", before.hardware, after.hardware),
        (
            "reference",
            {r.name: r for r in before.references},
            {r.name: r for r in after.references},
        ),
    ):
        for name in sorted({*old, *new}):
            if name not in new:
                yield {"change": "removed", "what": what, "name": name}
            elif name not in old:
                yield {"change": "added", "what": what, "name": name}
            elif old[name] != new[name]:
                yield {"change": "changed", "what": what, "name": name}


async def _in_force(client: Client) -> policy_pb2.PolicyInForce:
    with translated():
        return await client.policies.GetPolicy(empty_pb2.Empty(), timeout=_CALL_SECONDS)


def _brief(policy: policy_pb2.PolicyInForce) -> dict[str, Any]:
    return {"version": policy.version, "sha256": policy.digest.hex()}


def _audit_verify(options: argparse.Namespace, output: Output) -> None:
    """Check a log; VerificationError `audit.…` at the first record that is wrong.

    A truncated log looks like a good log of fewer records. So its last record is compared with
    `--head`, or else with the running broker's, unless `--chain-only` is given. Then only a
    signature shows that the records before the first one were really retired.
    """
    head = options.head
    if head is None and not options.chain_only:
        head = asyncio.run(_head_of_broker(options.socket))
    signer: SuccessiveKeys | None = None
    anchors: Sequence[bytes] = ()
    if options.anchor is not None:
        pem = read_document(options.anchor)
        source = str(options.anchor)
        found = TrustAnchors.parse(pem, source=source, most=RETIRED_MAX + ANCHORS_MAX)
        signer, anchors = found.successive_keys(), found.digests
    try:
        with options.file.open("rb") as file:
            reader = verify_log((line.removesuffix(b"\n") for line in file), signer=signer)
    except OSError as error:
        raise UsageError("config.unreadable", f"{options.file}: {error.strerror}") from error
    if head is not None:
        reader.require(head)
    elif signer is None and reader.beginning != GENESIS:
        raise VerificationError(
            "audit.beginning.missing",
            f"the audit log begins with record {reader.beginning.sequence + 1}: without a head, "
            "only --anchor can show that those before were retired",
        )
    output.show_one(
        {
            "records": reader.head.sequence - reader.beginning.sequence,
            "retired before them": reader.beginning.sequence,
            "head": f"{reader.head.sequence}:{reader.head.digest.hex()}",
            "signed by the broker": "not checked" if signer is None else reader.signed_sequence,
            "last signed by": _last_signer(signer, reader, anchors),
            "head is the expected one": "not checked" if head is None else "yes",
        }
    )


def _last_signer(
    signer: SuccessiveKeys | None, reader: ChainReader, anchors: Sequence[bytes]
) -> str:
    if signer is None:
        return "not checked"
    if not reader.signed_sequence:
        return "nobody"
    later = len(anchors) - 1 - signer.signed_by
    return anchors[signer.signed_by].hex() + (f", before {later} newer" if later else "")


async def _head_of_broker(socket: str) -> Head:
    """Return the last record that the broker at `socket` acknowledged."""
    async with connect(socket) as client:
        with translated():
            parts = client.audit_log.ExportAudit(empty_pb2.Empty(), timeout=_CALL_SECONDS)
            async for part in parts:
                parts.cancel()
                return Head(sequence=part.head_sequence, digest=part.head_digest)
    raise UnavailableError("audit.head.unknown", "the broker did not say where its log ends")


async def _audit_export(client: Client, options: argparse.Namespace, output: Output) -> None:
    """Copy the log to a new file, check its chain, and print its head."""
    try:
        file = options.file.open("xb")
    except OSError as error:
        raise UsageError("config.unreadable", f"{options.file}: {error.strerror}") from error
    head = Head(sequence=0, digest=bytes(32))
    with file, translated():
        async for part in client.audit_log.ExportAudit(empty_pb2.Empty(), timeout=_EXPORT_SECONDS):
            file.write(part.lines)
            head = Head(sequence=part.head_sequence, digest=part.head_digest)
    with options.file.open("rb") as written:
        reader = verify_log((line.removesuffix(b"\n") for line in written), signer=None)
    reader.require(head)
    output.show_one(
        {
            "records": head.sequence - reader.beginning.sequence,
            "retired before them": reader.beginning.sequence,
            "head": f"{head.sequence}:{head.digest.hex()}",
        }
    )


def _head(text: str) -> Head:
    sequence, _, digest = text.partition(":")
    try:
        head = Head(sequence=int(sequence), digest=bytes.fromhex(digest))
    except ValueError:
        head = None
    if head is None or len(head.digest) != 32:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: NUMBER:SHA-256, as `audit export` prints it"
        )
    return head


def add_policy_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `policy`."""
    made = offline(
        verbs,
        "check",
        _policy_check,
        "check a policy and list what is risky in it",
        file="policy to check",
    )
    made.add_argument(
        "--owner-key",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="check FILE.sig with this key; once for each owner",
    )
    made.add_argument(
        "--threshold",
        type=int,
        metavar="N",
        help="how many of these owners must have signed; for several needed",
    )
    made = offline(
        verbs,
        "sign",
        _policy_sign,
        "sign a policy as an owner; writes FILE.sig",
        file="policy to sign",
    )
    add_signing_options(made)
    made.add_argument(
        "--add",
        action="store_true",
        help="keep the signature in FILE.sig, which is another owner's",
    )
    made = verb(verbs, "signers", _policy_signers, "show which owners have signed a policy")
    made.add_argument(
        "file", type=Path, metavar="FILE", help="policy, with its signatures in FILE.sig"
    )
    verb(verbs, "show", _policy_show, "print the policy in force")
    for name, run, text in (
        ("apply", _policy_apply, "put a newer policy into force; every node attests again"),
        ("diff", _policy_diff, "compare a policy with the one in force"),
    ):
        made = verb(verbs, name, run, text)
        made.add_argument(
            "file", type=Path, metavar="FILE", help="policy, with its signatures in FILE.sig"
        )


def add_audit_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `audit`."""
    made = offline(
        verbs,
        "verify",
        _audit_verify,
        "check every record of a log",
        file="log, as export writes it",
    )
    made.add_argument(
        "--anchor", type=Path, metavar="FILE", help="broker's trust anchor: check signatures, too"
    )
    made.add_argument(
        "--head",
        type=_head,
        metavar="NUMBER:SHA-256",
        help="last record the log must have (default: ask the running broker)",
    )
    made.add_argument(
        "--chain-only", action="store_true", help="don't check which record is the last"
    )
    verb(
        verbs, "export", _audit_export, "copy the log to a new file and print its head"
    ).add_argument("file", type=Path, metavar="FILE", help="file to create")
