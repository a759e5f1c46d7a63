"""The plain subsystems of a target, which follow its configuration, also at a reload.

`apply` changes nothing until every file was read and every store opened.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sealane.daemon.nvme.exported import Exported, Provider
from sealane.daemon.nvme.host_secrets import read_dhchap
from sealane.daemon.nvme.listener import Listener
from sealane.daemon.nvme.subsystem_config import HostConfig, NamespaceConfig, SubsystemConfig
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.target.plain_subsystem import OpenNamespace, PlainSubsystem, Secrets
from sealane.daemon.target.store_flush import failures
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.nvme.authentication import HostSecret


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Changes from the present subsystems to the configured ones, by NQN."""

    removed: tuple[str, ...]
    opened: Mapping[str, tuple[NamespaceConfig, ...]]
    """Namespaces to open, for each configured subsystem."""


def plan(present: Mapping[str, SubsystemConfig], wanted: Sequence[SubsystemConfig]) -> Plan:
    """Return the changes to make.

    UsageError `subsystem.namespace.state` if an open store would have to change its size or kind.
    """
    opened: dict[str, tuple[NamespaceConfig, ...]] = {}
    for config in wanted:
        before = present.get(config.nqn)
        known = {each.nsid: each for each in before.namespaces} if before else {}
        fresh = []
        for namespace in config.namespaces:
            old = known.get(namespace.nsid)
            if old is None:
                fresh.append(namespace)
            elif old.store_options != namespace.store_options:
                raise UsageError(
                    "subsystem.namespace.state",
                    f"{config.nqn}: namespace {namespace.nsid} is open with another store or size; "
                    "remove it, reload, then add it again",
                )
        opened[config.nqn] = tuple(fresh)
    names = {config.nqn for config in wanted}
    return Plan(removed=tuple(nqn for nqn in present if nqn not in names), opened=opened)


@dataclass(slots=True, kw_only=True)
class _Prepared:
    """The files read and stores opened before `apply` changes anything."""

    secrets: dict[str, Secrets] = field(default_factory=dict)
    opened: dict[str, list[OpenNamespace]] = field(default_factory=dict)


class PlainSubsystems(Provider):
    """Provider of the plain subsystems behind a listener.

    `discovery` are listeners that only serve discovery of them.
    """

    def __init__(self, listener: Listener, *, discovery: Sequence[Listener] = ()) -> None:
        self._listener = listener
        self._listeners = (listener, *discovery)
        self._subsystems: dict[str, PlainSubsystem] = {}
        self._turn = asyncio.Lock()
        self._is_draining = False
        for each in self._listeners:
            each.add_provider(self)

    def find(self, subsystem_nqn: str) -> Exported | None:
        """Return a subsystem by name, for the listener."""
        return self._subsystems.get(subsystem_nqn)

    def exported(self) -> Iterable[Exported]:
        """Return every subsystem, for discovery."""
        return self.subsystems

    @property
    def subsystems(self) -> Sequence[PlainSubsystem]:
        """Every subsystem, in the order of the configuration."""
        return list(self._subsystems.values())

    async def apply(self, wanted: Sequence[SubsystemConfig]) -> None:
        """Add, remove and change subsystems to match `wanted`, and notify hosts.

        UsageError or UnavailableError, in which case nothing was changed.
        """
        async with self._turn:
            present = {nqn: each.config for nqn, each in self._subsystems.items()}
            todo = plan(present, wanted)
            prepared = await _prepare(todo, wanted)
            for nqn in todo.removed:
                await self._remove(nqn)
            for config in wanted:
                await self._set(config, prepared)
            order = [config.nqn for config in wanted]
            self._subsystems = {nqn: self._subsystems[nqn] for nqn in order}
            for each in self._listeners:
                each.changed()
        get_logger().info("subsystems", names=order)

    def set_draining(self, *, is_draining: bool) -> None:
        """Show every namespace, also later ones, as inaccessible, or as configured again."""
        self._is_draining = is_draining
        for subsystem in self.subsystems:
            subsystem.set_draining(is_draining=is_draining)
        for each in self._listeners:
            each.changed()

    def busy(self, settle_seconds: float) -> list[tuple[str, str]]:
        """Return subsystems and hosts that did I/O within this time, by NQN."""
        return [
            (subsystem.config.nqn, host_nqn)
            for subsystem in self.subsystems
            for host_nqn in subsystem.busy(settle_seconds)
        ]

    async def flush(self) -> dict[str, OSError]:
        """Make all stores durable; return the errors of those that fail, by namespace."""
        return await failures(
            {
                f"{subsystem.config.nqn}/{nsid}": namespace.native.sync
                for subsystem in self.subsystems
                for nsid, namespace in subsystem.namespaces.items()
            }
        )

    async def close(self) -> None:
        """Close every subsystem and its stores."""
        async with self._turn:
            for nqn in list(self._subsystems):
                await self._remove(nqn)

    def statistics(self) -> dict[str, dict[str, int]]:
        """Return the engine's counters by subsystem and namespace id."""
        return {
            f"{subsystem.config.nqn}/{nsid}": each.native.statistics()
            for subsystem in self.subsystems
            for nsid, each in subsystem.namespaces.items()
        }

    async def _set(self, config: SubsystemConfig, prepared: _Prepared) -> None:
        secrets, opened = prepared.secrets[config.nqn], prepared.opened[config.nqn]
        known = self._subsystems.get(config.nqn)
        if known is not None:
            await known.reconfigure(config, secrets=secrets, opened=opened)
            return
        self._subsystems[config.nqn] = PlainSubsystem(
            config,
            secrets=secrets,
            namespaces=opened,
            on_closed=self._listener.queue_closed,
            wake=self._listener.wake,
        )
        self._subsystems[config.nqn].set_draining(is_draining=self._is_draining)

    async def _remove(self, nqn: str) -> None:
        subsystem = self._subsystems.pop(nqn)
        await self._listener.end_export(subsystem)
        await subsystem.close()


async def _prepare(todo: Plan, wanted: Sequence[SubsystemConfig]) -> _Prepared:
    prepared = _Prepared()
    try:
        for config in wanted:
            prepared.secrets[config.nqn] = read_host_secrets(config)
            opened = prepared.opened.setdefault(config.nqn, [])
            for namespace in todo.opened[config.nqn]:
                opened.append(await _open(config, namespace))
    except BaseException:
        for each in (each for opened in prepared.opened.values() for each in opened):
            each.native.close()
        raise
    return prepared


async def _open(config: SubsystemConfig, namespace: NamespaceConfig) -> OpenNamespace:
    place = f"{config.nqn}: namespace {namespace.nsid}"
    try:
        return await asyncio.to_thread(OpenNamespace.open, namespace)
    except ValueError as error:
        raise UsageError("subsystem.store", f"{place}: {error}") from error
    except OSError as error:
        raise UnavailableError("subsystem.store", f"{place}: {error}") from error


def read_host_secrets(config: SubsystemConfig) -> Secrets:
    """Read the key files of a subsystem's hosts; errors of `read_dhchap`."""
    return {
        host.nqn: _secrets(host, config.nqn)
        for host in config.hosts
        if host.dhchap_key_file is not None
    }


def _secrets(host: HostConfig, nqn: str) -> tuple[HostSecret, HostSecret | None]:
    key = f"target.subsystems {nqn} {host.nqn}"
    own = read_dhchap(host.dhchap_key_file, f"{key} dhchap_key_file")
    if own is None:
        raise UsageError("secret.missing", f"{key}: no dhchap_key_file")
    return own, read_dhchap(host.dhchap_controller_key_file, f"{key} dhchap_controller_key_file")
