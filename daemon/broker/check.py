"""Checks the files of a broker's configuration as its start does, and changes nothing."""

from pathlib import Path

from sealane.crypto.exchange import wipe
from sealane.daemon.broker.assembly import check_policy_file, roots_of
from sealane.daemon.broker.audit_forward import forward_tls
from sealane.daemon.broker.collateral import read_items
from sealane.daemon.broker.kek import read_key
from sealane.daemon.broker.opening import etcd_credentials
from sealane.daemon.config import BrokerConfig
from sealane.daemon.runtime.files import read_secret


def check_broker(config: BrokerConfig) -> None:
    """Raise UsageError or VerificationError as the broker's start would."""
    check_policy_file(config)
    if config.hsm is None:
        key = bytearray(read_key(config))
        wipe(key)
    else:
        read_secret(config.hsm.pin_file, key="broker.hsm.pin_file")
    roots_of(config.tpm_roots, "broker.tpm_roots")
    roots_of(config.card_roots, "broker.card_roots")
    if config.etcd is not None:
        etcd_credentials(config.etcd)
    if config.audit_forward is not None:
        forward_tls(config.audit_forward)
    if config.collateral_dir is not None:
        read_items(Path(config.collateral_dir))
