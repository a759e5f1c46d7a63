"""A cluster for storage: two brokers on etcd, a TPM's anchor, a card and a third party's drives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accelerators import cards
from compat.cluster import Cluster, Release
from control_plane import Site, short_directory
from etcd_server import etcd_cluster
from software_tpm import software_tpm

ORDER: Final = ("broker", "broker2", "s", "g")
"""The order of an upgrade: brokers, the target, the gateway."""

_DISKS: Final = "nqn.2026-11.example:disks"
_GATEWAY: Final = "nqn.2026-11.dev.sealane:gateway:g"


@dataclass
class StorageCluster(Cluster):
    """Its gateway seals with the card at `card`, and has third parties `array1` and `array2`."""

    card: Path = Path()


@contextlib.asynccontextmanager
async def storage_cluster(release: Release) -> AsyncIterator[StorageCluster]:
    """Start everything with one release; stop and remove it at the end."""
    with short_directory() as root, etcd_cluster() as etcd, contextlib.ExitStack() as stack:
        site, maker, card = Site(root), cards.Maker(root / "maker"), root / "card"
        identity, hardware_id = maker.card("1")
        stack.enter_context(cards.running_card(card, identity))
        tpms = [stack.enter_context(software_tpm(root / f"tpm{n}")) for n in range(2)]
        made = StorageCluster(site, stack, card=card)
        cards.write_policy(site, hardware_id)
        roots = f'card_roots = "{maker.path}"\n'
        site.broker_config(instance=1, etcd=etcd.endpoints, more=roots)
        await asyncio.to_thread(made.start, "broker", release)
        second = site.broker_config(
            "broker2", instance=2, etcd=etcd.endpoints, more=f'{roots}counters = "tpm2"\n'
        )
        _add_tpm(second, tpms[0].tcti)
        await asyncio.to_thread(made.start, "broker2", release)
        _add_tpm(_target_config(made), tpms[1].tcti)
        await asyncio.to_thread(made.start, "s", release)
        _gateway_config(made)
        await asyncio.to_thread(made.start, "g", release)
        yield made


def _add_tpm(config: Path, tcti: str) -> None:
    config.write_text(f'{config.read_text()}[tpm]\ntcti = "{tcti}"\n')


def _enrolment(made: StorageCluster, name: str) -> str:
    others = {"broker2": made.daemons["broker2"]}
    return made.site.enrolment(name, made.daemons["broker"], others=others)


def _target_config(made: StorageCluster) -> Path:
    """Write the configuration of the target, which also has two plain subsystems."""
    text = (
        '[target]\nlisten = "127.0.0.1:0"\ncontrol_listen = "127.0.0.1:0"\n'
        'store = "inline"\nanchor = "tpm2"\nanchor_seconds = 1\n'
    )
    for number in (1, 2):
        text += (
            f'[[target.subsystems]]\nnqn = "{_DISKS}{number}"\nhosts = [{{nqn = "{_GATEWAY}"}}]\n'
            '[[target.subsystems.namespaces]]\nnsid = 1\nstore = "file"\n'
            f'path = "{made.site.root / f"disk{number}"}"\nsize_bytes = 67_108_864\n'
        )
    return made.site.write_config("s", _enrolment(made, "s") + text)


def _gateway_config(made: StorageCluster) -> None:
    target = made.daemons["s"].addresses
    text = (
        f'[gateway]\nlisten = "127.0.0.1:0"\naccelerator = "{cards.LABEL}"\ntarget_node = "s"\n'
        f'target_address = "{target["target_control"]}"\n'
    )
    for number in (1, 2):
        text += (
            f'[[gateway.third_party]]\nname = "array{number}"\naddress = "{target["target"]}"\n'
            f'subsystem_nqn = "{_DISKS}{number}"\n'
        )
    made.site.write_config("g", _enrolment(made, "g") + cards.secondary(made.card) + text)
