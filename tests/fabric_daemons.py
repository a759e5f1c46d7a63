"""Fabric daemons as processes, enrolled with one broker."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from control_plane import Daemon, Site, daemon, sealanectl, short_directory

SECTION = '[fabric]\ncontrol_listen = "127.0.0.1:0"\nrate_max_bits_per_second = 1000000000\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricDaemons:
    """A broker and its fabrics."""

    broker: Daemon
    fabrics: tuple[Daemon, ...]

    def revoke(self, node: str) -> None:
        """Revoke a node, as the broker's operator."""
        ended = sealanectl("--socket", self.broker.socket, "node", "revoke", "--yes", node)
        assert ended.returncode == 0, ended.stderr


@contextlib.contextmanager
def fabric_daemons(
    names: Sequence[str] = ("a", "b"),
    *,
    more: str = "",
    each_more: Callable[[str], str] = lambda _: "",
) -> Iterator[FabricDaemons]:
    """Start a broker and a fabric for each name.

    `more` holds lines for their [fabric] sections, `each_more` makes those that differ by name.
    """
    with short_directory() as root, contextlib.ExitStack() as stack:
        site = Site(root)
        site.write_policy({name: ["fabric"] for name in names})
        broker = stack.enter_context(daemon(site.broker_config()))
        yield FabricDaemons(
            broker=broker,
            fabrics=tuple(
                stack.enter_context(
                    daemon(
                        site.write_config(
                            name, site.enrolment(name, broker) + SECTION + more + each_more(name)
                        )
                    )
                )
                for name in names
            ),
        )
