"""A policy change while nodes are in use, with real daemons."""

import asyncio
import contextlib
import json
import urllib.request

import pytest

from control_plane import Daemon, Site, daemon, sealanectl, short_directory
from sealane.client import connect
from sealane.daemon.broker.policy_keeper import REAPPRAISAL_SECONDS

pytestmark = pytest.mark.slow

HOST = "nqn.2014-08.org.nvmexpress:uuid:66666666-2222-4333-8444-555555555555"


def _policy_version(node: Daemon) -> int:
    shown = sealanectl("--socket", node.socket, "--output", "json", "attest", "show", "self")
    return int(json.loads(shown.stdout)[0]["policy version"])


def _metrics(node: Daemon) -> str:
    with urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics") as answer:
        return str(answer.read().decode())


async def test_a_policy_change_fences_no_gateway_that_attests_again() -> None:
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        nodes = {"s": ["target"], "g": ["gateway"]}
        site.write_policy(nodes)
        broker = stack.enter_context(daemon(site.broker_config()))
        listen = 'listen = "127.0.0.1:0"\n'
        target = stack.enter_context(
            daemon(
                site.write_config(
                    "s",
                    site.enrolment("s", broker)
                    + f'[target]\n{listen}control_{listen}store = "memory"\n'
                    + f"authorization_seconds = 15\n[metrics]\n{listen}",
                )
            )
        )
        gateway = stack.enter_context(
            daemon(
                site.write_config(
                    "g",
                    site.enrolment("g", broker)
                    + f'[gateway]\n{listen}target_node = "s"\n'
                    + f'target_address = "{target.addresses["target_control"]}"\n',
                )
            )
        )
        async with connect(gateway.socket) as client:
            volume = await client.volumes.create(size_bytes=1 << 20)
            attached = await client.volumes.attach(volume.name, host_nqn=HOST)
            async with client.open(attached) as disk:
                await disk.write(0, b"x" * 4096)
                # From here on, only the daemons make calls.
                policy = site.write_policy(nodes)
                applied = sealanectl("--socket", broker.socket, "policy", "apply", policy)
                assert applied.returncode == 0, applied.stderr
                async with asyncio.timeout(REAPPRAISAL_SECONDS - 5):
                    for node in (target, gateway):
                        # Poll: the process publishes its state only on request.
                        while await asyncio.to_thread(_policy_version, node) != 2:
                            pass
                await disk.write(0, b"y" * 4096)
        assert 'reason="attestation.policy.changed"' not in _metrics(target)
