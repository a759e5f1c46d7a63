"""docs/start/three-machines.md does what it says: three hosts, each with a TPM of its own."""

import contextlib
import itertools
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from control_plane import short_directory
from patience import PATIENCE_SECONDS
from systemd_lab.machine import PYTHON, Machine, booted, link
from systemd_lab.plain_host import WRITTEN
from systemd_lab.tpms import TPM_PORT, certified_tpms

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "three-machines.md"
HOST_NQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555"
NEEDED = ("swtpm", "swtpm_setup", "swtpm_localca")
EVERY_HOST = "every host"
WITH_NVME = ", with nvme-tcp"

pytestmark = [
    pytest.mark.lab_systemd,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in NEEDED),
        reason=f"{', '.join(NEEDED)}: not all installed (make packages)",
    ),
]


def blocks() -> list[tuple[str, str]]:
    """Return what the page has its reader run: where, and what."""
    return re.findall(r"```sh (\S[^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def programs() -> list[str]:
    """Return the page's programs."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def machines(image: str, package: Path) -> Iterator[dict[str, Machine]]:
    """Boot the page's hosts, with what it says that its reader has."""
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(short_directory())
        made = {name: stack.enter_context(booted(image, name)) for name, _ in rows}
        for one, other in itertools.combinations([(made[name], at) for name, at in rows], 2):
            link(one, other)
        roots = stack.enter_context(certified_tpms(made, root))
        subprocess.run(
            ["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", root / "key"], check=True
        )
        for machine in made.values():
            machine.write("/etc/sealane/tpm-roots.pem", roots)
            machine.write("/etc/nvme/hostnqn", f"{HOST_NQN}\n".encode())
            machine.put(package, f"/root/{package.name}")
            # The operator's access to each host.
            machine.write("/root/.ssh/id_ed25519", (root / "key").read_bytes(), 0o600)
            machine.write("/root/.ssh/authorized_keys", (root / "key.pub").read_bytes(), 0o600)
            machine.write("/root/.ssh/config", b"StrictHostKeyChecking no\nLogLevel ERROR\n")
            # The kernel that machines share has no NVMe/TCP.
            machine.write("/usr/local/sbin/modprobe", b"#!/bin/sh\n", 0o755)
            script = Path(__file__).with_name("plain_host.py").read_bytes()
            machine.write("/usr/local/sbin/nvme", f"#!{PYTHON}\n".encode() + script, 0o755)
        yield made


@dataclass
class Reader:
    """Does what the page says, where it says."""

    machines: dict[str, Machine]
    shells: defaultdict[str, str] = field(default_factory=lambda: defaultdict(str))
    """The variables of one shell on each host: the lines that set them."""

    def run(self, where: str, block: str) -> str:
        """Run a block, and return the output of the last host."""
        # The TPMs here answer on a socket instead of a device.
        tcti = f"swtpm:host=127.0.0.1,port={TPM_PORT}"
        block = block.replace("device:/dev/tpmrm0", tcti)
        said = ""
        for name in self.machines if where == EVERY_HOST else where.split(", "):
            said = self.machines[name].run_block(self.shells[name] + block)
            self.shells[name] += "".join(re.findall(r"^\w+=\$.*\n", block, re.MULTILINE))
        return said

    def arguments(self, name: str, command: str) -> list[str]:
        """Return what a host's shell makes of an `nvme` command."""
        printed = command.replace("nvme connect", "printf '%s\\n'")
        return self.machines[name].run_block(self.shells[name] + printed).splitlines()


EXTEND = f"""
import hashlib
from tpm2_pytss import ESAPI, TPML_DIGEST_VALUES, TPMT_HA, TPMU_HA
from tpm2_pytss.constants import ESYS_TR, TPM2_ALG

digest = TPMU_HA(sha256=hashlib.sha256(b"something else").digest())
with ESAPI("swtpm:host=127.0.0.1,port={TPM_PORT}") as tpm:
    entry = TPMT_HA(hashAlg=TPM2_ALG.SHA256, digest=digest)
    tpm.pcr_extend(ESYS_TR(7), TPML_DIGEST_VALUES(digests=[entry]))
"""


def test_three_machines_get_a_volume_and_a_session_by_the_pages_commands(
    machines: dict[str, Machine],
) -> None:
    storage, compute = machines["storage-1"], machines["compute-1"]
    *steps, nodes, node, why = [b for b in blocks() if not b[0].endswith(WITH_NVME)]
    reader = Reader(machines)
    *_, attached, connected = [reader.run(*step) for step in steps]
    (shown,) = re.findall(r"^connect with +(.*)$", attached, re.MULTILINE)
    command = reader.arguments("compute-1", steps[-1][1])
    assert reader.arguments("compute-1", shown) == command
    uuid = connected.removeprefix("namespace ").strip()

    listener, opener = programs()
    as_job = ("runuser", "-u", "sealane", "--", PYTHON, "-c")
    with storage.start(*as_job, listener) as listening:
        assert "65536 bytes there in " in compute.run(*as_job, opener)
        heard = listening.communicate(timeout=PATIENCE_SECONDS)
        assert heard == ("received 65536 bytes and sent them back\n", "")

    said = reader.run(*nodes)
    for entry in ("storage-1 +target", "storage-1 +fabric", "compute-1 +gateway"):
        assert re.search(rf"^{entry} +research ", said, re.MULTILINE), said
    assert uuid in reader.run(*node)
    assert not [
        each.name for each in machines.values() if '"event": "development' in each.journal()
    ]
    search = f"! grep -rqF '{WRITTEN[:16].decode()}' /var/lib/sealane && du -s /var/lib/sealane"
    assert int(storage.run("bash", "-c", search).split()[0]) > 256 << 10  # KiB

    # A node that boots something else is refused, and the broker's log says why.
    compute.run_block("systemctl stop sealaned")
    compute.run(PYTHON, "-c", EXTEND)
    with pytest.raises(AssertionError, match=r"attestation\.refused"):
        compute.run_block("systemctl start sealaned")
    assert "attestation.measurement.unknown" in reader.run(*why)
