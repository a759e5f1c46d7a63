"""The back end `sealane` of torch.distributed: CPU tensors between sites (collectives.md).

    import sealane.client.torch
    torch.distributed.init_process_group("sealane", init_method=..., rank=..., world_size=...)

Importing it registers the back end. Each process uses the fabric of its own machine; they exchange
their fabrics' addresses through torch's store. Settings come from the environment:
`SEALANE_SOCKET` (the daemon's socket) and `SEALANE_RATE` (bits per second of a session, headers
included).
"""

import asyncio
import atexit
import contextlib
import ctypes
import datetime as dt
import inspect
import json
import math
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from sealane.client.collectives import Group, Member, Operator, join
from sealane.client.collectives.reduction import BFLOAT16, Elements
from sealane.client.connection import connect
from sealane.client.loop import Loop
from sealane.errors import UsageError

RATE_VARIABLE: Final = "SEALANE_RATE"
RATE_BITS_PER_SECOND: Final = 1_000_000_000
ENDED_KEPT: Final = 8
_NAME_KEY: Final = "sealane/name"
_SHARED_KEY: Final = "sealane/shared"

_OPERATORS: Final = (
    (dist.ReduceOp.SUM, Operator.SUM),
    (dist.ReduceOp.AVG, Operator.AVERAGE),
    (dist.ReduceOp.MAX, Operator.MAXIMUM),
    (dist.ReduceOp.MIN, Operator.MINIMUM),
    (dist.ReduceOp.PRODUCT, Operator.PRODUCT),
)


class SealaneProcessGroup(dist.ProcessGroup):  # type: ignore[misc] # torch has no types here
    """A group of torch.distributed over a ring of sessions.

    Operations run in the order of their calls, on a thread of their own. One that fails or exceeds
    the group's time-out ends the group at all ranks; `Work.wait` raises the reason.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: dt.timedelta) -> None:
        super().__init__(rank, size)
        # Older versions of torch drop the Python part of a work that only C++ refers to. So works
        # in flight are kept here, and the newest that have ended, which may still be queried.
        self._under_way: set[Operation] = set()
        self._ended: deque[Operation] = deque(maxlen=ENDED_KEPT)
        self._loop = Loop()
        self._stack = contextlib.AsyncExitStack()
        self._finalizer = weakref.finalize(self, _leave, self._loop, self._stack)
        atexit.register(self._finalizer)
        self._group: Group = self._loop.run(
            _join(self._stack, store, rank, size, timeout.total_seconds())
        )

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the back end's name in torch."""
        return "sealane"

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        """Combine a tensor of all ranks; each gets the result in place."""
        (tensor,) = tensors
        operator, seconds = _operator(opts), _seconds(opts)

        def start(elements: Elements, dtype: str) -> Coroutine[Any, Any, None]:
            return self._group.all_reduce(elements, operator, dtype=dtype, timeout_seconds=seconds)

        return self._work(tensors, _in_place(tensor, start))

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Any:
        """Combine several tensors of all ranks, in one operation, each in place."""
        operator, seconds = _operator(opts), _seconds(opts)
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise UsageError("group.array", "tensors of different types can't be combined in one")

        async def run() -> None:
            whole = torch.cat([tensor.detach().flatten() for tensor in tensors])
            elements, dtype = _elements(whole)
            await self._group.all_reduce(elements, operator, dtype=dtype, timeout_seconds=seconds)
            parts = whole.split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

        return self._work(tensors, run())

    def reduce(self, tensors: list[Any], opts: Any) -> Any:
        """Combine a tensor of all ranks; the root gets the result in place."""
        (tensor,) = tensors
        operator, seconds = _operator(opts), _seconds(opts)

        async def run() -> None:
            copy = tensor.detach().clone().contiguous()
            elements, dtype = _elements(copy)
            await self._group.all_reduce(elements, operator, dtype=dtype, timeout_seconds=seconds)
            if self._group.rank == opts.rootRank:
                tensor.detach().copy_(copy)

        return self._work(tensors, run())

    def broadcast(self, tensors: list[Any], opts: Any) -> Any:
        """Copy the root's tensor to all ranks."""
        (tensor,) = tensors
        root, seconds = opts.rootRank, _seconds(opts)

        def start(elements: Elements, _: str) -> Coroutine[Any, Any, None]:
            return self._group.broadcast(elements, root, timeout_seconds=seconds)

        return self._work(tensors, _in_place(tensor, start))

    def allgather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Any:
        """Collect the tensors of all ranks at all ranks."""
        (tensor,), (gathered,) = inputs, outputs

        async def run() -> None:
            own = tensor.detach().contiguous()
            room = torch.empty((self.size(), *own.shape), dtype=own.dtype)
            await self._group.all_gather(
                _elements(own)[0], _elements(room)[0], timeout_seconds=_seconds(opts)
            )
            for output, part in zip(gathered, room, strict=True):
                output.copy_(part)

        return self._work(outputs[0], run())

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        """Collect the tensors of all ranks at all ranks, in one tensor."""
        own = tensor.detach().contiguous()

        def start(elements: Elements, _: str) -> Coroutine[Any, Any, None]:
            return self._group.all_gather(
                _elements(own)[0], elements, timeout_seconds=_seconds(opts)
            )

        return self._work([output], _in_place(output, start))

    def reduce_scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> Any:
        """Combine lists of tensors of all ranks; rank r gets the r-th."""
        (output,), (tensors,) = outputs, inputs
        return self._reduce_scatter_base(output, torch.stack(list(tensors)), opts)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any) -> Any:
        """Combine tensors of all ranks; rank r gets the r-th part."""
        operator, seconds = _operator(opts), _seconds(opts)
        given = tensor.detach().contiguous()

        def start(elements: Elements, dtype: str) -> Coroutine[Any, Any, None]:
            return self._group.reduce_scatter(
                _elements(given)[0], elements, operator, dtype=dtype, timeout_seconds=seconds
            )

        return self._work([output], _in_place(output, start))

    def gather(self, outputs: list[list[Any]], inputs: list[Any], opts: Any) -> Any:
        """Collect the tensors of all ranks at the root."""
        (tensor,), root = inputs, opts.rootRank
        gathered = outputs[0] if self._group.rank == root else []

        async def run() -> None:
            own = tensor.detach().contiguous()
            room = torch.empty((len(gathered), *own.shape), dtype=own.dtype)
            await self._group.gather(
                _elements(own)[0], _elements(room)[0], root, timeout_seconds=_seconds(opts)
            )
            for output, part in zip(gathered, room, strict=True):
                output.copy_(part)

        return self._work(gathered, run())

    def scatter(self, outputs: list[Any], inputs: list[list[Any]], opts: Any) -> Any:
        """Send each rank its tensor of the root's list."""
        (output,), root = outputs, opts.rootRank
        given = torch.stack(list(inputs[0])) if self._group.rank == root else output.detach()

        def start(elements: Elements, _: str) -> Coroutine[Any, Any, None]:
            return self._group.scatter(
                _elements(given.contiguous())[0], elements, root, timeout_seconds=_seconds(opts)
            )

        return self._work(outputs, _in_place(output, start))

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any) -> Any:
        """Send a tensor to each rank and receive one from each."""

        async def run() -> None:
            given = torch.cat([tensor.detach().flatten() for tensor in inputs])
            lengths = [output.numel() for output in outputs]
            room = torch.empty(sum(lengths), dtype=given.dtype)
            await self._group.all_to_all(
                _elements(given)[0],
                _elements(room)[0],
                send_counts=[tensor.numel() for tensor in inputs],
                receive_counts=lengths,
                timeout_seconds=_seconds(opts),
            )
            for output, part in zip(outputs, room.split(lengths), strict=True):
                output.copy_(part.view(output.shape))

        return self._work(outputs, run())

    def alltoall_base(
        self, output: Any, tensor: Any, output_splits: Any, input_splits: Any, opts: Any
    ) -> Any:
        """Send a part of a tensor to each rank and receive one from each.

        Splits are rows of the tensors; without them, parts are equal.
        """
        given = tensor.detach().contiguous()

        def counts(whole: Any, splits: Any) -> list[int] | None:
            row = math.prod(whole.shape[1:])
            return [split * row for split in splits] or None

        def start(elements: Elements, _: str) -> Coroutine[Any, Any, None]:
            return self._group.all_to_all(
                _elements(given)[0],
                elements,
                send_counts=counts(tensor, input_splits),
                receive_counts=counts(output, output_splits),
                timeout_seconds=_seconds(opts),
            )

        return self._work([output], _in_place(output, start))

    # As newer versions of torch call them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    def send(self, tensors: list[Any], destination: int, tag: int) -> Any:
        """Send a tensor to one rank, which receives them in order; tags are only compared."""
        (tensor,) = tensors

        def start(elements: Elements, _: str) -> Coroutine[Any, Any, None]:
            return self._group.send(elements, destination, tag=tag)

        return self._work(tensors, _in_place(tensor, start, writes=False))

    def recv(self, tensors: list[Any], source: int, tag: int) -> Any:
        """Receive the next tensor from one rank."""
        (tensor,) = tensors

        def start(elements: Elements, _: str) -> Coroutine[Any, Any, None]:
            return self._group.receive(elements, source, tag=tag)

        return self._work(tensors, _in_place(tensor, start))

    def recv_anysource(self, tensors: list[Any], tag: int) -> Any:
        """Receive the next tensor of whichever rank sends one first."""
        (tensor,) = tensors

        async def start(elements: Elements, _: str) -> None:
            work.source = await self._group.receive_any(elements, tag=tag)

        work: Operation = self._work(tensors, _in_place(tensor, start))
        return work

    def barrier(self, opts: Any = None) -> Any:
        """Complete when all ranks have called it."""
        return self._work([], self._group.barrier(timeout_seconds=_seconds(opts)))

    def abort(self) -> None:
        """End the group at once, at all ranks; operations in flight fail."""
        self._loop.call(self._group.abort)

    def shutdown(self) -> None:
        """Leave the group once the other ranks have all data."""
        self._finalizer()

    def _work(self, result: list[Any], operation: Coroutine[Any, Any, None]) -> "Operation":
        work = Operation(result)

        async def run() -> None:
            try:
                await operation
            except BaseException as error:  # noqa: BLE001 - whoever waits for the work gets it
                work.settle(RuntimeError(f"{type(error).__name__}: {error}"))
            else:
                work.settle(None)
            self._under_way.discard(work)
            self._ended.append(work)

        self._under_way.add(work)
        self._loop.start(run())
        return work


class Operation(Work):  # type: ignore[misc] # torch has no types here
    """An operation in flight: torch's Work. `wait` raises a failure's reason as a RuntimeError.

    torch's own Work over a future doesn't show the reason.
    """

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result
        self._future = torch.futures.Future()
        self._has_ended = threading.Event()
        self._error: RuntimeError | None = None
        self.source = -1
        """The rank that a receive from any source has received from."""

    def settle(self, error: RuntimeError | None) -> None:
        """Set the outcome."""
        self._error = error
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        self._has_ended.set()

    def wait(self, timeout: dt.timedelta = dt.timedelta()) -> bool:
        """Wait for the end; a time-out of 0 is none. The operation goes on after a time-out."""
        seconds = timeout.total_seconds()
        if not self._has_ended.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"not within {seconds:g} s; it goes on [group.wait]")
        if self._error is not None:
            raise self._error
        return True

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> Any:
        """Return a future that ends with the operation."""
        return self._future

    def is_completed(self) -> bool:
        """Return whether it has ended, with success or not."""
        return self._has_ended.is_set()

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> RuntimeError | None:
        """Return the failure's reason."""
        return self._error

    def result(self) -> list[Any]:
        """Wait for the end and return the tensors."""
        self.wait()
        return self._result


def _in_place(
    tensor: Any, start: Callable[[Elements, str], Coroutine[Any, Any, None]], *, writes: bool = True
) -> Coroutine[Any, Any, None]:
    """Run an operation on a tensor's elements, through a copy if it isn't contiguous."""

    async def run() -> None:
        plain = tensor.detach().contiguous()
        await start(*_elements(plain))
        if writes and plain.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(plain)

    return run()


def _elements(tensor: Any) -> tuple[Elements, str]:
    """Return a contiguous CPU tensor's elements, and the name of their type.

    By address: conversion by torch depends on the NumPy version that it was built with.
    """
    if tensor.device.type != "cpu":
        raise UsageError("group.array", f"a tensor on {tensor.device}; allowed: on the CPU")
    dtype = str(tensor.dtype).removeprefix("torch.")
    nbytes = tensor.numel() * tensor.element_size()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr()) if nbytes else bytearray()
    return np.frombuffer(memory, np.uint16 if dtype == BFLOAT16 else np.dtype(dtype)), dtype


def _operator(opts: Any) -> Operator:
    if opts is None:
        return Operator.SUM
    for known, operator in _OPERATORS:
        if opts.reduceOp == known:
            return operator
    raise UsageError("group.operator", f"{opts.reduceOp} is not offered")


def _seconds(opts: Any) -> float | None:
    """Return an operation's time-out; None: the group's, for torch's -1 ms."""
    found = getattr(opts, "timeout", None)
    if not isinstance(found, dt.timedelta) or found < dt.timedelta():
        return None
    return found.total_seconds()


async def _join(
    stack: contextlib.AsyncExitStack, store: Any, rank: int, size: int, seconds: float
) -> Group:
    """Publish this fabric's address, and form the group."""
    client = await stack.enter_async_context(connect())
    status = await client.status()
    ours = {"node": status.node, "address": status.addresses["fabric_control"]}
    store.set(f"sealane/{rank}", json.dumps(ours))
    if rank == 0:
        store.set(_NAME_KEY, secrets.token_hex(8))
        store.set(_SHARED_KEY, secrets.token_hex(32))
    # The store's `get` waits, without the loop.
    found = await asyncio.to_thread(
        lambda: [
            store.get(key)
            for key in (_NAME_KEY, _SHARED_KEY, *(f"sealane/{n}" for n in range(size)))
        ]
    )
    name, secret, *members = (text.decode() for text in found)
    return await stack.enter_async_context(
        join(
            client,
            f"torch {name}",
            rank=rank,
            members=[Member(**json.loads(member)) for member in members],
            rate_bits_per_second=int(os.environ.get(RATE_VARIABLE, RATE_BITS_PER_SECOND)),
            timeout_seconds=seconds,
            secret=bytes.fromhex(secret),
        )
    )


def _leave(loop: Loop, stack: contextlib.AsyncExitStack) -> None:
    """Leave the group, which may have ended already."""
    with contextlib.suppress(Exception):
        loop.run(stack.aclose())
    loop.close()


def _create(store: Any, rank: int, size: int, timeout: dt.timedelta) -> SealaneProcessGroup:
    return SealaneProcessGroup(store, rank, size, timeout)


def _register() -> None:
    """Register the back end; since torch 2.0 the devices are named."""
    takes_devices = "devices" in inspect.signature(dist.Backend.register_backend).parameters
    dist.Backend.register_backend(
        "sealane", _create, **({"devices": "cpu"} if takes_devices else {})
    )


_register()
