"""A connection to a TPM 2.0, through the Enhanced System API of the TCG software stack.

Commands block, so each connection has one thread that runs all of them. tpm2-pytss is an extra
(`pip install sealane[tpm]`): this module and its users are imported only if a TPM is configured.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

# Failures are raised as exceptions; the library would print them as well.
os.environ.setdefault("TSS2_LOG", "all+none")

from tpm2_pytss import ESAPI, TCTILdr, TSS2_Exception

from sealane.errors import UnavailableError

DEVICE: Final = "device:/dev/tpmrm0"

_Result = TypeVar("_Result")


class TpmCommandError(UnavailableError):
    """The TPM refused a command with `code` (TPM 2.0 Library, Part 2 §6.6), or didn't answer."""

    def __init__(self, tcti: str, error: TSS2_Exception) -> None:
        super().__init__("tpm.command", f"TPM {tcti}: {error} ({error.rc:#x})")
        self.code: int = error.error


class Tpm:
    """One connection. Objects that it loaded leave the TPM when it is closed."""

    def __init__(self, tcti: str = DEVICE) -> None:
        """Connect by a TCTI configuration, `name:options`; UnavailableError `tpm.command`."""
        self.tcti = tcti
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tpm")
        try:
            self._loader, self._esapi = self._thread.submit(self._connect).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def call(self, function: Callable[[ESAPI], _Result]) -> _Result:
        """Run `function` on the connection's thread and wait; UnavailableError `tpm.command`."""
        return self._thread.submit(self._guarded, function).result()

    async def run(self, function: Callable[[ESAPI], _Result]) -> _Result:
        """Run `function` on the connection's thread; UnavailableError `tpm.command`."""
        return await asyncio.wrap_future(self._thread.submit(self._guarded, function))

    def close(self) -> None:
        """Disconnect."""
        self._thread.submit(self._disconnect).result()
        self._thread.shutdown()

    def _connect(self) -> tuple[Any, Any]:
        name, _, options = self.tcti.partition(":")
        try:
            loader = TCTILdr(name, options or None)
            return loader, ESAPI(loader)
        except TSS2_Exception as error:
            raise TpmCommandError(self.tcti, error) from error

    def _disconnect(self) -> None:
        self._esapi.close()
        self._loader.close()

    def _guarded(self, function: Callable[[ESAPI], _Result]) -> _Result:
        try:
            return function(self._esapi)
        except TSS2_Exception as error:
            raise TpmCommandError(self.tcti, error) from error
