"""Daemons that are killed and restarted at the same addresses."""

import contextlib
from collections.abc import Sequence

from control_plane import Daemon, Site, daemon
from ports import choose_ports


def start_in_place(
    site: Site, stack: contextlib.ExitStack, name: str, *, prefix: Sequence[str] = ()
) -> Daemon:
    """Start a daemon, at its previous addresses if it ran before; see `start` for `prefix`.

    At the end of `stack` it must exit cleanly, unless a test killed it.
    """
    config = site.root / f"{name}.toml"
    choose_ports(config)
    context = daemon(config, prefix=prefix)
    running = context.__enter__()

    def leave() -> None:
        if running.process.poll() is None:
            context.__exit__(None, None, None)

    stack.callback(leave)
    return running
