"""Checks the files and directories that a start needs, as the start does, and changes nothing.

`sealaned --check` does just this; a start and a reload do it first. So a faulty configuration is
reported before anything is served, and always in the same words.
"""

from pathlib import Path

from sealane.crypto.anchors import TrustAnchors
from sealane.daemon.config import Config, EnrolmentConfig, load_config
from sealane.daemon.node.evidence.choose import check_driver
from sealane.daemon.runtime.certificate_files import read_certificates
from sealane.daemon.runtime.directories import SharedDirectory, check_directory, is_for_another
from sealane.daemon.runtime.files import read_file
from sealane.daemon.runtime.state_format import check_format
from sealane.errors import UsageError


def load_checked(path: Path) -> Config:
    """Read a configuration and check it; raises as `load_config` and `check_start` do."""
    config = load_config(path)
    check_start(config)
    return config


def check_names(config: Config) -> None:
    """Raise UsageError `config.value` for the first name in `[access]` that this machine lacks.

    A start and a reload go on without it: the name may come back.
    """
    if config.access is not None and config.access.unknown:
        raise UsageError(
            "config.value",
            f"access: this machine has no {config.access.unknown[0].replace(':', ' ')}",
        )


def check_start(config: Config) -> None:
    """Raise as a start would if a directory, key, certificate or policy can't be used.

    UsageError; VerificationError for a malformed file of signatures, and, before a broker has a
    store of its own, for a policy without its owners' signatures; UnavailableError if a drive is
    missing, or a file system full or gone. Contacts neither hardware nor another daemon,
    and binds no address.
    """
    state_dir = Path(config.node.state_dir)
    # In the unit, the service manager makes these two; root's check may come before that.
    is_state_made = state_dir.exists() or not is_for_another()
    if is_state_made:
        check_directory(state_dir, key="node.state_dir")
        check_format(state_dir)
    if Path(config.node.run_dir).exists() or not is_for_another():
        check_directory(Path(config.node.run_dir), key="node.run_dir")
    if config.broker is not None:
        from sealane.daemon.broker.check import check_broker  # noqa: PLC0415

        check_broker(config.broker, state_dir)
    if config.traces is not None:
        read_certificates(config.traces.ca_file, "traces.ca_file")
    if config.enrolment is not None:
        _check_enrolment(config.enrolment, own_anchor=_own_anchor(config))
    if config.target is not None:
        from sealane.daemon.target.check import check_target  # noqa: PLC0415

        check_target(config, config.target, is_state_made=is_state_made)
    if config.is_shared:
        run_dir, key = config.shared_run_dir
        SharedDirectory(Path(run_dir), key=key).check()
    if config.gateway is not None:
        from sealane.daemon.gateway.check import check_gateway  # noqa: PLC0415

        check_gateway(config.gateway, config.enrolment)


def _own_anchor(config: Config) -> Path | None:
    """Return where this daemon's own broker will write its trust anchor."""
    if config.broker is None:
        return None
    from sealane.daemon.broker.anchor_files import TRUST_ANCHOR_NAME  # noqa: PLC0415

    return Path(config.node.state_dir) / TRUST_ANCHOR_NAME


def _check_enrolment(config: EnrolmentConfig, *, own_anchor: Path | None) -> None:
    anchor = Path(config.trust_anchor)
    # A broker writes its own trust anchor at each start, before the first role needs it.
    if anchor != own_anchor:
        key = "enrolment.trust_anchor"
        TrustAnchors.parse(read_file(str(anchor), key=key), source=f"{key} {anchor}")
    check_driver(config)
