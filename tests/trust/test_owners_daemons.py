"""Several owners of the policy with real daemons: one is exchanged while a volume is attached."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from control_plane import Site, daemon, sealanectl, sealaned, short_directory
from ports import addresses_of_our_own
from sealane.client import connect
from trust.test_device_daemons import MIB, World, reloaded, world
from trust.test_revocation import HOST, Load

__all__ = ["world"]

pytestmark = pytest.mark.slow

MISCONFIGURED, NOT_VERIFIED = 2, 3
NODES = {"s": ["target"], "g": ["gateway"]}


def make_owner(site: Site, name: str) -> None:
    key = Ed25519PrivateKey.generate()
    private, public = site.root / f"{name}.key", site.root / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    private.chmod(0o600)
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def config_of(site: Site, listen: str, *owners: str, threshold: int) -> Path:
    config = site.broker_config(listen=listen)
    keys = json.dumps([str(site.root / f"{name}.pub") for name in owners])
    config.write_text(
        config.read_text().replace(
            "allow_unsigned_policy = true\n",
            f"policy_owners = {{ keys = {keys}, threshold = {threshold} }}\n",
        )
    )
    return config


def run(*arguments: object, code: int = 0) -> Any:
    ended = sealanectl("--output", "json", *arguments)
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout) if code == 0 else ended.stderr


def sign(site: Site, noun: str, file: Path, *owners: str) -> None:
    for name in owners:
        more = ["--add"] if noun == "policy" else []
        run(noun, "sign", file, "--key", site.root / f"{name}.key", *more)


def signed_policy(site: Site, *owners: str) -> Path:
    """Write the next policy and have it signed."""
    path = site.write_policy(NODES)
    path.with_name(f"{path.name}.sig").unlink(missing_ok=True)
    sign(site, "policy", path, *owners)
    return path


async def test_an_owner_is_exchanged_while_a_volume_is_attached(world: World) -> None:
    site = world.site
    for name in ("a", "b", "c", "d"):
        make_owner(site, name)
    [listen] = addresses_of_our_own(1)
    config = config_of(site, listen, "a", "b", "c", threshold=2)
    signed_policy(site, "a")
    assert "policy.signature" in sealaned("--config", config).stderr
    sign(site, "policy", site.root / "policy.toml", "b")
    async with contextlib.AsyncExitStack() as stack:
        world.broker = stack.enter_context(daemon(config))
        at_broker = ("--socket", world.broker.socket)
        target = stack.enter_context(daemon(world.target_config()))
        gateway = stack.enter_context(world.gateway(target))
        client = await stack.enter_async_context(connect(gateway.socket))
        volume = await client.volumes.create(size_bytes=MIB)
        volume = await client.volumes.attach(volume.name, host_nqn=HOST)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        load = Load()
        running = tasks.create_task(load.run(volume))
        await load.goes_on()

        # c leaves, d comes; two of the present owners and two of the next ones sign that.
        document = site.root / "owners.toml"
        keys = [option for name in "abd" for option in ("--key", site.root / f"{name}.pub")]
        run("owners", "make", document, *keys, "--threshold", "2", "--version", "1")
        sign(site, "owners", document, "a")
        error = run(*at_broker, "owners", "apply", document, code=NOT_VERIFIED)
        assert "needed: 2, missing: 1 [policy.signature]" in error
        missing = {
            row["owners"]: row["missing"] for row in run(*at_broker, "owners", "signers", document)
        }
        assert missing == {0: 1, 1: 1}
        sign(site, "owners", document, "b")
        shown = run(*at_broker, "owners", "apply", document)
        assert sorted(row["name"] for row in shown) == ["a", "b", "d"]

        refused = signed_policy(site, "b", "c")
        error = run(*at_broker, "policy", "apply", refused, code=NOT_VERIFIED)
        assert error.endswith("[policy.signature]\n")
        signers = run(*at_broker, "policy", "signers", refused)
        assert {row["name"]: row["signed"] for row in signers} == {"a": "no", "b": "yes", "d": "no"}
        sign(site, "policy", refused, "d")
        applied = run(*at_broker, "policy", "apply", refused)
        assert applied["version"] == site.policy_version
        in_force = run(*at_broker, "policy", "show")
        assert (in_force["signed_by"], in_force["owners_version"]) == (["b", "d"], 1)
        await load.goes_on()

        # It starts with the first configuration as well as with the next, but with no other.
        for owners in ("abc", "abd"):
            assert world.broker.stop() == 0
            config = config_of(site, listen, *owners, threshold=2)
            world.broker = stack.enter_context(daemon(config))
            assert len(run(*at_broker, "owners", "show")) == 3
        await load.goes_on()
        assert world.broker.stop() == 0
        other = sealaned("--config", config_of(site, listen, "c", threshold=1))
        assert other.returncode == NOT_VERIFIED
        assert other.stderr.endswith("[policy.owners.configuration]\n"), other.stderr
        world.broker = stack.enter_context(
            daemon(config_of(site, listen, "a", "b", "d", threshold=2))
        )

        # All keys are lost: the configuration names another owner, and the operator says so.
        make_owner(site, "e")
        config_of(site, listen, "e", threshold=1)
        await reloaded(world.broker)
        assert any(line["event"] == "policy_owners_differ" for line in world.broker.log_lines())
        policy = signed_policy(site, "e")
        run(*at_broker, "policy", "apply", policy, code=NOT_VERIFIED)
        assert "confirmation.missing" in run(*at_broker, "owners", "reset", code=MISCONFIGURED)
        [row] = run(*at_broker, "owners", "reset", "--yes")
        assert (row["name"], row["version"]) == ("e", 2)
        assert run(*at_broker, "policy", "apply", policy)["version"] == site.policy_version
        await load.goes_on()
        assert load.failure is None
        running.cancel()

        log = site.root / "export"
        run(*at_broker, "audit", "export", log)
        records = [json.loads(line) for line in log.read_text().splitlines()]
        changes = [
            (record["kind"], record["outcome"])
            for record in records
            if str(record.get("kind")).startswith("policy.owners")
        ]
        assert changes == [
            ("policy.owners.replace", "refused"),
            ("policy.owners.replace", "done"),
            ("policy.owners.reset", "done"),
        ]


def test_a_policy_of_one_owner_is_signed_as_before() -> None:
    with short_directory() as root:
        site = Site(root)
        make_owner(site, "a")
        make_owner(site, "b")
        policy = site.write_policy(NODES)
        signature = policy.with_name("policy.toml.sig")
        for _ in range(2):
            run("policy", "sign", policy, "--key", root / "a.key")
            # As earlier releases read it.
            assert len(signature.read_bytes()) == 64
        config = config_of(site, "127.0.0.1:0", "a", threshold=1)
        text = config.read_text()
        start = text.index("policy_owners")
        rest = text[text.index("\n", start) :]
        config.write_text(text[:start] + f'policy_owner_key = "{root / "a.pub"}"' + rest)
        with daemon(config) as broker:
            [row] = run("--socket", broker.socket, "owners", "show")
            assert (row["name"], row["threshold"], row["version"]) == ("a", 1, 0)
        check = ("policy", "check", policy, "--owner-key", root / "a.pub")
        run(*check)
        both = (*check, "--owner-key", root / "b.pub", "--threshold", "2")
        assert "missing: 1" in run(*both, code=NOT_VERIFIED)
        sign(site, "policy", policy, "b")
        assert run(*both)["signature"] == "valid"
