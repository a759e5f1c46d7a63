"""A job of one release beside daemons of another: a volume and a session, once each.

python -m compat.job GATEWAY_SOCKET NEAR_SOCKET FAR_SOCKET FAR_ADDRESS
"""

import asyncio
import sys

from compat.messages import Messages
from sealane.client import connect

_BYTES = 1 << 20
_HOST = "nqn.2014-08.org.nvmexpress:uuid:44444444-2222-4333-8444-555555555555"


async def main(gateway: str, near: str, far: str, far_address: str) -> None:
    """Write a volume and read it back; exchange messages."""
    async with connect(gateway) as client:
        created = await client.volumes.create(size_bytes=_BYTES)
        volume = await client.volumes.attach(created.name, host_nqn=_HOST)
        async with client.open(volume) as disk:
            await disk.write(1000, b"job" * 5000)
            await disk.flush()
            assert await disk.read(1000, 15_000) == b"job" * 5000
        await client.volumes.detach(volume.name)
        await client.volumes.delete(volume.name)
    messages = Messages({"a": near, "b": far}.__getitem__, lambda: far_address, name="job")
    exchange = asyncio.ensure_future(messages.run())
    await messages.went_on()
    messages.is_over = True
    await exchange


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
