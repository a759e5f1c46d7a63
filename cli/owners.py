"""`sealanectl owners`: who signs the verifier's policy, and how many of them must."""

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import empty_pb2

from sealane.cli.output import Output
from sealane.cli.verbs import confirm, destructive, offline, verb
from sealane.client import Client, translated
from sealane.crypto.private_keys import parse_private_key
from sealane.daemon.broker.owners import (
    OWNER_KEYS,
    OWNERS_LABEL,
    SIGNATURE_SUFFIX,
    Owner,
    OwnerPrivateKey,
    Owners,
    Signature,
    is_list,
    is_signature,
    owner_name,
    owners_document,
    parse_owner_key,
    parse_owners,
    parse_signatures,
    sign_document,
    with_signature,
)
from sealane.daemon.broker.policy import read_document, read_signature
from sealane.daemon.runtime.directories import replace_file
from sealane.daemon.runtime.files import read_secret, write_new
from sealane.errors import UsageError
from sealane.protocol.v1 import policy_pb2

_CALL_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOwners:
    """The owners that a broker says are in force, and its configuration's; None: none."""

    in_force: Owners | None
    configured: Owners | None
    configured_digest: bytes
    is_configured: bool


def owners_of_files(paths: Sequence[Path], *, threshold: int, version: int = 0) -> Owners:
    """Return the owners whose public keys are in these files; UsageError `policy.owner…`."""
    owners = [
        Owner(name=owner_name(path), key=parse_owner_key(read_document(path), source=str(path)))
        for path in paths
    ]
    return Owners.of(owners, threshold=threshold, version=version, source="--key")


def signatures_of(path: Path) -> Sequence[Signature]:
    """Return the signatures in the file beside a document; errors of `parse_signatures`."""
    return parse_signatures(read_signature(path), source=f"{path}{SIGNATURE_SUFFIX}")


def add_signing_options(made: argparse.ArgumentParser) -> None:
    """Add the options that `sign_file` needs."""
    made.add_argument("--key", type=Path, required=True, metavar="FILE", help="the owner's key")


def sign_file(
    options: argparse.Namespace, output: Output, label: str, document: bytes, *, as_list: bool
) -> None:
    """Sign a document with the key of `options`, and show how many signatures its file has now.

    A list of signatures stays one. A single signature is replaced unless `as_list`.
    """
    key = _owner_private_key(options.key)
    path = options.file.with_name(options.file.name + SIGNATURE_SUFFIX)
    before = read_signature(options.file)
    if as_list or is_list(before):
        content = with_signature(before, label, document, key, source=str(path))
    else:
        content = sign_document(label, document, key)
    replace_file(path, content)
    output.show_one(
        {
            "signature": str(path),
            "sha256": hashlib.sha256(document).hexdigest(),
            "signatures": len(parse_signatures(content, source=str(path))),
        }
    )
    is_unknown = bool(before) and not is_list(before)
    if is_unknown and not is_signature(before, label, document, key) and not output.is_data:
        print(
            "the file had another owner's signature, or one of an earlier text: "
            + ("kept, it counts only for this text" if as_list else "replaced; --add keeps it")
        )


def show_signers(
    output: Output, needed: Sequence[Owners | None], label: str, document: bytes, path: Path
) -> None:
    """Show which owners have signed a document, and how many are missing of each threshold."""
    signatures = signatures_of(path)
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    for owners in needed:
        if owners is None:
            said.append("no policy needs a signature at this broker")
            continue
        found = owners.signers(label, document, signatures)
        missing = max(owners.threshold - len(found), 0)
        rows += [
            {
                "owners": owners.version,
                "name": owner.name,
                "key_id": key_id,
                "signed": "yes" if key_id in found else "no",
                "missing": missing,
            }
            for key_id, owner in sorted(owners.by_id.items())
        ]
        said.append(
            f"owners {owners.version}: {len(found)} have signed; needed: {owners.threshold} of "
            f"{len(owners.by_id)}, missing: {missing}"
        )
    output.show(rows)
    if not output.is_data:
        print("\n".join(said))


async def owners_at(client: Client) -> ShownOwners:
    """Return the owners that the broker says are in force, and those of its configuration."""
    with translated():
        return _shown(
            await client.policies.GetPolicyOwners(empty_pb2.Empty(), timeout=_CALL_SECONDS)
        )


def _shown(answer: policy_pb2.PolicyOwners) -> ShownOwners:
    return ShownOwners(
        in_force=_parsed(answer.document),
        configured=_parsed(answer.configured_document),
        configured_digest=answer.configured_digest,
        is_configured=answer.is_configured,
    )


def _parsed(document: bytes) -> Owners | None:
    return parse_owners(document, source="the broker's answer") if document else None


def _owner_private_key(path: Path) -> OwnerPrivateKey:
    pem = read_secret(str(path), key="--key")
    key = parse_private_key(pem)
    if not isinstance(key, Ed25519PrivateKey | ec.EllipticCurvePrivateKey):
        raise UsageError(
            "policy.owner_key.malformed",
            f"--key {path}: not an owner's key; allowed: {OWNER_KEYS}, PKCS #8 PEM without a "
            "password",
        )
    return key


def _owners_make(options: argparse.Namespace, output: Output) -> None:
    owners = owners_of_files(options.key, threshold=options.threshold, version=options.version)
    document = owners_document(owners)
    parse_owners(document, source=str(options.file))
    write_new(options.file, document, mode=0o644)
    _show(output, owners)


def _owners_sign(options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    owners = parse_owners(document, source=str(options.file))
    if not output.is_data:
        # What is signed is shown first: names in a document are only what its author wrote.
        _show(output, owners)
    sign_file(options, output, OWNERS_LABEL, document, as_list=True)


async def _owners_signers(client: Client, options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    after = parse_owners(document, source=str(options.file))
    shown = await owners_at(client)
    show_signers(output, [shown.in_force, after], OWNERS_LABEL, document, options.file)
    if not output.is_data and shown.in_force and after.version != shown.in_force.version + 1:
        print(
            f"owners {after.version} can't be applied: the next version is "
            f"{shown.in_force.version + 1}"
        )


async def _owners_show(client: Client, options: argparse.Namespace, output: Output) -> None:
    shown = await owners_at(client)
    if options.document is not None and shown.in_force is not None:
        write_new(options.document, owners_document(shown.in_force), mode=0o644)
    _show(output, shown.in_force)
    if not output.is_data:
        print(_judged(shown))


def _judged(shown: ShownOwners) -> str:
    if shown.in_force is None:
        return "no policy needs a signature at this broker"
    needed = f"{shown.in_force.threshold} of {len(shown.in_force.by_id)} must sign"
    if shown.is_configured:
        return needed
    return (
        f"{needed}; the broker's configuration names other owners, so it can't be restarted like "
        "this"
    )


async def _owners_apply(client: Client, options: argparse.Namespace, output: Output) -> None:
    document = read_document(options.file)
    parse_owners(document, source=str(options.file))
    with translated():
        applied = await client.policies.ReplacePolicyOwners(
            policy_pb2.ReplacePolicyOwnersRequest(
                document=document, signatures=read_signature(options.file)
            ),
            timeout=_CALL_SECONDS,
        )
    _show(output, _shown(applied).in_force)


async def _owners_reset(client: Client, options: argparse.Namespace, output: Output) -> None:
    shown = await owners_at(client)
    if shown.configured is not None:
        names = ", ".join(
            f"{owner.name} ({key_id[:16]})" for key_id, owner in shown.configured.by_id.items()
        )
        confirm(
            options,
            f"The policy will belong to {names}, as this broker's configuration says, without "
            "the present owners' signatures; brokers whose configuration names others end.",
        )
    with translated():
        applied = await client.policies.ResetPolicyOwners(
            policy_pb2.ResetPolicyOwnersRequest(configured_digest=shown.configured_digest),
            timeout=_CALL_SECONDS,
        )
    _show(output, _shown(applied).in_force)


def _show(output: Output, owners: Owners | None) -> None:
    output.show(
        []
        if owners is None
        else [
            {
                "version": owners.version,
                "threshold": owners.threshold,
                "name": owner.name,
                "key_id": key_id,
            }
            for key_id, owner in sorted(owners.by_id.items())
        ]
    )


def add_verbs(verbs: Any) -> None:
    """Add the verbs of the noun `owners`."""
    made = offline(
        verbs, "make", _owners_make, "write a document that names owners", file="file to create"
    )
    made.add_argument(
        "--key",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="public key of an owner, who is called like the file; once for each",
    )
    for option, text in (
        ("threshold", "how many of them must sign"),
        ("version", "number of the document: one above the owners in force"),
    ):
        made.add_argument(f"--{option}", type=int, required=True, metavar="N", help=text)
    made = offline(
        verbs,
        "sign",
        _owners_sign,
        "sign a document that names owners; adds to FILE.sig",
        file="document to sign",
    )
    add_signing_options(made)
    made = verb(verbs, "show", _owners_show, "show who must sign policies")
    made.add_argument("--document", type=Path, metavar="FILE", help="write it to this new file")
    for name, run, text in (
        ("signers", _owners_signers, "show which owners, present and next, signed a document"),
        ("apply", _owners_apply, "put the owners that a signed document names into force"),
    ):
        made = verb(verbs, name, run, text)
        made.add_argument(
            "file", type=Path, metavar="FILE", help="document, with its signatures in FILE.sig"
        )
    destructive(
        verb(
            verbs,
            "reset",
            _owners_reset,
            "put the owners of the broker's configuration into force, if keys were lost",
        )
    )
