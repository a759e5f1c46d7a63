"""Composition root: starts the roles of one daemon in order, drains them in reverse.

Order: metrics, broker, target, gateway, fabric, Unix socket. A role depends only on earlier ones.
A role is imported where it starts: half of a start's processor time is imports.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from sealane.daemon.config import Config
from sealane.daemon.node.drain import NodeDrain
from sealane.daemon.node.enrolled import EnrolledRoles
from sealane.daemon.node.role_context import RoleContext
from sealane.daemon.node.servicer import NodesServicer
from sealane.daemon.runtime.access import Access, RefusedCallers
from sealane.daemon.runtime.clock import monotonic_ns, utc_now
from sealane.daemon.runtime.directories import (
    Reloaded,
    RunDirectory,
    SharedDirectory,
    claimed_state,
)
from sealane.daemon.runtime.health import Health
from sealane.daemon.runtime.listeners import Listeners
from sealane.daemon.runtime.local_servers import LocalServers, Shared
from sealane.daemon.runtime.logs import get_logger
from sealane.daemon.runtime.metrics import Metrics, MetricsServer
from sealane.daemon.runtime.notify import Notifier
from sealane.daemon.runtime.space import SPACE_SERVICES, SpaceWatch
from sealane.daemon.runtime.traces import PASSED_ON, SentTraces
from sealane.errors import Error, UsageError
from sealane.protocol.v1 import nodes_pb2_grpc


async def serve(
    config: Config,
    *,
    passed: Sequence[tuple[str, int]] = (),
    hangup: asyncio.Event | None = None,
    reread: Callable[[], Config] | None = None,
) -> None:
    """Run the daemon until cancelled; a failed start raises an exception group of sealane errors.

    `passed` are names and numbers of the descriptors that the service manager passed. Each time
    `hangup` is set, settings that can change at run time are taken from `reread`.
    """
    notifier = Notifier()
    listeners = Listeners(notifier)
    run_directory = RunDirectory(Path(config.node.run_dir))
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as stack:
        daemon = Daemon(config, tasks, stack, run_directory, listeners)
        stack.enter_context(run_directory.claimed())
        stack.enter_context(claimed_state(Path(config.node.state_dir)))
        listeners.adopt(passed, config.kept_listeners)
        await daemon.start()
        daemon.spawn("watchdog", notifier.keep_watchdog())
        write_ready = partial(
            run_directory.write_ready, node=config.node.name, addresses=daemon.addresses
        )
        write_ready()
        if hangup is not None and reread is not None:
            daemon.spawn(
                "reload",
                daemon.keep_reloaded(hangup, reread, lambda reload: write_ready(reload=reload)),
            )
        notifier.ready(f"serving as {', '.join(config.roles)}")
        get_logger().info("ready", roles=config.roles, addresses=daemon.addresses)
        try:
            await asyncio.Event().wait()
        finally:
            notifier.stopping(drain_seconds=daemon.drain_seconds)
            run_directory.ready_file.unlink(missing_ok=True)
            get_logger().info("stopping")
            await daemon.stop_serving()
            await daemon.drain()


class Daemon:
    """The parts of one daemon: `stack` owns what must be closed, `tasks` its running tasks."""

    def __init__(
        self,
        config: Config,
        tasks: asyncio.TaskGroup,
        stack: contextlib.AsyncExitStack,
        run_directory: RunDirectory,
        listeners: Listeners,
    ) -> None:
        metrics = Metrics(is_broker=config.broker is not None)
        traces = PASSED_ON
        if config.traces is not None:
            lost = metrics.spans_lost
            traces = SentTraces(config.traces, node=config.node.name, lost=lost)
            stack.push_async_callback(traces.close)
        self._tasks = tasks
        self._stack = stack
        self._started = utc_now()
        addresses: dict[str, str] = {}
        self._health = Health()
        self._space = SpaceWatch(
            config.places,
            warning_percent=config.node.space_warning_percent,
            report=partial(self._health.report, SPACE_SERVICES),
        )
        self._context = RoleContext(
            config=config,
            run_directory=run_directory,
            metrics=metrics,
            traces=traces,
            listeners=listeners,
            enrolled=EnrolledRoles(
                config, metrics=metrics, spawn=self.spawn, stack=stack, addresses=addresses
            ),
            addresses=addresses,
            local_servers=LocalServers(metrics, traces, shared=_shared(config, metrics)),
            spawn=self.spawn,
            report=self._health.report,
            stack=stack,
            spaces=self._space.last,
        )

    @property
    def addresses(self) -> dict[str, str]:
        """The daemon's listening addresses, by purpose."""
        return self._context.addresses

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the daemon stops."""
        task = self._tasks.create_task(work, name=name)
        self._stack.callback(task.cancel)

    @property
    def drain_seconds(self) -> float:
        """Seconds that a stop may wait for messages in flight and for targets."""
        config = self._context.config
        messages = 0 if config.fabric is None else config.fabric.drain_timeout_seconds
        if config.gateway is None:
            return messages
        from sealane.daemon.gateway.last_flush import FLUSH_SECONDS, LEAVE_SECONDS  # noqa: PLC0415

        return messages + LEAVE_SECONDS + 4 * FLUSH_SECONDS

    async def drain(self) -> None:
        """Let work in flight finish, while everything else still answers."""
        for drain in self._context.drains:
            await drain()

    async def stop_serving(self) -> None:
        """Report NOT_SERVING from now on, for the daemon and each of its services."""
        await self._health.stop()

    async def start(self) -> None:
        """Start every role of the configuration."""
        context, config = self._context, self._context.config
        # Before the first file of a role, which may need the reserve.
        await asyncio.to_thread(self._space.look)
        self.spawn("space", self._space.keep())
        context.metrics.add_statistics("space", ("place",), self._space.statistics)
        if config.metrics is not None:
            server = MetricsServer(
                context.metrics,
                config.metrics.listen,
                open_listener=context.listeners.named("metrics.listen"),
            )
            self._stack.callback(server.close)
            context.addresses["metrics"] = server.address
        if config.broker is not None:
            from sealane.daemon.broker.role import start_broker  # noqa: PLC0415

            await start_broker(config.broker, context)
        if config.target is not None:
            from sealane.daemon.target.role import start_target  # noqa: PLC0415

            await start_target(config.target, context)
        if config.gateway is not None:
            from sealane.daemon.gateway.role import start_gateway  # noqa: PLC0415

            await start_gateway(config.gateway, context)
        if config.fabric is not None:
            from sealane.daemon.fabric.role import start_fabric  # noqa: PLC0415

            await start_fabric(config.fabric, context)
        # Roles have made their directories: a new target says at once how much room it has.
        await asyncio.to_thread(self._space.look)
        await self._start_local()

    async def keep_reloaded(
        self,
        hangup: asyncio.Event,
        reread: Callable[[], Config],
        ended: Callable[[Reloaded], None],
    ) -> None:
        """Reread the configuration each time `hangup` is set, and apply what roles can change.

        A faulty file changes nothing. If a role can't apply its part, as when a store can't be
        opened, what was applied before stays in force: `[access]`, then role by role. Both are
        logged. Each reload calls `ended` with its outcome.
        """
        while True:
            await hangup.wait()
            hangup.clear()
            began = monotonic_ns()
            try:
                config = await asyncio.to_thread(reread)
                for apply in self._context.reloads:
                    await apply(config)
            except Error as error:
                get_logger().error("reload_failed", reason=error.reason, message=error.args[0])
                ended(
                    Reloaded(
                        began_ns=began,
                        reason=error.reason,
                        message=str(error.args[0]),
                        exit_code=error.exit_code,
                    )
                )
                continue
            get_logger().info("reloaded")
            ended(Reloaded(began_ns=began))

    async def _reload_access(self, config: Config) -> None:
        shared = self._context.local_servers.shared
        before = self._context.config
        is_same_place = config.shared_run_dir[0] == before.shared_run_dir[0]
        if config.is_shared != (shared is not None) or (shared and not is_same_place):
            raise UsageError(
                "reload.access",
                "the sockets for other users were added, removed or moved: restart the daemon",
            )
        _log_unknown(config)
        self._context.local_servers.replace_members(config.members)

    async def _start_local(self) -> None:
        context, config = self._context, self._context.config
        drain = NodeDrain(
            context.drained,
            report=context.report,
            draining=context.metrics.node_draining,
            drained=context.metrics.node_drained,
        )
        context.stack.push_async_callback(drain.close)
        nodes_pb2_grpc.add_NodesServicer_to_server(
            NodesServicer(
                node=config.node.name,
                roles=config.roles,
                identities=context.enrolled.identities,
                addresses=context.addresses,
                evidence=config.enrolment.evidence if config.enrolment else "",
                is_development=context.enrolled.is_development,
                started=self._started,
                drain=drain,
                spaces=self._space.last,
                targets=lambda: [view for views in context.targets for view in views()],
                seen_by=context.local_servers.origins.seen_by,
            ),
            context.local,
        )
        context.services.append("sealane.v1.Nodes")
        await self._health.serve(context.local, context.services)
        for server in context.local_servers.all:
            reflection.enable_server_reflection(
                [*context.services, health.SERVICE_NAME, reflection.SERVICE_NAME], server
            )
        context.addresses["socket"] = str(context.run_directory.socket)
        if context.local_servers.shared is not None:
            context.addresses["jobs_socket"] = str(context.local_servers.shared.directory.socket)
        # A right that is withdrawn must not stay because a store can't be opened.
        context.reloads.insert(0, self._reload_access)
        await self._stack.enter_async_context(context.local_servers.serving(context.run_directory))
        for log in context.event_logs:
            self._stack.callback(log.close)


def _log_unknown(config: Config) -> None:
    for entry in [] if config.access is None else config.access.unknown:
        get_logger().warning("access_name_unknown", entry=entry)


def _shared(config: Config, metrics: Metrics) -> Shared | None:
    """Return what serves other users; None if the configuration lists none."""
    if not config.is_shared:
        return None
    _log_unknown(config)
    run_dir, key = config.shared_run_dir
    directory = SharedDirectory(Path(run_dir), key=key)
    directory.prepare()
    return Shared(
        access=Access(config.members), directory=directory, refused=RefusedCallers(metrics)
    )
