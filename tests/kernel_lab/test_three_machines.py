"""A stock Linux host mounts a volume with the commands of docs/start/three-machines.md."""

import re
from pathlib import Path

import pytest

from kernel_lab.build import HOST_NQN
from kernel_lab.cluster import Disk
from kernel_lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

PAGE = Path(__file__).parents[2] / "docs" / "start" / "three-machines.md"


def commands(holding: str) -> list[str]:
    """Return the lines of the only block of the page that contains a text."""
    blocks = re.findall(r"```sh \S[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if holding in block]
    return block.replace("\\\n", "").splitlines()


def test_linux_mounts_a_volume_by_the_pages_commands(lab: Lab, disk: Disk) -> None:
    load, find_uuid, connect = commands("nvme connect --transport tcp")
    find_disk, make, mount, *use = commands("mkfs.ext4")
    # The gateway of this lab is across an emulated network, at a port of its own, and the guest has
    # no udev, which names the disk after its UUID.
    assert find_disk == "disk=/dev/disk/by-id/nvme-uuid.$uuid"
    connect = connect.replace("127.0.0.1", "$LAB_HOST").replace("4421", str(disk.port))
    lab.run(
        f"volume=volumes/{disk.uuid} host_nqn={HOST_NQN}",
        f"echo '{disk.secret}' >~/first.secret",
        load,
        find_uuid,
        connect,
        f"nqn={disk.nqn}",
        "namespace 1",
        'disk="$device"',
        make,
        mount,
        *use,
        "umount /mnt",
        "mount \"$disk\" /mnt && grep -q 'sealed before' /mnt/hello && umount /mnt",
        "disconnect",
    )
