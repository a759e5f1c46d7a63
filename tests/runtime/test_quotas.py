"""Messages that never end: what they can take of a daemon, and for how long."""

import asyncio

import grpc
import pytest
from google.protobuf import empty_pb2

from control_plane import Site, daemon, short_directory
from half_sent import HalfSender, attack
from patience import PATIENCE_SECONDS
from sealane.daemon.runtime.servers import CERTIFIED, STRANGERS, Quota, server_options
from sealane.protocol.v1 import policy_pb2, policy_pb2_grpc

CHALLENGE = "/sealane.v1.Attestation/GetChallenge"
POLICY = "/sealane.v1.Policies/GetPolicy"
OVERHEAD_BYTES = 160 << 20
"""Of connections, TLS and the allocator; without quotas the attack below takes 2 GB more."""
SMALL = Quota(
    connections=3,
    streams=2,
    message_bytes=256 << 10,
    # A connection must not end while this test still opens others.
    age_seconds=3,
    grace_seconds=0.5,
    idle_seconds=60,
)


@pytest.mark.slow
def test_half_sent_messages_of_strangers_take_bounded_memory() -> None:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({"g": ["gateway"]})
        with daemon(site.broker_config()) as broker:
            outcome = attack(
                broker.process.pid,
                broker.addresses["attestation"],
                CHALLENGE,
                connections=STRANGERS.connections + 20,
                streams=20,
                message_bytes=STRANGERS.message_bytes,
                seconds=60,
            )
            print(outcome)
            assert 0 < outcome.connections <= STRANGERS.connections
            assert outcome.sent_bytes <= STRANGERS.half_sent_bytes_max + OVERHEAD_BYTES
            taken = outcome.peak_bytes - outcome.before_bytes
            assert taken <= STRANGERS.half_sent_bytes_max + OVERHEAD_BYTES


class _Policies(policy_pb2_grpc.PoliciesServicer):
    async def GetPolicy(  # noqa: N802 - as generated
        self,
        request: empty_pb2.Empty,  # noqa: ARG002
        context: object,  # noqa: ARG002
    ) -> policy_pb2.PolicyInForce:
        return policy_pb2.PolicyInForce(version=1)


async def test_half_sent_message_ends_with_its_connection() -> None:
    server = grpc.aio.server(options=server_options(SMALL))
    policy_pb2_grpc.add_PoliciesServicer_to_server(_Policies(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()

    def hold() -> tuple[int, int]:
        senders = [HalfSender(address, POLICY, 100 << 10, tls=False) for _ in range(5)]
        living = [sender for sender in senders if sender.accepted]
        for sender in living:
            sender.open(1)
        sent = 0
        while not all(sender.ended for sender in living):
            for sender in living:
                sender.receive()
                sent += sender.feed()
        for sender in senders:
            sender.close()
        return len(living), sent

    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            held, sent = await asyncio.to_thread(hold)
            assert (held, sent > 0) == (SMALL.connections, True)
            # There is room for who comes after.
            async with grpc.aio.insecure_channel(address) as channel:
                answer = await policy_pb2_grpc.PoliciesStub(channel).GetPolicy(
                    empty_pb2.Empty(), wait_for_ready=True
                )
            assert answer.version == 1
    finally:
        await server.stop(None)


@pytest.mark.parametrize("quota", [STRANGERS, CERTIFIED])
def test_every_bound_of_a_quota_is_an_option_of_the_server(quota: Quota) -> None:
    options = dict(server_options(quota))
    assert options["grpc.max_concurrent_streams"] == quota.streams
    assert options["grpc.max_allowed_incoming_connections"] == quota.connections
    assert options["grpc.max_receive_message_length"] == quota.message_bytes
    assert options["grpc.max_connection_age_ms"] == 1000 * quota.age_seconds
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
