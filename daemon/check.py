"""Checks the files and directories that a start needs, as the start does, and changes nothing.

`sealaned --check` does just this; a start and a reload do it first. So a faulty configuration is
reported before anything is served, and always in the same words.
"""

from pathlib import Path

from sealane.crypto.certificates import parse_anchor
from sealane.crypto.exchange import wipe
from sealane.daemon.broker.assembly import check_policy_file, roots_of
from sealane.daemon.broker.collateral import read_items
from sealane.daemon.broker.kek import read_key
from sealane.daemon.broker.opening import etcd_credentials
from sealane.daemon.broker.role import TRUST_ANCHOR_NAME
from sealane.daemon.config import BrokerConfig, Config, EnrolmentConfig, load_config
from sealane.daemon.gateway.third_parties import third_party_of
from sealane.daemon.node.evidence.choose import check_driver
from sealane.daemon.runtime.directories import JobsDirectory, check_directory, is_for_another
from sealane.daemon.runtime.files import read_file, read_secret
from sealane.daemon.target.subsystems import read_host_secrets
from sealane.daemon.volume.store_kinds import STORE_KINDS
from sealane.errors import UnavailableError


def load_checked(path: Path) -> Config:
    """Read a configuration and check it; raises as `load_config` and `check_start` do."""
    config = load_config(path)
    check_start(config)
    return config


def check_start(config: Config) -> None:
    """Raise as a start would if a directory, key, certificate or policy can't be used.

    UsageError; VerificationError for a policy without its owner's signature; UnavailableError if a
    drive is missing, or a file system full or gone. Contacts neither hardware nor another daemon,
    and binds no address.
    """
    state_dir = Path(config.node.state_dir)
    # In the unit, the service manager makes these two; root's check may come before that.
    is_state_made = state_dir.exists() or not is_for_another()
    if is_state_made:
        check_directory(state_dir, key="node.state_dir")
    if Path(config.node.run_dir).exists() or not is_for_another():
        check_directory(Path(config.node.run_dir), key="node.run_dir")
    if config.broker is not None:
        _check_broker(config.broker)
    if config.enrolment is not None:
        _check_enrolment(config.enrolment, own_anchor=_own_anchor(config))
    if config.target is not None:
        directory = Path(config.target_directory)
        is_made = is_state_made or not directory.is_relative_to(state_dir)
        if STORE_KINDS[config.target.store].is_kept and is_made:
            check_directory(directory, key="target.directory", is_shared=True)
        for device in config.target.namespaces:
            if not Path(device).exists():
                # A drive that is gone may come back.
                raise UnavailableError(
                    "target.namespace.missing", f"target.namespaces {device}: does not exist"
                )
        for subsystem in config.target.subsystems:
            read_host_secrets(subsystem)
    if config.fabric is not None and config.fabric.jobs is not None:
        JobsDirectory(Path(config.fabric.jobs.run_dir)).check()
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
    roots_of(config.tpm_roots, "broker.tpm_roots")
    roots_of(config.card_roots, "broker.card_roots")
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
    # A broker writes its own trust anchor at each start, before the first role needs it.
    if anchor != own_anchor:
        key = "enrolment.trust_anchor"
        parse_anchor(read_file(str(anchor), key=key), source=f"{key} {anchor}")
    check_driver(config)
