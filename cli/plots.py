"""The plotting library, an extra (`pip install sealane[plots]`)."""

from typing import Any

from sealane.errors import UsageError


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing without a display; UsageError `plots.library`."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and half a second
    except ImportError as error:
        raise UsageError(
            "plots.library", f"a plot needs matplotlib ({error}): pip install 'sealane[plots]'"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot
