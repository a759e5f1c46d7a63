"""Checks the files of a broker's configuration as its start does, and changes nothing."""

from pathlib import Path

from sealane.daemon.broker.assembly import check_policy_file, configured_owners
from sealane.daemon.broker.audit_forward import collector_of
from sealane.daemon.broker.collateral import read_items
from sealane.daemon.broker.kek import read_key
from sealane.daemon.broker.opening import STORE_NAME, etcd_credentials
from sealane.daemon.broker.owners import POLICY_LABEL, SIGNATURE_SUFFIX, parse_signatures
from sealane.daemon.broker.policy import read_document, read_signature
from sealane.daemon.config import BrokerConfig, NextKeyConfig
from sealane.daemon.runtime.certificate_files import read_certificates
from sealane.daemon.runtime.files import read_secret
from sealane.daemon.runtime.logs import get_logger


def check_broker(config: BrokerConfig, state_dir: Path) -> None:
    """Raise UsageError or VerificationError as the broker's start would.

    Who must sign a policy is in the store, which this doesn't read. Before there is one, it is who
    the configuration says; with one, or on etcd, too few signatures of these are only warned of.
    """
    _check_policy(config, has_store=config.etcd is not None or (state_dir / STORE_NAME).exists())
    _check_key(config, "broker")
    if config.next_key is not None:
        _check_key(config.next_key, "broker.next_key")
    read_certificates(config.tpm_roots, "broker.tpm_roots")
    read_certificates(config.card_roots, "broker.card_roots")
    if config.etcd is not None:
        etcd_credentials(config.etcd)
    if config.audit_forward is not None:
        collector_of(config.audit_forward, node="")
    if config.collateral_dir is not None:
        read_items(Path(config.collateral_dir))


def _check_policy(config: BrokerConfig, *, has_store: bool) -> None:
    owners = configured_owners(config)
    check_policy_file(config, owners=None if has_store else owners)
    if owners is None or not has_store:
        return
    path = Path(config.policy_file)
    signatures = parse_signatures(read_signature(path), source=f"{path}{SIGNATURE_SUFFIX}")
    found = owners.signers(POLICY_LABEL, read_document(path), signatures)
    if len(found) < owners.threshold:
        get_logger().warning(
            "policy_lacks_signatures",
            signed=len(found),
            needed=owners.threshold,
            message=f"{path} has too few signatures of the owners whom the configuration names; "
            "the broker starts if this policy is in force, or if the owners in its store signed it",
        )


def _check_key(place: BrokerConfig | NextKeyConfig, section: str) -> None:
    if place.hsm is not None:
        read_secret(place.hsm.pin_file, key=f"{section}.hsm.pin_file")
    elif place.key_file is not None:
        read_key(place.key_file, name=f"{section}.key_file").close()
