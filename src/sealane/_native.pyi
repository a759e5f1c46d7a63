"""Native engine: everything that is per-packet or per-sector. Contract of `native/py`."""

__version__: str
