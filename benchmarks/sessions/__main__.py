"""`python -m benchmarks.sessions WHAT`: what sessions do and what they cost."""

import argparse
import importlib
import sys
from typing import Final

COMMANDS: Final = {
    "packets": "benchmarks.sessions.packets_command",
    "simulate": "benchmarks.sessions.simulate.command",
    "bursts": "benchmarks.sessions.bursts_command",
    "allreduce": "benchmarks.sessions.allreduce_command",
    "lab": "benchmarks.sessions.lab.command",
    "field": "benchmarks.sessions.field.command",
    "fairness": "benchmarks.sessions.fairness.command",
    "pace": "benchmarks.sessions.pace_command",
    "threads": "benchmarks.sessions.threads_command",
    "workers": "benchmarks.sessions.workers.command",
}


def main() -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    added = parser.add_subparsers(required=True, metavar="WHAT")
    for name, module in COMMANDS.items():
        command = importlib.import_module(module)
        one = added.add_parser(
            name,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(one)
        one.set_defaults(run=command.run)
    arguments = parser.parse_args()
    found: int = arguments.run(arguments)
    return found


if __name__ == "__main__":
    sys.exit(main())
