"""What a broker, a target and a gateway leave on disk, kept as an archive for each store kind.

`make golden` writes the files in `golden` again, with the daemons of this tree. They are what a
release wrote, and later ones must read them (docs/operate/upgrade.md): write them again only if the
test itself needs other ones, and add files, rather than replace these, when a format gets a new
version.
"""

import asyncio
import contextlib
import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from compat.golden_wires import wires
from control_plane import Site, short_directory
from kills.restarts import start_in_place
from sealane.client import connect
from sealane.crypto.evidence.software import SoftwareKey
from trust.test_revocation import HOST, host_of

GOLDEN: Final = Path(__file__).with_name("golden")
ANCHORS: Final = {"file": "broker", "inline": "file"}
"""The anchor of each kind of store."""
WIRES: Final = GOLDEN / "wires.json"
SECTOR: Final = 4096
SECTORS: Final = 256
WRITTEN: Final = (0, 1, 2, 3, 100, 255)
_KEPT: Final = ("broker", "s", "g", "kek", "policy.toml", "s.pem", "g.pem", "volume.json")


def content(lba: int) -> bytes:
    """Return what sector `lba` holds."""
    return f"sector {lba} ".encode().ljust(SECTOR, b".")


@contextlib.asynccontextmanager
async def running(site: Site, *, store: str) -> AsyncIterator[str]:
    """Start broker, target and gateway on what is in the site; yield the gateway's socket."""
    with contextlib.ExitStack() as stack:
        site.broker_config()
        broker = await asyncio.to_thread(start_in_place, site, stack, "broker")
        site.write_config(
            "s",
            site.enrolment("s", broker)
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
            + f'store = "{store}"\nanchor = "{ANCHORS[store]}"\n',
        )
        target = await asyncio.to_thread(start_in_place, site, stack, "s")
        site.write_config(
            "g",
            site.enrolment("g", broker)
            + '[gateway]\nlisten = "127.0.0.1:0"\ntarget_node = "s"\n'
            + f'target_address = "{target.addresses["target_control"]}"\n',
        )
        gateway = await asyncio.to_thread(start_in_place, site, stack, "g")
        yield gateway.socket


async def write(store: str) -> None:
    """Write the archive of a cluster whose volume is attached."""
    with short_directory() as root:
        site = Site(root)
        site.write_policy({"s": ["target"], "g": ["gateway"]})
        async with running(site, store=store) as socket, connect(socket) as client:
            created = await client.volumes.create(
                size_bytes=SECTORS * SECTOR, display_name="golden"
            )
            volume = await client.volumes.attach(created.name, host_nqn=HOST)
            async with host_of(volume) as host:
                queue = await host.open_queue(1)
                for lba in WRITTEN:
                    await queue.write(lba, content(lba))
                await queue.flush()
                await queue.close()
            assert volume.attachment is not None
            (root / "volume.json").write_text(
                json.dumps({"name": volume.name, "secret": volume.attachment.dhchap_secret})
            )
        with tarfile.open(GOLDEN / f"{store}.tar.xz", "w:xz", preset=9) as archive:
            for name in _KEPT:
                archive.add(root / name, name)


def unpack(store: str, root: Path) -> Site:
    """Unpack an archive; return the site, whose daemons can be started."""
    with tarfile.open(GOLDEN / f"{store}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    for path in root.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    keys = {
        name: SoftwareKey.parse((root / f"{name}.pem").read_bytes(), source=name)
        for name in ("s", "g")
    }
    return Site(root, keys=keys)


async def main() -> None:
    """Write all archives, and the digests of what is agreed on the wire."""
    WIRES.write_text(json.dumps(wires(), indent=2) + "\n")
    for store in ANCHORS:
        await write(store)


if __name__ == "__main__":
    asyncio.run(main())
