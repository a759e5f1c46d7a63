"""Run one target under Atheris: `run.py TARGET [options of libFuzzer] [folders]`."""

import sys
from pathlib import Path

import atheris
import structlog

sys.path.insert(0, str(Path(__file__).parent.parent))
with atheris.instrument_imports(include=["sealane"]):
    from fuzz.targets import TARGETS


def main() -> None:
    """Fuzz until stopped or until something is found."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
