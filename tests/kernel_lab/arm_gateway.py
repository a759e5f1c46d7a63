"""In the lab's guest: a gateway with the files in /job/site. `arm_gateway.py VOLUME`.

Attaches the volume for the guest's kernel, and says in /tmp/attached where it is. Ends when there
is a file /tmp/over.
"""

import asyncio
import sys
from pathlib import Path

from control_plane import daemon
from sealane.client import connect

ATTACHED, OVER = Path("/tmp/attached"), Path("/tmp/over")  # noqa: S108 - nobody else is here


async def serve(socket: str, volume: str, host_nqn: str) -> None:
    """Attach the volume until it is over."""
    async with connect(socket) as client:
        at = (await client.volumes.attach(volume, host_nqn=host_nqn)).attachment
        assert at is not None
        draft = ATTACHED.with_suffix(".new")
        draft.write_text(f"{at.subsystem_nqn} {at.trsvcid} {at.dhchap_secret}\n")
        draft.rename(ATTACHED)
        while not await asyncio.to_thread(OVER.exists):  # noqa: ASYNC110 - a shell makes it
            await asyncio.sleep(0.2)
        await client.volumes.detach(volume)


if __name__ == "__main__":
    nqn = Path("/etc/nvme/hostnqn").read_text().strip()
    with daemon(Path("/job/site/h.toml")) as running:
        asyncio.run(serve(running.socket, sys.argv[1], nqn))
