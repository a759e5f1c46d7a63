"""Daemons that are killed and come back where they were."""

import contextlib

from control_plane import Daemon, Site, daemon


def start_in_place(
    site: Site, stack: contextlib.ExitStack, name: str, *, pinned: tuple[str, ...]
) -> Daemon:
    """Start a daemon, where it was before if it was there: its `pinned` addresses stay.

    At the end of `stack` it must end in order, unless it was killed: who kills it answers for it.
    """
    config = site.root / f"{name}.toml"
    context = daemon(config)
    running = context.__enter__()
    text = config.read_text()
    for address in pinned:
        if address in running.addresses:
            text = text.replace('"127.0.0.1:0"', f'"{running.addresses[address]}"', 1)
    config.write_text(text)

    def leave() -> None:
        if running.process.poll() is None:
            context.__exit__(None, None, None)

    stack.callback(leave)
    return running
