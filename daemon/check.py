"""What a start needs of files and directories: read and judged as the start does, nothing changed.

`sealaned --check` ends here, a start and a reload begin here: what is wrong with a configuration is
said before anything is served, and in the same words.
"""

from pathlib import Path

from sealane.crypto.certificates import parse_anchor
from sealane.crypto.exchange import wipe
from sealane.daemon.broker.assembly import check_policy_file, tpm_roots
from sealane.daemon.broker.collateral import read_items
from sealane.daemon.broker.kek import read_key
from sealane.daemon.broker.opening import etcd_credentials
from sealane.daemon.broker.role import TRUST_ANCHOR_NAME
from sealane.daemon.config import BrokerConfig, Config, EnrolmentConfig, load_config
from sealane.daemon.gateway.third_parties import third_party_of
from sealane.daemon.node.evidence.choose import endorsement_certificates, software_driver
from sealane.daemon.runtime.directories import check_directory
from sealane.daemon.runtime.files import read_file, read_secret
from sealane.daemon.target.subsystems import read_host_secrets
from sealane.errors import UsageError
from sealane.protocol.kinds import KEPT_STORES


def load_checked(path: Path) -> Config:
    """Read a configuration and check what it names; errors of `load_config` and `check_start`."""
    config = load_config(path)
    check_start(config)
    return config


def check_start(config: Config) -> None:
    """Raise as a start would for a directory, key, certificate or policy that it can't use.

    UsageError, or VerificationError for a policy without its owner's signature. Neither hardware
    nor another daemon is asked, and no address is bound.
    """
    check_directory(Path(config.node.state_dir), key="node.state_dir")
    check_directory(Path(config.node.run_dir), key="node.run_dir")
    if config.broker is not None:
        _check_broker(config.broker)
    if config.enrolment is not None:
        _check_enrolment(config.enrolment, own_anchor=_own_anchor(config))
    if config.target is not None:
        if config.target.store in KEPT_STORES:
            check_directory(Path(config.target_directory), key="target.directory", is_shared=True)
        for device in config.target.namespaces:
            if not Path(device).exists():
                raise UsageError("config.unreadable", f"target.namespaces {device}: not there")
        for subsystem in config.target.subsystems:
            read_host_secrets(subsystem)
    if config.gateway is not None:
        for party in config.gateway.third_party:
            third_party_of(party)


def _check_broker(config: BrokerConfig) -> None:
    check_policy_file(config)
    if config.hsm is None:
        key = bytearray(read_key(config))
        wipe(key)
    else:
        read_secret(config.hsm.pin_file, key="broker.hsm.pin_file")
    tpm_roots(config)
    if config.etcd is not None:
        etcd_credentials(config.etcd)
    if config.collateral_dir is not None:
        read_items(Path(config.collateral_dir))


def _own_anchor(config: Config) -> Path | None:
    """Return where this daemon's own broker will write its trust anchor."""
    if config.broker is None:
        return None
    return Path(config.node.state_dir) / TRUST_ANCHOR_NAME


def _check_enrolment(config: EnrolmentConfig, *, own_anchor: Path | None) -> None:
    anchor = Path(config.trust_anchor)
    # A broker writes its own at each start, before the first role needs it.
    if anchor != own_anchor:
        key = "enrolment.trust_anchor"
        parse_anchor(read_file(str(anchor), key=key), source=f"{key} {anchor}")
    if config.evidence == "software":
        software_driver(config)
    elif config.evidence == "tpm2":
        endorsement_certificates(config.tpm2.endorsement_certificates)
