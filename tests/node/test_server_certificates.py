"""A server survives hundreds of concurrent handshakes, even while its certificate changes."""

import asyncio
import datetime as dt
import subprocess
import sys
import textwrap

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sealane.crypto.certificates import CertificateAuthority, Subject
from sealane.daemon.node.server_certificates import CertificateFeed

HANDSHAKES = 300
# In a separate process, because the tested fault crashes the process.
SERVER = """
    import asyncio, sys, time
    import grpc
    from sealane.daemon.node.server_certificates import CertificateFeed

    key, chain, anchor = [part.encode() for part in sys.stdin.read().split("|")]
    made = [time.monotonic(), None]

    def current():
        if made[1] is None or time.monotonic() - made[0] > 0.05:
            made[:] = time.monotonic(), grpc.ssl_server_certificate_configuration(
                [(key, chain)], root_certificates=anchor
            )
        return made[1]

    async def serve():
        server = grpc.aio.server()
        port = server.add_secure_port(
            "127.0.0.1:0", CertificateFeed(current).credentials(mutual=True)
        )
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(serve())
"""


def issued(authority: CertificateAuthority, role: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = Subject(
        node="n", role=role, tenant="", incarnation=bytes(16), kem_public_key=bytes(32)
    )
    leaf = authority.issue(subject, key.public_key(), now=dt.datetime.now(dt.UTC))
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return encoded, leaf.public_bytes(serialization.Encoding.PEM)


@pytest.mark.slow
async def test_hundreds_of_handshakes_while_the_certificate_changes() -> None:
    authority = CertificateAuthority.create(broker="b", now=dt.datetime.now(dt.UTC))
    handed = b"|".join((*issued(authority, "broker"), authority.anchor_pem))
    key, chain = issued(authority, "gateway")
    credentials = grpc.ssl_channel_credentials(authority.anchor_pem, key, chain)
    server = subprocess.Popen(  # noqa: ASYNC220 - at the start, before anything else runs
        [sys.executable, "-c", textwrap.dedent(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(handed)
        server.stdin.close()
        port = int(await asyncio.to_thread(server.stdout.readline))
        options = [
            ("grpc.ssl_target_name_override", "n.broker.sealane.internal"),
            ("grpc.use_local_subchannel_pool", 1),
        ]

        async def shake_hands() -> None:
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{port}", credentials, options=options
            ) as channel:
                await channel.channel_ready()

        async with asyncio.timeout(60):
            for _ in range(2):
                await asyncio.gather(*(shake_hands() for _ in range(HANDSHAKES)))
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def test_a_server_is_given_a_configuration_once() -> None:
    first, second = object(), object()
    now = [first]
    feed = CertificateFeed(lambda: now[0])  # type: ignore[arg-type,return-value]
    assert feed._changed() is None
    now[0] = second
    assert feed._changed() is second
    assert feed._changed() is None
