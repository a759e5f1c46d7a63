"""`sealaned`: command line and process of the daemon."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sealane import __version__
from sealane.daemon.check import check_names, check_start, load_checked
from sealane.daemon.compose import serve
from sealane.daemon.config import Config, check_writers, load_config
from sealane.daemon.reload import reload
from sealane.daemon.runtime.arguments import OneLineParser, system_refused
from sealane.daemon.runtime.directories import as_daemon
from sealane.daemon.runtime.listeners import take_passed
from sealane.daemon.runtime.logs import get_logger, priority, set_up_logs
from sealane.daemon.runtime.process import forbid_inspection, lock_memory
from sealane.daemon.set_up import set_up
from sealane.errors import Error, UnavailableError


def main(arguments: list[str] | None = None) -> int:
    """Run `sealaned`; return 0 ok, 1 failed, 2 usage, 3 not verified, 4 unavailable."""
    options = command_line().parse_args(arguments)
    try:
        config = load_config(options.config)
        if _is_done(options, config):
            return 0
        check_start(config)
        return run(config, options.config)
    except* (Error, OSError) as group:
        error = first_error(group)
    if isinstance(error, OSError):
        return system_refused("sealaned", error)
    try:
        print(f"{priority('error')}sealaned: {error}", file=sys.stderr, flush=True)
    except OSError:
        # The exit code tells systemd what to do; the interpreter's end mustn't change it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return error.exit_code


def _is_done(options: argparse.Namespace, config: Config) -> bool:
    """Do what was asked instead of a start; return False if it is a start."""
    if options.print_config:
        print(config.to_json())
    elif options.reload:
        with as_daemon(Path(config.node.state_dir)):
            reload(config)
    elif options.set_up:
        check_writers(options.config, wherefore="with --set-up")
        for line in set_up(config):
            print(line)
    elif options.check:
        with as_daemon(Path(config.node.state_dir)):
            checked = load_checked(options.config)
            check_names(checked)
            for line in _unreachable(checked):
                print(f"sealaned: warning: {line}", file=sys.stderr)
    else:
        return False
    return True


def _unreachable(config: Config) -> Iterator[str]:
    if config.gateway is not None:
        from sealane.daemon.gateway.check import unreachable  # noqa: PLC0415

        yield from unreachable(config.gateway, own_node=config.node.name)


def run(config: Config, path: Path) -> int:
    """Serve until SIGTERM or SIGINT; SIGHUP rereads `path`. Return 0 after a clean stop."""
    os.umask(0o077)
    forbid_inspection()
    set_up_logs(config.node.log_level, node=config.node.name)
    passed = take_passed()
    _lock_memory(config)
    try:
        asyncio.run(_serve_until_signal(config, path, passed))
    except asyncio.CancelledError:
        get_logger().info("stopped")
    return 0


def _lock_memory(config: Config) -> None:
    """Lock memory as `node.lock_memory` says, before it holds any key."""
    if config.node.lock_memory == "off":
        return
    try:
        lock_memory()
    except UnavailableError as error:
        if config.node.lock_memory == "require":
            raise
        get_logger().warning("memory_swappable", reason=error.reason, message=str(error))


async def _serve_until_signal(
    config: Config, path: Path, passed: Sequence[tuple[str, int]]
) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    stopping = False

    def stop() -> None:
        nonlocal stopping
        # A second signal must not interrupt the drain that the first one began.
        if task is not None and not stopping:
            stopping = True
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    await serve(config, passed=passed, hangup=hangup, reread=lambda: load_checked(path))


def first_error(group: BaseExceptionGroup[Error | OSError]) -> Error | OSError:
    """Return the first error of a (nested) group."""
    first = group.exceptions[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


def command_line() -> OneLineParser:
    """Return the parser of the program's arguments."""
    parser = OneLineParser(
        prog="sealaned", description="Sealane's daemon: attested volumes and sessions."
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("/etc/sealane/sealaned.toml"),
        metavar="FILE",
        help="configuration (default: %(default)s)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check",
        action="store_true",
        help="check the configuration, and the files and directories that it names, warn about "
        "targets that don't answer, and exit",
    )
    what.add_argument(
        "--reload",
        action="store_true",
        help="make the running daemon reread its files, wait, and report the outcome",
    )
    what.add_argument(
        "--set-up",
        action="store_true",
        help="make the keys and the policy that the configuration names and that are missing, for "
        "development, and exit",
    )
    what.add_argument(
        "--print-config", action="store_true", help="print every setting as JSON and exit"
    )
    parser.add_argument("--version", action="version", version=f"sealaned {__version__}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
