"""The synchronous client, generated from the asynchronous one: `make synchronous`, not by hand."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from sealane._native import ChunkBitmap, RegionArray
from sealane.client import connection as async_connection
from sealane.client import disk as async_disk
from sealane.client import listener as async_listener
from sealane.client import operation as async_operation
from sealane.client import operations as async_operations
from sealane.client import session as async_session
from sealane.client import volumes as async_volumes
from sealane.client.collectives import group as async_collectives_group
from sealane.client.collectives.group import SLOT_BYTES, SLOTS
from sealane.client.collectives.reduction import Operator
from sealane.client.collectives.sessions import Member
from sealane.client.connection import NodeStatus
from sealane.client.disk import DiskHandle
from sealane.client.disk_file import Files
from sealane.client.facade import Block, Facade, entered, iterated
from sealane.client.messages import Received, Reliability, SelectiveRepeat, Sent, Unreliable
from sealane.client.operation import R
from sealane.client.volume import Volume, VolumeEvent
from sealane.client.volume_store import VolumeJob
from sealane.protocol.v1 import nodes_pb2, sessions_pb2
from sealane.transport.nvme.volume_queue import Readable

if TYPE_CHECKING:
    from sealane.client.messages import Bytes


class Volumes(Facade):
    """Calls about volumes; `name` is always "volumes/<UUID>"."""

    asynchronous: async_volumes.Volumes

    def create(
        self,
        *,
        size_bytes: int,
        display_name: str = "",
        target_node: str = "",
        third_party: str = "",
        mode: str = "",
        anchor: str = "",
        request_id: str = "",
    ) -> Volume:
        """Create a volume of `size_bytes`, a multiple of 4096.

        `third_party`: on the third party's target of that name in the gateway's configuration, in
        mode "local"; with `anchor` "none" a roll-back of the whole namespace while it is detached
        goes undetected. `mode` "off": without freshness (threat-model.md); such a volume is filled
        in the background before it can be attached, see `wait_filled`.
        """
        return self.loop.run(
            self.asynchronous.create(
                size_bytes=size_bytes,
                display_name=display_name,
                target_node=target_node,
                third_party=third_party,
                mode=mode,
                anchor=anchor,
                request_id=request_id,
            )
        )

    def get(self, name: str, *, with_store: bool = False) -> Volume:
        """Return a volume; `with_store`: with the state of its store, fetched from its target."""
        return self.loop.run(self.asynchronous.get(name, with_store=with_store))

    def wait_filled(self, name: str, *, progress: Callable[[Volume], None] | None = None) -> Volume:
        """Wait until the volume is filled; `progress` is called twice a second."""
        return self.loop.run(self.asynchronous.wait_filled(name, progress=progress))

    def list(self, *, with_store: bool = False) -> list[Volume]:
        """Return every volume of this tenant; `with_store`: with the states of their stores."""
        return self.loop.run(self.asynchronous.list(with_store=with_store))

    def delete(self, name: str) -> None:
        """Delete a detached volume and all its data."""
        self.loop.run(self.asynchronous.delete(name))

    def attach(
        self,
        name: str,
        *,
        host_nqn: str,
        via_traddr: str = "",
        via_trsvcid: int = 0,
        fail_over: bool = False,
    ) -> Volume:
        """Export the volume to `host_nqn`; `via_…` replaces the target's data-path address.

        With `fail_over`, this gateway is one of several that serve the host, one at a time.
        """
        return self.loop.run(
            self.asynchronous.attach(
                name,
                host_nqn=host_nqn,
                via_traddr=via_traddr,
                via_trsvcid=via_trsvcid,
                fail_over=fail_over,
            )
        )

    def take_over(self, name: str, *, accept_loss: bool = False) -> Volume:
        """Serve the volume's host from this gateway of its fail-over group; fences the other one.

        With `accept_loss`, also if acknowledged writes may be lost that the other gateway kept for
        a target that has restarted.
        """
        return self.loop.run(self.asynchronous.take_over(name, accept_loss=accept_loss))

    def detach(self, name: str) -> Volume:
        """Stop the export."""
        return self.loop.run(self.asynchronous.detach(name))

    def share(self, name: str, *, tenant: str, read_only: bool = False) -> Volume:
        """Let gateways of another tenant use the volume, or change their access."""
        return self.loop.run(self.asynchronous.share(name, tenant=tenant, read_only=read_only))

    def unshare(self, name: str, *, tenant: str) -> Volume:
        """End a share: within 30 s its gateways lose access; the volume gets a new key epoch."""
        return self.loop.run(self.asynchronous.unshare(name, tenant=tenant))

    def start_job(self, name: str, kind: str, *, bytes_per_second: int = 0) -> VolumeJob:
        """Start the job "scrub" or "refresh" at the volume's target; a rate of 0 is no limit."""
        return self.loop.run(
            self.asynchronous.start_job(name, kind, bytes_per_second=bytes_per_second)
        )

    def change_job(
        self, name: str, kind: str, *, order: str = "", bytes_per_second: int | None = None
    ) -> VolumeJob:
        """Order a job to "pause", "resume" or "cancel", or change its rate."""
        return self.loop.run(
            self.asynchronous.change_job(name, kind, order=order, bytes_per_second=bytes_per_second)
        )

    def wait_job(
        self, name: str, kind: str, *, progress: Callable[[VolumeJob], None] | None = None
    ) -> VolumeJob:
        """Wait until a job has ended; `progress` is called twice a second."""
        return self.loop.run(self.asynchronous.wait_job(name, kind, progress=progress))

    def resize(self, name: str, *, size_bytes: int) -> Volume:
        """Grow a volume to `size_bytes` in all, a multiple of 4096. Idempotent.

        The new range reads as zeros. Hosts see the new size at the next attachment; I/O of an
        attached host pauses meanwhile. UsageError `volume.resize.smaller`, `volume.resize.mode`,
        `volume.resize.refused`; UnavailableError `store.extend`: its store has no room.
        """
        return self.loop.run(self.asynchronous.resize(name, size_bytes=size_bytes))

    def clone(self, name: str, *, display_name: str = "") -> Volume:
        """Raise UsageError `volume.clone.unsupported`: sealed sectors can't be shared."""
        return self.loop.run(self.asynchronous.clone(name, display_name=display_name))

    def watch(self, name: str) -> contextlib.AbstractContextManager[Iterator[VolumeEvent]]:
        """Subscribe to the volume's events; none is missed after the block is entered."""
        return entered(self.loop, self.asynchronous.watch(name), iterated)


class Disk(Files, Block):
    """A volume as a sequence of bytes: `with client.open(volume) as disk`.

    Calls raise UsageError (a range outside the disk; an unaligned write that the controller can't
    do atomically; `client.forked`: the parent process opened the disk: open its `handle` here),
    SectorVerificationError (a stored sector isn't what was written; it has the LBA),
    NvmeStatusError (any other refusal) and UnavailableError (`disk.timeout`: the front end stayed
    away; `disk.contended`: others kept changing the sector). A write that failed or was cancelled
    may have been done, as a whole or in part. Overlapping calls are done in any order.

    Buffers must not be changed while a call uses them.
    """

    asynchronous: async_disk.Disk

    @property
    def handle(self) -> "DiskHandle":
        """Opens the same disk in another process; it can be pickled, and holds the secret."""
        return self.asynchronous.handle

    def __reduce__(self) -> str | tuple[object, ...]:
        return self.asynchronous.__reduce__()

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.asynchronous.size

    @property
    def sector_bytes(self) -> int:
        """Size of a sector in bytes; calls on whole sectors are faster."""
        return self.asynchronous.sector_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        return self.loop.run(self.asynchronous.read(offset, length))

    def readinto(self, offset: int, buffer: bytearray | memoryview) -> int:
        """Fill `buffer` from `offset`; return its size in bytes."""
        return self.loop.run(self.asynchronous.readinto(offset, buffer))

    def write(self, offset: int, data: Readable, *, durable: bool = False) -> int:
        """Write `data` at `offset`; return its size in bytes. `durable`: survives a power cut."""
        return self.loop.run(self.asynchronous.write(offset, data, durable=durable))

    def flush(self) -> None:
        """Make durable every write that has returned."""
        self.loop.run(self.asynchronous.flush())

    def write_zeroes(self, offset: int, length: int) -> None:
        """Set exactly these bytes to zero; whole sectors without moving data."""
        self.loop.run(self.asynchronous.write_zeroes(offset, length))

    def discard(self, offset: int, length: int) -> None:
        """Deallocate the whole sectors inside the range: they read as zeros. Others stay."""
        self.loop.run(self.asynchronous.discard(offset, length))


class Operation(Facade, Generic[R]):
    """A posted send or receive; `wait` for it.

    Giving up waiting does not stop the operation: its bytes stay in use until it ends. Any number
    of callers may wait, also after the end. With asyncio it is awaitable: `asyncio.gather` and the
    like wait for many.
    """

    asynchronous: async_operation.Operation[R]

    def done(self) -> bool:
        """Return whether the operation has ended, with success or not."""
        return self.asynchronous.done()

    def wait(self, *, timeout_seconds: float | None = None) -> R:
        """Wait for the end and return the result.

        Raises SessionError: `session.wait.timeout` after the time-out (the operation goes on),
        `session.message.…` if the message did not arrive, or may not have.
        """
        return self.loop.run(self.asynchronous.wait(timeout_seconds=timeout_seconds))

    def result(self) -> R:
        """Return the result; raises as `wait`, and UsageError before the end."""
        return self.asynchronous.result()


class SendOperation(Operation[Sent]):
    """A posted send."""

    asynchronous: async_operations.SendOperation

    def cancel(self) -> bool:
        """Cancel the message at both ends; return False if it has already ended.

        The operation ends as `session.message.cancelled`, and so does the receive, unless it was
        complete.
        """
        return self.loop.run(self.asynchronous.cancel())


class StreamOperation(SendOperation):
    """A message whose parts are written one by one, anywhere in the receiver's buffer.

    A reliable stream ends when all parts written before `end` have arrived, an unreliable one when
    all have left. If the parts leave gaps, the receiver's message is partial.
    """

    asynchronous: async_operations.StreamOperation

    def write(
        self,
        remote_offset: int,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> None:
        """Send `data`, or a range of the region, to that offset of the receiver's buffer.

        Parts may come in any order, leave gaps, and overwrite each other. Offset and length are
        multiples of the session's `unit_bytes`; a part that reaches the end of the stream's range
        may be shorter. The bytes must not change until the stream has ended. Raises UsageError
        `session.stream.part` if the stream has ended, or the part breaks these rules.
        """
        self.loop.run(self.asynchronous.write(remote_offset, data, offset=offset, length=length))

    def end(self) -> None:
        """End the stream: no more parts will be written."""
        self.loop.run(self.asynchronous.end())


class ReceiveOperation(Operation[Received]):
    """A posted receive, whose chunks can be used before the message is complete.

    Chunks are `Session.chunk_bytes` long; the last one of a message may be shorter.
    """

    asynchronous: async_operations.ReceiveOperation

    @property
    def chunk_count(self) -> int:
        """Chunks of the buffer; a message may take fewer."""
        return self.asynchronous.chunk_count

    def complete(self) -> bool:
        """End the receive with what has landed; its bytes no longer change.

        Return False if it had already ended. A receive that has no slot yet ends as
        `session.message.cancelled`.
        """
        return self.loop.run(self.asynchronous.complete())

    def packet_map(self, chunk: int) -> bytes | None:
        """Ask the fabric for the map of a chunk: a byte for each unit, 1 if it has landed.

        None before the first packet has arrived, and once all have.
        """
        return self.loop.run(self.asynchronous.packet_map(chunk))

    def immediate(self) -> int | None:
        """Ask the fabric for the sender's immediate, which is known from the first packet on.

        None before that, or if the message has none.
        """
        return self.loop.run(self.asynchronous.immediate())

    def bitmap(self) -> ChunkBitmap | None:
        """Return the live bitmap: a read-only buffer of a byte for each chunk of the buffer.

        `memoryview` and `numpy.frombuffer` take it without a copy; a byte becomes 1 when its chunk
        is complete in the region. It only informs: before using bytes of the region, call `chunks`
        or `wait_chunks`. It describes this receive while `is_current`; afterwards a later receive
        has its slot. None before the fabric has taken the receive, and once a later one has its
        slot.
        """
        return self.loop.call(self.asynchronous.bitmap)

    def chunks(self) -> bytes | None:
        """Return a byte for each chunk of the buffer: 1 if it is complete in the region.

        None before the fabric has taken the receive, and once a later receive has its slot.
        """
        return self.loop.call(self.asynchronous.chunks)

    def wait_chunks(
        self, start: int = 0, end: int | None = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until chunks `start` to `end` (None: all) are in the region or the receive ends.

        Raises as `wait` if the receive fails first.
        """
        self.loop.run(self.asynchronous.wait_chunks(start, end, timeout_seconds=timeout_seconds))


class Session(Facade):
    """A session: the i-th send of either end lands in the i-th receive of the other.

    It ends when either end closes it, or when the job or the fabric of either end dies.
    """

    asynchronous: async_session.Session

    @property
    def session(self) -> sessions_pb2.Session:
        """The fabric's grant: name, peer, unit, rate."""
        return self.asynchronous.session

    @property
    def region(self) -> memoryview:
        """The whole shared memory, writable. `empty` doesn't know which bytes it is used for."""
        return self.asynchronous.region

    @property
    def chunk_bytes(self) -> int:
        """Length of a chunk, the unit in which a receive reports progress."""
        return self.asynchronous.chunk_bytes

    @property
    def region_name(self) -> str:
        """The session for which the fabric created the region; that one may have ended."""
        return self.asynchronous.region_name

    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, alignment: int = 64
    ) -> RegionArray:
        """Allocate an uninitialised array in the region.

        `dtype` is a type of NumPy or torch, or its name ("float32", "bfloat16").
        `numpy.from_dlpack`, `torch.from_dlpack` and `torch.frombuffer` take the array without a
        copy. Its bytes are freed with the last view of it. Raises UnavailableError
        `session.region.full`, UsageError `session.region.array`.
        """
        return self.asynchronous.empty(shape, dtype, alignment=alignment)

    def post_send(
        self,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> SendOperation:
        """Post a send of `data`, which lies in the region, or of a range of the region.

        Waits for room on the ring. The bytes must not change until the send has ended. Messages of
        a higher `priority` (0 to 7) leave before all that wait, but come to the i-th receive like
        others. One that has not ended after `deadline_seconds` is cancelled at both ends, and one
        that finds no room on the ring by then is not posted (`session.message.expired`). Raises
        UsageError for bytes outside the region.
        """
        return SendOperation(
            self.loop,
            self.loop.run(
                self.asynchronous.post_send(
                    data,
                    offset=offset,
                    length=length,
                    reliability=reliability,
                    immediate=immediate,
                    priority=priority,
                    deadline_seconds=deadline_seconds,
                )
            ),
        )

    def post_stream(
        self,
        length: int,
        *,
        reliability: SelectiveRepeat | Unreliable | None = None,
        immediate: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> StreamOperation:
        """Begin a message whose parts are written later, up to `length` bytes in all."""
        return StreamOperation(
            self.loop,
            self.loop.run(
                self.asynchronous.post_stream(
                    length,
                    reliability=reliability,
                    immediate=immediate,
                    priority=priority,
                    deadline_seconds=deadline_seconds,
                )
            ),
        )

    def post_receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> ReceiveOperation:
        """Post a receive into `into`, which lies in the region, or into a range of the region.

        Waits for room on the ring. Raises UsageError for bytes outside the region.
        """
        return ReceiveOperation(
            self.loop,
            self.loop.run(self.asynchronous.post_receive(into, offset=offset, length=length)),
        )

    def send(
        self,
        data: "Bytes | None" = None,
        *,
        offset: int = 0,
        length: int | None = None,
        reliability: Reliability | None = None,
        immediate: int | None = None,
        priority: int = 0,
        deadline_seconds: float | None = None,
    ) -> Sent:
        """Send a message and return when the peer has it: `post_send`, then `wait`.

        The default reliability is selective repeat. `immediate`: 32 bits for the receiver.
        """
        return self.loop.run(
            self.asynchronous.send(
                data,
                offset=offset,
                length=length,
                reliability=reliability,
                immediate=immediate,
                priority=priority,
                deadline_seconds=deadline_seconds,
            )
        )

    def receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> Received:
        """Receive the next message and return when it is complete: `post_receive`, then `wait`.

        Raises SessionError if the message is longer than its buffer, or the session has ended.
        """
        return self.loop.run(self.asynchronous.receive(into, offset=offset, length=length))

    def statistics(self) -> dict[str, int]:
        """Return the session's counters as last published by the fabric.

        Raises SessionError `session.closed` after `close`.
        """
        return self.loop.call(self.asynchronous.statistics)

    def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Refuse new posts, and wait until everything posted has ended, with success or not.

        Raises SessionError `session.wait.timeout`; the session then stays open for what is posted.
        """
        self.loop.run(self.asynchronous.drain(timeout_seconds=timeout_seconds))

    def close(self) -> None:
        """Release the rings; the fabric then ends the session. Views of the region stay valid.

        Operations in flight end here at once, but the fabric may still read and write their arrays
        until it has ended the session. So `empty` reuses none of their bytes before; never, if the
        fabric is killed in between. Bytes given as a range are the caller's to keep unused.
        """
        self.loop.call(self.asynchronous.close)


class Listener(Facade):
    """Accepts one session after the other; each belongs to the caller, who closes it.

    `backlog` listeners wait at the fabric, so that as many peers can connect before the next
    `accept`.
    """

    asynchronous: async_listener.Listener

    def accept(self, *, timeout_seconds: float | None = None) -> Session:
        """Return the next session; close it when done.

        Raises SessionError `session.wait.timeout`, `session.listener.closed` after the end of the
        block, and what listening raises; after that another call listens again.
        """
        return Session(
            self.loop, self.loop.run(self.asynchronous.accept(timeout_seconds=timeout_seconds))
        )


class Group(Facade):
    """A ring of jobs; `join` makes it. All ranks call the same operations in the same order.

    Operations of one rank run one after the other. One that fails or times out ends the group at
    this rank: its sessions close, so its neighbours' operations fail, then those of their
    neighbours, around the ring. Errors are SessionError: `group.timeout`, `group.aborted`,
    `group.order`.
    """

    asynchronous: async_collectives_group.Group

    @property
    def rank(self) -> int:
        """This job's place in the ring, from 0."""
        return self.asynchronous.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.asynchronous.size

    def all_reduce(
        self,
        array: Any,
        operator: Operator = Operator.SUM,
        *,
        dtype: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Combine the arrays of all ranks, element by element; each gets the result in place.

        All ranks get the same bits. `array` is contiguous and has the buffer protocol; with `dtype`
        "bfloat16" its 16-bit integers are read as bfloat16.
        """
        self.loop.run(
            self.asynchronous.all_reduce(
                array, operator, dtype=dtype, timeout_seconds=timeout_seconds
            )
        )

    def reduce_scatter(
        self,
        array: Any,
        into: Any,
        operator: Operator = Operator.SUM,
        *,
        dtype: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Combine arrays that have a part for each rank; rank r gets the r-th part.

        Parts are equal in length, and `into` is as long as one. `array` doesn't change.
        """
        self.loop.run(
            self.asynchronous.reduce_scatter(
                array, into, operator, dtype=dtype, timeout_seconds=timeout_seconds
            )
        )

    def broadcast(self, array: Any, root: int = 0, *, timeout_seconds: float | None = None) -> None:
        """Copy the root's array to all ranks."""
        self.loop.run(self.asynchronous.broadcast(array, root, timeout_seconds=timeout_seconds))

    def all_gather(self, array: Any, into: Any, *, timeout_seconds: float | None = None) -> None:
        """Collect the arrays of all ranks, equal in length and type, in `into`, by rank."""
        self.loop.run(self.asynchronous.all_gather(array, into, timeout_seconds=timeout_seconds))

    def gather(
        self, array: Any, into: Any = None, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Collect the arrays of all ranks, equal in length and type, in the root's `into`."""
        self.loop.run(self.asynchronous.gather(array, into, root, timeout_seconds=timeout_seconds))

    def scatter(
        self, array: Any, into: Any, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Copy to each rank its part of the root's `array`; other ranks' `array` is ignored."""
        self.loop.run(self.asynchronous.scatter(array, into, root, timeout_seconds=timeout_seconds))

    def all_to_all(
        self,
        array: Any,
        into: Any,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        """Send part r of `array` to rank r; its part for this rank becomes part r of `into`.

        Parts are equal in length unless counts, in elements by rank, say otherwise: what rank a
        sends to b is what b receives from a.
        """
        self.loop.run(
            self.asynchronous.all_to_all(
                array,
                into,
                send_counts=send_counts,
                receive_counts=receive_counts,
                timeout_seconds=timeout_seconds,
            )
        )

    def barrier(self, *, timeout_seconds: float | None = None) -> None:
        """Return when all ranks have called it."""
        self.loop.run(self.asynchronous.barrier(timeout_seconds=timeout_seconds))

    def send(
        self, array: Any, to: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Send an array to one rank, which calls `receive`; return when it has the array.

        Arrays from one rank to another arrive in the order of the calls; tags are only compared.
        Sends don't wait for the operations of all ranks.
        """
        self.loop.run(self.asynchronous.send(array, to, tag=tag, timeout_seconds=timeout_seconds))

    def receive(
        self, array: Any, source: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Receive the next array from one rank, which must have the same length and tag."""
        self.loop.run(
            self.asynchronous.receive(array, source, tag=tag, timeout_seconds=timeout_seconds)
        )

    def receive_any(self, array: Any, *, tag: int = 0, timeout_seconds: float | None = None) -> int:
        """Receive the next array of whichever rank sends one first; return that rank.

        It must have the same length and tag, as for `receive`. Connects to all ranks.
        """
        return self.loop.run(
            self.asynchronous.receive_any(array, tag=tag, timeout_seconds=timeout_seconds)
        )

    def abort(self) -> None:
        """End the group at once, at this rank and thereby at all others."""
        self.loop.call(self.asynchronous.abort)


class Client(Facade):
    """An open connection.

    The asynchronous client also has gRPC stubs: `nodes` (the daemon), `sessions` of a fabric,
    `subsystems` of a target, `offload` of a gateway (its accelerator cards), and of a broker
    `operator` (keys and leases), `devices`, `membership` (nodes), `policies` and `audit_log`.
    """

    asynchronous: async_connection.Client

    @functools.cached_property
    def volumes(self) -> Volumes:
        """Calls about volumes."""
        return Volumes(self.loop, self.asynchronous.volumes)

    def open(
        self,
        volume: Volume,
        *,
        queue_count: int = 2,
        timeout_seconds: float = 60.0,
        hold_seconds: float = 60.0,
        standbys: Sequence[Volume] = (),
    ) -> Disk:
        """Read and write a volume that `attach` returned: `with client.open(volume) as disk`.

        `timeout_seconds` bounds one command. `hold_seconds` is how long a failing call is retried
        while the gateway, or the target behind it, is unavailable. `standbys`: what `attach` with
        `fail_over` returned at other gateways, over which the disk goes on when this one is lost.
        UsageError `disk.paths` unless all are attached so, for the same host.
        """
        return Disk(
            self.loop,
            self.asynchronous.open(
                volume,
                queue_count=queue_count,
                timeout_seconds=timeout_seconds,
                hold_seconds=hold_seconds,
                standbys=standbys,
            ),
        )

    def open_session(
        self,
        display_name: str,
        *,
        region_bytes: int = 0,
        peer_node: str,
        peer_address: str,
        rate_bits_per_second: int,
        via_addresses: Sequence[str] = (),
        wait_seconds: float = 0.0,
        peer_tenant: str = "",
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        region_of: Session | None = None,
    ) -> contextlib.AbstractContextManager[Session]:
        """Open a session to a listener at another fabric, as `sealane.client.open_session`."""
        return entered(
            self.loop,
            self.asynchronous.open_session(
                display_name,
                region_bytes=region_bytes,
                peer_node=peer_node,
                peer_address=peer_address,
                rate_bits_per_second=rate_bits_per_second,
                via_addresses=via_addresses,
                wait_seconds=wait_seconds,
                peer_tenant=peer_tenant,
                secret=secret,
                congestion=congestion,
                early=early,
                region_of=None if region_of is None else region_of.asynchronous,
            ),
            Session,
        )

    def listen_session(
        self,
        display_name: str,
        *,
        region_bytes: int = 0,
        peer_nodes: Sequence[str] = (),
        peer_tenants: Sequence[str] = (),
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        region_of: Session | None = None,
    ) -> contextlib.AbstractContextManager[Session]:
        """Wait for a session of that name, as `sealane.client.listen_session`."""
        return entered(
            self.loop,
            self.asynchronous.listen_session(
                display_name,
                region_bytes=region_bytes,
                peer_nodes=peer_nodes,
                peer_tenants=peer_tenants,
                secret=secret,
                congestion=congestion,
                early=early,
                region_of=None if region_of is None else region_of.asynchronous,
            ),
            Session,
        )

    def listen_sessions(
        self,
        display_name: str,
        *,
        region_bytes: int = 0,
        backlog: int = 2,
        peer_nodes: Sequence[str] = (),
        peer_tenants: Sequence[str] = (),
        secret: bytes = b"",
        congestion: str = "",
        early: bool = False,
        region_of: Session | None = None,
    ) -> contextlib.AbstractContextManager[Listener]:
        """Accept sessions of that name from many peers, as `sealane.client.listen_sessions`."""
        return entered(
            self.loop,
            self.asynchronous.listen_sessions(
                display_name,
                region_bytes=region_bytes,
                backlog=backlog,
                peer_nodes=peer_nodes,
                peer_tenants=peer_tenants,
                secret=secret,
                congestion=congestion,
                early=early,
                region_of=None if region_of is None else region_of.asynchronous,
            ),
            Listener,
        )

    def node(self) -> nodes_pb2.Node:
        """Return the daemon's identity and state as a message, with what its roles publish."""
        return self.loop.run(self.asynchronous.node())

    def status(self) -> NodeStatus:
        """Return the daemon's identity, roles and state."""
        return self.loop.run(self.asynchronous.status())

    def join(
        self,
        name: str,
        *,
        rank: int,
        members: Sequence[Member],
        rate_bits_per_second: int,
        reliability: Reliability | None = None,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        timeout_seconds: float = 60.0,
        secret: bytes = b"",
    ) -> contextlib.AbstractContextManager[Group]:
        """Form a group with all members; leave it at the end of the block.

        All ranks call it with the same arguments except `rank` and `client`. A session is accepted
        only from the node of the member that it should come from; `secret`, 16 to 64 bytes that all
        members know, also keeps out other jobs on those nodes. At most `slots` messages of
        `slot_bytes` are in flight to the next rank, of those up to 4 KiB sometimes half as many;
        the path stays full if `slots` times `slot_bytes` is at least rate times round trip.
        `timeout_seconds` bounds joining, and each operation that names no time-out of its own.
        """
        return entered(
            self.loop,
            async_collectives_group.join(
                self.asynchronous,
                name,
                rank=rank,
                members=members,
                rate_bits_per_second=rate_bits_per_second,
                reliability=reliability,
                slot_bytes=slot_bytes,
                slots=slots,
                timeout_seconds=timeout_seconds,
                secret=secret,
            ),
            Group,
        )
