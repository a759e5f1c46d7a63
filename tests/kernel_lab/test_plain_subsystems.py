"""A stock Linux host uses a target's plain subsystems: discovery, secrets, reload, access."""

import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from control_plane import Daemon, Site, daemon, short_directory, write_key
from kernel_lab.build import HOST_NQN
from kernel_lab.emulation import Guest
from kernel_lab.lab import Lab
from sealane.protocol.nvme.authentication import HostSecret

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]

NQN = "nqn.2026-11.dev.sealane:plain"


def namespace(nsid: int, ana_state: str = "optimized") -> str:
    return (
        f'[[target.subsystems.namespaces]]\nnsid = {nsid}\nstore = "memory"\n'
        f'size_bytes = {64 << 20}\nana_state = "{ana_state}"\n'
    )


@dataclass
class Target:
    """A target daemon whose plain subsystem the test changes."""

    site: Site
    broker: Daemon
    secrets: dict[str, HostSecret]
    running: Daemon | None = None

    @property
    def port(self) -> int:
        assert self.running is not None
        return int(self.running.addresses["target"].rpartition(":")[2])

    def configure(self, *namespaces: str) -> None:
        keys = "".join(
            f', {key} = "{self.site.root / name}"'
            for name, key in (
                ("host", "dhchap_key_file"),
                ("controller", "dhchap_controller_key_file"),
            )
        )
        self.site.write_config(
            "s",
            self.site.enrolment("s", self.broker)
            + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\nstore = "memory"\n'
            + f'[[target.subsystems]]\nnqn = "{NQN}"\nhosts = [{{nqn = "{HOST_NQN}"{keys}}}]\n'
            + "".join(namespaces),
        )

    def reload(self, *namespaces: str) -> None:
        """Apply another configuration; the host will notice soon."""
        assert self.running is not None
        self.configure(*namespaces)
        self.running.process.send_signal(signal.SIGHUP)


@pytest.fixture
def target() -> Iterator[Target]:
    with short_directory() as root:
        site = Site(root)
        site.write_policy({"s": ["target"]})
        known = {name: HostSecret(secrets.token_bytes(32)) for name in ("host", "controller")}
        for name, secret in known.items():
            write_key(root / name, str(secret).encode())
        with daemon(site.broker_config()) as broker:
            made = Target(site, broker, known)
            made.configure(namespace(1), namespace(2))
            with daemon(root / "s.toml") as made.running:
                yield made


def test_host_lives_on_plain_namespaces(lab: Lab, target: Target) -> None:
    host, controller = (str(target.secrets[name]) for name in ("host", "controller"))

    def add(_: Guest) -> None:
        target.reload(namespace(1), namespace(2), namespace(3))

    def move(_: Guest) -> None:
        target.reload(namespace(1, "non-optimized"), namespace(3))

    ran = lab.run(
        ("discover", target.port),
        ("kept_out", NQN, target.port),
        ("kept_out", NQN, target.port, "-S", controller),
        ("connect", NQN, target.port, "-k 5 -g -G -S", host, "-C", controller),
        "sees 1 2",
        "inspect_logs",
        "read_write",
        "write_zeroes",
        "deallocate",
        "compare",
        "verify_command",
        "out_of_range",
        "reserve",
        "filesystem",
        "call add",
        "sees 1 2 3",
        "call move",
        "sees 1 3",
        "access 1 non-optimized",
        "access 3 optimized",
        "reset",
        "sees 1 3",
        "disconnect",
        calls={"add": add, "move": move},
    )
    found = [(record["subtype"], record["subnqn"]) for record in ran.json("discovery")["records"]]
    assert found[1:] == [("nvme subsystem", NQN)]
    assert len(ran.json("ana-log")["ANA DESC LIST "]) == 2
    assert ran.json("reservation")["rtype"] == 1
    assert int(ran.json("smart-log")["host_read_commands"]) > 0  # a string, because it has 128 bits
