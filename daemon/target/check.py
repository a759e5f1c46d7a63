"""Checks the files and drives of a target's configuration as its start does; changes nothing."""

from pathlib import Path

from sealane.daemon.config import Config, TargetConfig
from sealane.daemon.device.directory import check_device
from sealane.daemon.runtime.directories import check_directory
from sealane.daemon.target.subsystems import read_host_secrets
from sealane.daemon.volume.store_kinds import STORE_KINDS
from sealane.errors import UnavailableError


def check_target(config: Config, target: TargetConfig, *, is_state_made: bool) -> None:
    """Raise UsageError, VerificationError or UnavailableError as the target's start would.

    If `is_state_made` is False, a directory for volumes inside the state directory may be absent.
    """
    directory = Path(config.target_directory)
    is_made = is_state_made or not directory.is_relative_to(config.node.state_dir)
    if STORE_KINDS[target.store].is_kept and is_made:
        check_directory(directory, key="target.directory", is_shared=True)
        check_device(directory)
    for device in target.namespaces:
        if not Path(device).exists():
            # A drive that is gone may come back.
            raise UnavailableError(
                "target.namespace.missing", f"target.namespaces {device}: does not exist"
            )
    for subsystem in target.subsystems:
        read_host_secrets(subsystem)
