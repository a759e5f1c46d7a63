"""From a broker's configuration to its service: store, authority, start epoch, in that order."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from sealane.crypto.keys import KeyWrapper
from sealane.daemon.anchors.choose import open_counter
from sealane.daemon.broker.instance import Instance
from sealane.daemon.broker.kek import open_key
from sealane.daemon.broker.registry import Registry
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.broker.store.contract import Store
from sealane.daemon.broker.store.legacy import take_over
from sealane.daemon.broker.store.sqlite import SqliteStore
from sealane.daemon.config import BrokerConfig
from sealane.daemon.metrics import Metrics

STORE_NAME: Final = "broker.sqlite"
STARTS_NAME: Final = "starts.counter"
HEADS_NAME: Final = "heads.counter"
# NV indices of an owner's choice (TCG registry of reserved TPM 2.0 handles, §2.2.2).
_STARTS_INDEX: Final = 0x0150_0001
_HEADS_INDEX: Final = 0x0150_0002


@contextlib.asynccontextmanager
async def opened_broker(
    config: BrokerConfig, *, node: str, state: Path, metrics: Metrics
) -> AsyncIterator[tuple[BrokerService, Instance, Registry]]:
    """Start a broker that ends with the block; errors as `Registry.open` and `Instance.claim`."""
    wrapping = open_key(config)
    async with contextlib.AsyncExitStack() as stack:
        store = await _open_store(config, wrapping, node=node, state=state)
        stack.push_async_callback(store.close)
        registry = await Registry.open(store, wrapping, node=node)
        instance = await Instance.claim(
            registry,
            node=node,
            instance=config.instance,
            starts=open_counter(tpm=None, index=_STARTS_INDEX, path=state / STARTS_NAME),
            heads=open_counter(tpm=None, index=_HEADS_INDEX, path=state / HEADS_NAME),
        )
        service = BrokerService(registry, instance, metrics=metrics)
        stack.push_async_callback(service.close)
        yield service, instance, registry


async def _open_store(
    config: BrokerConfig, wrapping: KeyWrapper, *, node: str, state: Path
) -> Store:
    store = SqliteStore(state / STORE_NAME)
    try:
        await take_over(store, wrapping, node=node, instance=config.instance)
    except BaseException:
        await store.close()
        raise
    return store
