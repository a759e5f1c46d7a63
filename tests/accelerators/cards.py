"""An emulated card, the authority that certified it, and the daemons that use it."""

import contextlib
import datetime as dt
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from control_plane import Daemon, Site, daemon
from patience import PATIENCE_SECONDS
from ports import choose_ports
from sealane.crypto.evidence.chain import key_sha256
from vendors.authority import Authority, p384, root

LABEL = "card0"
SECOND = "card1"
PROFILE = "bf3-dpdk"
NOW = dt.datetime.now(dt.UTC)


def program() -> str:
    """Return the path of the emulated card."""
    found = Path(sys.executable).with_name("sealane-dpu")
    assert found.exists(), "no sealane-dpu: make build puts it there"
    return str(found)


@dataclass
class Maker:
    """A maker of cards: an authority, and the cards that it certified."""

    directory: Path
    authority: Authority = field(default_factory=lambda: root("Card maker", p384()))

    def __post_init__(self) -> None:
        self.directory.mkdir()
        self.path = self.directory / "makers.pem"
        self.path.write_bytes(self.authority.pem)

    def card(self, serial: str, *, curve: ec.EllipticCurve | None = None) -> tuple[list[str], str]:
        """Certify a card; return its program's arguments and its hardware id."""
        key = ec.generate_private_key(curve or ec.SECP384R1())
        day = dt.timedelta(days=1)
        card = self.authority.issue(f"Card {serial}", key, start=NOW - day, end=NOW + day)
        paths = self.directory / f"{serial}.key", self.directory / f"{serial}.pem"
        paths[0].write_bytes(key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()))
        paths[1].write_bytes(card.pem)
        arguments = ["--key", str(paths[0]), "--certificates", str(paths[1])]
        return arguments, f"key-sha256:{key_sha256(card.certificate).hex()}"


@contextlib.contextmanager
def running_card(
    socket: Path, arguments: Sequence[str], *, has_ledger: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Run a card that listens, until the end of the block."""
    ledger = ["--ledger", f"{socket}.ledger"] if has_ledger else []
    with subprocess.Popen(
        [program(), "--socket", str(socket), *ledger, *arguments],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready: "), line
            yield process
        finally:
            process.kill()


def nonces_at(socket: Path) -> list[bytes]:
    """Return the nonces that cards at a socket have sealed with, without those of probes."""
    ledger = Path(f"{socket}.ledger")
    content = ledger.read_bytes() if ledger.exists() else b""
    nonces = [content[i : i + 12] for i in range(0, len(content), 12)]
    # Each probe has a key of its own.
    return [nonce for nonce in nonces if len({*nonce}) > 1]


@dataclass
class World:
    """Broker, target and gateway; the gateway's card is at `socket`, running or not."""

    site: Site
    maker: Maker
    identity: list[str]
    socket: Path
    target: Daemon
    gateway: Daemon
    config: Path
    """Of the gateway."""
    second: tuple[Path, list[str]] | None = None
    """Socket and arguments of its second card, `SECOND`."""

    def card(self, *arguments: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """Run the gateway's card."""
        return running_card(self.socket, [*self.identity, *arguments])

    @contextlib.contextmanager
    def card_in_use(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run the gateway's card, once the gateway uses it."""
        uses = sum(line["event"] == "accelerator_in_use" for line in self.gateway.log_lines())
        with self.card(*arguments) as process:
            self.wait_for_log("accelerator_in_use", count=uses + 1)
            yield process

    def nonces(self) -> list[bytes]:
        """Return the nonces that cards at the socket have sealed with, without those of probes."""
        return nonces_at(self.socket)

    def metrics(self) -> str:
        """Return what the gateway exports."""
        address = self.gateway.addresses["metrics"]
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            exported: str = answer.read().decode()
        return exported

    def statistic(self, name: str) -> int:
        """Return a figure of the gateway's volumes, summed."""
        lines = self.metrics().splitlines()
        start = f"sealane_gateway_volume_{name}_total{{"
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(start))

    def wait_for_log(self, event: str, *, count: int = 1, **values: object) -> None:
        """Wait until the gateway has logged `count` lines with these values."""
        wanted = {"event": event, **values}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            lines = self.gateway.log_lines()
            if sum(wanted.items() <= line.items() for line in lines) >= count:
                return
            time.sleep(0.05)
        raise AssertionError(f"{wanted} not logged:\n{self.gateway.log.read_text()}")


POLICY = """
[[reference]]
name = "cards"
evidence = "card"
product = "{product}"
roles = ["gateway"]
measurements = {{ firmware = "any" }}
tcb = {{}}
tcb_statuses = []
advisories = []
properties = {{}}
flags = {flags}
certified_keys = []
secondary = []
accepted_tier = "warning"
"""


def secondary(socket: Path, label: str = LABEL) -> str:
    """Return the part of an [enrolment] section that attests the card at a socket."""
    return f'[[enrolment.secondary]]\nlabel = "{label}"\ntype = "card"\nsocket = "{socket}"\n'


def write_policy(
    site: Site,
    *hardware_ids: str,
    knows: bool = True,
    flags: str = "{ protected_bus = false }",
    product: str = PROFILE,
) -> None:
    """Write a policy whose gateway has the card; with `knows`, it has values for cards."""
    path = site.write_policy({"s": ["target"], "g": ["gateway"]})
    text = path.read_text()
    if knows:
        text = text.replace(
            'roles = ["gateway"]\n', f'roles = ["gateway"]\ndevices = {json.dumps(hardware_ids)}\n'
        )
        text += POLICY.format(product=product, flags=flags)
    path.write_text(text)


@contextlib.contextmanager
def world(
    root: Path,
    *,
    knows: bool = True,
    flags: str = "{ protected_bus = false }",
    product: str = PROFILE,
    options: Sequence[str] = (),
    second: bool = False,
    knows_second: bool = True,
    listen: str = "127.0.0.1:0",
    target_options: str = "",
) -> Iterator[World]:
    """Run broker, target and gateway, attested with a card that then went away.

    The card is a `product` with these `options`. With `second`, there are two of them, which the
    policy lists, or not the second one. Hosts reach the gateway at `listen`. `target_options` are
    lines of the target's section.
    """
    with contextlib.ExitStack() as stack:
        site, maker = Site(root), Maker(root / "maker")
        identity, hardware_id = maker.card("1")
        identity += options
        socket = root / "card"
        hardware_ids, labels, devices = [hardware_id], [LABEL], secondary(socket)
        other = None
        if second:
            other = root / "second", maker.card("second")
            labels.append(SECOND)
            devices += secondary(other[0], SECOND)
            hardware_ids += [other[1][1]] * knows_second
        write_policy(site, *hardware_ids, knows=knows, flags=flags, product=product)
        broker = stack.enter_context(
            daemon(site.broker_config(more=f'card_roots = "{maker.path}"\n'))
        )
        target = stack.enter_context(
            daemon(
                site.write_config(
                    "s",
                    site.enrolment("s", broker)
                    + '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
                    + target_options,
                )
            )
        )
        config = site.write_config(
            "g",
            site.enrolment("g", broker)
            + devices
            + f'[gateway]\nlisten = "{listen}"\n'
            + f'accelerator = {json.dumps(labels if second else LABEL)}\ntarget_node = "s"\n'
            + f'target_address = "{target.addresses["target_control"]}"\n'
            + '[metrics]\nlisten = "127.0.0.1:0"\n',
        )
        choose_ports(config)
        with contextlib.ExitStack() as cards:
            # They must be there when the gateway attests.
            cards.enter_context(running_card(socket, identity))
            if other is not None:
                cards.enter_context(running_card(other[0], other[1][0]))
            gateway = stack.enter_context(daemon(config))
        at = None if other is None else (other[0], other[1][0])
        made = World(site, maker, identity, socket, target, gateway, config, at)
        for label in labels:
            made.wait_for_log("accelerator_not_in_use", label=label)
        yield made
