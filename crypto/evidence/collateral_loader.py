"""Loads an operator's collateral, verifies it, and refuses to go back to older versions.

Items are files as vendors publish them; their source is not trusted. The caller keeps high-water
marks of what was in use. A document or list below its mark is refused from then on, so no one can
restore a TCB that was declared out of date, or a revoked key.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from cryptography import x509

from sealane.crypto.evidence.chain import (
    check_current,
    key_sha256,
    parse_certificates,
    parse_revocation_list,
    verify_chain,
    verify_revocation_list,
)
from sealane.crypto.evidence.collateral import Collateral, SignedDocument, TcbInfo, VendorRoots
from sealane.crypto.evidence.intel_documents import (
    Bundle,
    parse_bundle,
    verify_qe_identity,
    verify_tcb_info,
)
from sealane.crypto.evidence.snp import parse_vcek, vcek_name
from sealane.errors import VerificationError
from sealane.reasons import ReasonId

ITEM_BYTES_MAX: Final = 1 << 20
_KIND: Final = "collateral"
# A certificate may be read before its issuer; a chain needs at most as many rounds as it has
# certificates.
_ROUNDS: Final = 4

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Result of loading.

    `high_water` are the marks to store, durably, *before* `collateral` is used; `refused` are pairs
    of an item's name and its error.
    """

    collateral: Collateral
    high_water: Mapping[str, int]
    refused: tuple[tuple[str, VerificationError], ...]


def load_collateral(
    items: Mapping[str, bytes],
    *,
    roots: VendorRoots,
    high_water: Mapping[str, int],
    now: dt.datetime,
) -> Loaded:
    """Parse and verify `items` (bytes by name), and compare them with the marks of earlier loads.

    An item is one certificate (DER) or several (PEM), a revocation list (DER) of any vendor, or
    Intel's collateral of one FMSPC in JSON. Items that are wrong, not valid at this time, or older
    than a mark are left out and listed in `refused`; evidence that needs them is then refused.
    """
    return _Loading(roots=roots, high_water=high_water, now=now).run(items)


class _Newest(Generic[_Value]):
    """The newest verified value for each name."""

    def __init__(self) -> None:
        self._found: dict[bytes, tuple[dict[str, int], _Value, str]] = {}

    def offer(self, name: bytes, value: _Value, *, marks: dict[str, int], item: str) -> None:
        """Keep `value` if its marks, compared in order, are the highest so far."""
        found = self._found.get(name)
        if found is None or list(marks.values()) > list(found[0].values()):
            self._found[name] = (marks, value, item)

    def take(
        self, high_water: dict[str, int], refused: list[tuple[str, VerificationError]]
    ) -> dict[bytes, _Value]:
        """Return values that are not below a mark, and raise the marks to them."""
        taken = {}
        for name, (marks, value, item) in self._found.items():
            below = {k: v for k, v in marks.items() if v < high_water.get(k, v)}
            if below:
                known = {each: high_water[each] for each in below}
                error = _fault(
                    "attestation.collateral.rolled_back",
                    f"{below} is older than {known}, which was in use before",
                )
                refused.append((item, error))
                continue
            high_water.update(marks)
            taken[name] = value
        return taken


class _Loading:
    """One load. Signatures are checked first, so no forged item can displace a genuine one."""

    def __init__(
        self, *, roots: VendorRoots, high_water: Mapping[str, int], now: dt.datetime
    ) -> None:
        self._roots = roots
        self._now = now
        self._high_water = dict(high_water)
        self._refused: list[tuple[str, VerificationError]] = []
        self._amd_signers: list[x509.Certificate] = []
        self._amd_vceks: dict[bytes, x509.Certificate] = {}
        # Authorities by name: the certificates from each one up to below its root, and the root.
        self._authorities: dict[x509.Name, tuple[list[x509.Certificate], x509.Certificate]] = {
            root.subject: ([], root) for root in (*roots.amd.values(), roots.intel, roots.nvidia)
        }

    def run(self, items: Mapping[str, bytes]) -> Loaded:
        """Read everything: certificates, then lists, then items that need both."""
        certificates: list[tuple[str, x509.Certificate]] = []
        encoded_lists: list[tuple[str, bytes]] = []
        bundles: list[tuple[str, Bundle]] = []
        for item, encoded in items.items():
            try:
                if len(encoded) > ITEM_BYTES_MAX:
                    raise _fault(
                        "attestation.collateral.malformed",
                        f"{len(encoded)} bytes; allowed: {ITEM_BYTES_MAX}",
                    )
                if encoded.startswith(b"{"):
                    bundle = parse_bundle(encoded)
                    chain = parse_certificates(bundle.pck_issuer_chain, kind=_KIND)
                    certificates += [(item, each) for each in chain]
                    encoded_lists += [(item, bundle.root_list), (item, bundle.pck_list)]
                    bundles.append((item, bundle))
                elif _is_list(encoded):
                    encoded_lists.append((item, encoded))
                else:
                    chain = parse_certificates(encoded, kind=_KIND)
                    certificates += [(item, each) for each in chain]
            except VerificationError as error:
                self._refused.append((item, error))
        self._read_certificates(certificates)
        lists = self._read_lists(encoded_lists)
        tcb_infos, qe_identity = self._read_documents(bundles, lists)
        return Loaded(
            collateral=Collateral(
                roots=self._roots,
                revocation_lists=lists,
                amd_signers=tuple(self._amd_signers),
                amd_vceks=self._amd_vceks,
                tcb_infos=tcb_infos,
                qe_identity=qe_identity,
            ),
            high_water=self._high_water,
            refused=tuple(self._refused),
        )

    def _read_certificates(self, waiting: list[tuple[str, x509.Certificate]]) -> None:
        for _ in range(_ROUNDS):
            unknown = []
            for item, certificate in waiting:
                if certificate.issuer not in self._authorities:
                    unknown.append((item, certificate))
                    continue
                try:
                    self._add_certificate(certificate)
                except VerificationError as error:
                    self._refused.append((item, error))
            waiting = unknown
        for item, certificate in waiting:
            name = certificate.issuer.rfc4514_string()
            self._refused.append(
                (item, _fault("attestation.collateral.chain", f"the issuer {name} is unknown"))
            )

    def _add_certificate(self, certificate: x509.Certificate) -> None:
        above, root = self._authorities[certificate.issuer]
        if certificate == root:
            return
        chain = [certificate, *above]
        verify_chain(chain, root=root, revocation_lists={}, kind=_KIND, now=self._now)
        is_amd = root in self._roots.amd.values()
        if _is_authority(certificate):
            self._authorities[certificate.subject] = (chain, root)
            if is_amd:
                self._amd_signers.append(certificate)
        elif is_amd:
            self._amd_vceks[vcek_name(*parse_vcek(certificate))] = certificate
        else:
            name = certificate.subject.rfc4514_string()
            raise _fault("attestation.collateral.malformed", f"a verifier has no use for {name}")

    def _read_lists(
        self, encoded_lists: list[tuple[str, bytes]]
    ) -> dict[bytes, x509.CertificateRevocationList]:
        newest: _Newest[x509.CertificateRevocationList] = _Newest()
        for item, encoded in encoded_lists:
            try:
                revocation_list = parse_revocation_list(encoded)
                above, root = self._authorities.get(revocation_list.issuer, ([], None))
                if root is None:
                    unknown = revocation_list.issuer.rfc4514_string()
                    raise _fault("attestation.collateral.chain", f"the issuer {unknown} is unknown")
                issuer = above[0] if above else root
                verify_revocation_list(revocation_list, issuer=issuer)
                check_current(revocation_list, kind=_KIND, now=self._now)
            except VerificationError as error:
                self._refused.append((item, error))
                continue
            name = key_sha256(issuer)
            mark = f"revocation-list/{name.hex()}"
            marks = {f"{mark}/number": _number(revocation_list)}
            marks[f"{mark}/issued"] = int(revocation_list.last_update_utc.timestamp())
            newest.offer(name, revocation_list, marks=marks, item=item)
        return newest.take(self._high_water, self._refused)

    def _read_documents(
        self,
        bundles: list[tuple[str, Bundle]],
        lists: Mapping[bytes, x509.CertificateRevocationList],
    ) -> tuple[dict[bytes, TcbInfo], SignedDocument | None]:
        tcb_infos: _Newest[TcbInfo] = _Newest()
        qe_identities: _Newest[SignedDocument] = _Newest()
        root, now = self._roots.intel, self._now
        for item, bundle in bundles:
            try:
                tcb_info = verify_tcb_info(
                    bundle.tcb_info, root=root, revocation_lists=lists, now=now
                )
                identity = verify_qe_identity(
                    bundle.qe_identity, root=root, revocation_lists=lists, now=now
                )
            except VerificationError as error:
                self._refused.append((item, error))
                continue
            mark = f"tcb-info/{tcb_info.fmspc.hex()}"
            tcb_infos.offer(tcb_info.fmspc, tcb_info, marks=_marks(mark, tcb_info), item=item)
            qe_identities.offer(b"", identity, marks=_marks("qe-identity", identity), item=item)
        identities = qe_identities.take(self._high_water, self._refused)
        return tcb_infos.take(self._high_water, self._refused), identities.get(b"")


def _marks(name: str, document: SignedDocument) -> dict[str, int]:
    return {
        f"{name}/evaluation": document.tcb_evaluation_data_number,
        f"{name}/issued": int(document.issue_date.timestamp()),
    }


def _number(revocation_list: x509.CertificateRevocationList) -> int:
    """Return the CRL number (RFC 5280, section 5.2.3); 0 if a list has none."""
    try:
        return revocation_list.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return 0


def _is_list(encoded: bytes) -> bool:
    """Distinguish a revocation list from a certificate; both are DER."""
    try:
        parse_revocation_list(encoded)
    except VerificationError:
        return False
    return True


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return found.value.ca


def _fault(reason: ReasonId, message: str) -> VerificationError:
    return VerificationError(reason, message)
