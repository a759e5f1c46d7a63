"""Checks the files of a broker's configuration as its start does, and changes nothing."""

from pathlib import Path

from sealane.daemon.broker.assembly import check_policy_file, configured_owners
from sealane.daemon.broker.audit_forward import collector_of
from sealane.daemon.broker.collateral import read_items
from sealane.daemon.broker.kek import read_key
from sealane.daemon.broker.opening import STORE_NAME, etcd_credentials
from sealane.daemon.config import BrokerConfig, NextKeyConfig
from sealane.daemon.runtime.certificate_files import read_certificates
from sealane.daemon.runtime.files import read_secret


def check_broker(config: BrokerConfig, state_dir: Path) -> None:
    """Raise UsageError or VerificationError as the broker's start would.

    Who must sign a policy is in the store, which this doesn't read. Before there is one, it is who
    the configuration says.
    """
    owners = configured_owners(config)
    is_new = config.etcd is None and not (state_dir / STORE_NAME).exists()
    check_policy_file(config, owners=owners if is_new else None)
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


def _check_key(place: BrokerConfig | NextKeyConfig, section: str) -> None:
    if place.hsm is not None:
        read_secret(place.hsm.pin_file, key=f"{section}.hsm.pin_file")
    elif place.key_file is not None:
        read_key(place.key_file, name=f"{section}.key_file").close()
