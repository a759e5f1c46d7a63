"""Replacement for `nvme connect`, with its arguments, where the kernel has no NVMe/TCP.

Connects with our initiator, and writes and reads a sector.
"""

import argparse
import asyncio

from sealane.protocol.nvme.authentication.secret import HostSecret
from sealane.transport.nvme.authenticate import Credentials
from sealane.transport.nvme.initiator import HostController

WRITTEN = b"sealed before it left its host!!" * 128


async def connect(options: argparse.Namespace) -> None:
    controller = HostController(
        traddr=options.traddr,
        trsvcid=options.trsvcid,
        subsystem_nqn=options.nqn,
        host_nqn=options.hostnqn,
        credentials=Credentials(secret=HostSecret.parse(options.dhchap_secret)),
    )
    async with controller as host:
        names = await host.namespace_names(1)
        queue = await host.open_queue(1)
        try:
            await queue.write(0, WRITTEN)
            await queue.flush()
            found = bytearray(len(WRITTEN))
            await queue.read(0, found)
            assert found == WRITTEN
        finally:
            await queue.close()
    print(f"namespace {names.uuid}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="nvme")
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("connect")
    verb.add_argument("--transport", choices=["tcp"], required=True)
    verb.add_argument("--trsvcid", type=int, required=True)
    for name in ("traddr", "nqn", "hostnqn", "dhchap-secret"):
        verb.add_argument(f"--{name}", required=True)
    asyncio.run(connect(parser.parse_args()))


if __name__ == "__main__":
    main()
