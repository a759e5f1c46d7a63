"""The synchronous client, generated from the asynchronous one: `make synchronous`, not by hand."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from sealane._native import ChunkBitmap, RegionArray
from sealane.client import connection as async_connection
from sealane.client import disk as async_disk
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

        `third_party`: on the target of that name in the gateway's configuration, in mode "local";
        `anchor` "none": a roll-back of the whole namespace while detached is not noticed there.
        `mode` "off": without freshness (threat-model.md); such a volume is filled in the
        background before it can be attached, see `wait_filled`.
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
        """Return one volume; `with_store`: also what its store says, asked where it is."""
        return self.loop.run(self.asynchronous.get(name, with_store=with_store))

    def wait_filled(self, name: str, *, progress: Callable[[Volume], None] | None = None) -> Volume:
        """Wait while the volume is being filled; `progress` sees it twice a second."""
        return self.loop.run(self.asynchronous.wait_filled(name, progress=progress))

    def list(self, *, with_store: bool = False) -> list[Volume]:
        """Return every volume of this tenant; `with_store`: also what their stores say."""
        return self.loop.run(self.asynchronous.list(with_store=with_store))

    def delete(self, name: str) -> None:
        """Delete a detached volume and all its data."""
        self.loop.run(self.asynchronous.delete(name))

    def attach(
        self, name: str, *, host_nqn: str, via_traddr: str = "", via_trsvcid: int = 0
    ) -> Volume:
        """Export the volume to `host_nqn`; `via_…` replaces the target's data-path address."""
        return self.loop.run(
            self.asynchronous.attach(
                name, host_nqn=host_nqn, via_traddr=via_traddr, via_trsvcid=via_trsvcid
            )
        )

    def detach(self, name: str) -> Volume:
        """Stop the export."""
        return self.loop.run(self.asynchronous.detach(name))

    def share(self, name: str, *, tenant: str, read_only: bool = False) -> Volume:
        """Let gateways of another tenant use the volume; again: change what they may do."""
        return self.loop.run(self.asynchronous.share(name, tenant=tenant, read_only=read_only))

    def unshare(self, name: str, *, tenant: str) -> Volume:
        """End that: within 30 s their gateways have no access; the volume gets a new key epoch."""
        return self.loop.run(self.asynchronous.unshare(name, tenant=tenant))

    def start_job(self, name: str, kind: str, *, bytes_per_second: int = 0) -> VolumeJob:
        """Start to "scrub" or "refresh" the volume where it is stored; a rate of 0 is no limit."""
        return self.loop.run(
            self.asynchronous.start_job(name, kind, bytes_per_second=bytes_per_second)
        )

    def change_job(
        self, name: str, kind: str, *, order: str = "", bytes_per_second: int | None = None
    ) -> VolumeJob:
        """Give a job the order "pause", "resume" or "cancel", or another rate."""
        return self.loop.run(
            self.asynchronous.change_job(name, kind, order=order, bytes_per_second=bytes_per_second)
        )

    def wait_job(
        self, name: str, kind: str, *, progress: Callable[[VolumeJob], None] | None = None
    ) -> VolumeJob:
        """Wait until a job has ended; `progress` sees it twice a second."""
        return self.loop.run(self.asynchronous.wait_job(name, kind, progress=progress))

    def resize(self, name: str, *, size_bytes: int) -> Volume:
        """Make a volume larger: `size_bytes` in all, a multiple of 4096; again is harmless.

        What it gains reads as zeros. Hosts see it when the volume is attached next; until then
        those that have it attached see a pause. UsageError `volume.resize.smaller`,
        `volume.resize.mode`, `volume.resize.refused`; UnavailableError `store.extend`: there is no
        room for it where it is stored.
        """
        return self.loop.run(self.asynchronous.resize(name, size_bytes=size_bytes))

    def clone(self, name: str, *, display_name: str = "") -> Volume:
        """UsageError `volume.clone.unsupported`."""
        return self.loop.run(self.asynchronous.clone(name, display_name=display_name))

    def watch(self, name: str) -> contextlib.AbstractContextManager[Iterator[VolumeEvent]]:
        """Subscribe to the volume's events; none is missed once the block is entered."""
        return entered(self.loop, self.asynchronous.watch(name), iterated)


class Disk(Files, Block):
    """`with client.open(volume) as disk`.

    Calls raise UsageError (a range outside the disk, an unaligned write that the controller can't
    do atomically; `client.forked`: a parent of this process opened the disk: open its `handle`),
    SectorVerificationError (what is stored isn't what was written; with its LBA), NvmeStatusError
    (any other refusal) and UnavailableError (`disk.timeout`: the front end didn't
    come back; `disk.contended`: others kept changing the sector). A write that raised or was
    cancelled may have happened, whole or in part. Overlapping calls happen in any order.

    Buffers must not be changed while a call uses them.
    """

    asynchronous: async_disk.Disk

    @property
    def handle(self) -> "DiskHandle":
        """What opens the same disk in another process; it can be pickled, and holds the secret."""
        return self.asynchronous.handle

    def __reduce__(self) -> str | tuple[object, ...]:
        return self.asynchronous.__reduce__()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.asynchronous.size

    @property
    def sector_bytes(self) -> int:
        """Bytes of a sector; calls that cover whole sectors are the fast ones."""
        return self.asynchronous.sector_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        return self.loop.run(self.asynchronous.read(offset, length))

    def readinto(self, offset: int, buffer: bytearray | memoryview) -> int:
        """Fill `buffer` from `offset`; returns its size in bytes."""
        return self.loop.run(self.asynchronous.readinto(offset, buffer))

    def write(self, offset: int, data: Readable, *, durable: bool = False) -> int:
        """Write `data` at `offset`; returns its size in bytes. `durable`: survives a power cut."""
        return self.loop.run(self.asynchronous.write(offset, data, durable=durable))

    def flush(self) -> None:
        """Make every write that has returned durable."""
        self.loop.run(self.asynchronous.flush())

    def write_zeroes(self, offset: int, length: int) -> None:
        """Make exactly these bytes zero, without moving whole sectors of them."""
        self.loop.run(self.asynchronous.write_zeroes(offset, length))

    def discard(self, offset: int, length: int) -> None:
        """Give up the whole sectors inside the range: they read as zeros. Others stay."""
        self.loop.run(self.asynchronous.discard(offset, length))


class Operation(Facade, Generic[R]):
    """A send or a receive that was posted. Await it, or `wait` with a time-out.

    Who stops waiting does not stop the operation: its bytes stay in use until it ends. Any number
    of tasks may wait, now or later; `asyncio.gather` and its like wait for many.
    """

    asynchronous: async_operation.Operation[R]

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.asynchronous.done()

    def wait(self, *, timeout_seconds: float | None = None) -> R:
        """Wait for the end.

        Raises SessionError: `session.wait.timeout` if that takes too long (it goes on),
        `session.message.…` if the message did not arrive or nobody knows.
        """
        return self.loop.run(self.asynchronous.wait(timeout_seconds=timeout_seconds))

    def result(self) -> R:
        """Return what came of it; raises as `wait`, and UsageError while it goes on."""
        return self.asynchronous.result()


class SendOperation(Operation[Sent]):
    """A send that was posted."""

    asynchronous: async_operations.SendOperation

    def cancel(self) -> bool:
        """Give the message up at both ends, unless it has ended: then False.

        The operation ends as `session.message.cancelled`; so does the receive, unless it had all.
        """
        return self.loop.run(self.asynchronous.cancel())


class StreamOperation(SendOperation):
    """A message whose parts are written one by one, anywhere in the receiver's buffer.

    A reliable one ends when all that was written before `end` has arrived, an unreliable one when
    all has left.
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

        In any order, with gaps, and again. Offset and length are multiples of the session's
        `unit_bytes`; a part that reaches the end of the stream's range may be shorter. The bytes
        must not change until the stream has ended. Raises UsageError `session.stream.part` if the
        stream has ended, or for a part that can't be.
        """
        self.loop.run(self.asynchronous.write(remote_offset, data, offset=offset, length=length))

    def end(self) -> None:
        """Say that nothing more will be written."""
        self.loop.run(self.asynchronous.end())


class ReceiveOperation(Operation[Received]):
    """A receive that was posted: what has landed of it can be seen before it is whole.

    Chunks are `Session.chunk_bytes` long, the last one of a message shorter.
    """

    asynchronous: async_operations.ReceiveOperation

    @property
    def chunk_count(self) -> int:
        """Chunks of the buffer; a message may take fewer."""
        return self.asynchronous.chunk_count

    def complete(self) -> bool:
        """End the receive with what has landed; nothing changes its bytes any more.

        False if it had ended. One that no slot had been found for ends as
        `session.message.cancelled`.
        """
        return self.loop.run(self.asynchronous.complete())

    def packet_map(self, chunk: int) -> bytes | None:
        """Return a byte for each unit of a chunk: 1 if it has landed. Asks the fabric.

        None if nothing of the message has arrived yet, or all of it has.
        """
        return self.loop.run(self.asynchronous.packet_map(chunk))

    def immediate(self) -> int | None:
        """Return the sender's immediate, known from the first packet on. Asks the fabric.

        None if nothing of the message has arrived yet, or it has none.
        """
        return self.loop.run(self.asynchronous.immediate())

    def bitmap(self) -> ChunkBitmap | None:
        """Return the live bitmap: a read-only buffer of a byte for each chunk of the buffer.

        `memoryview` and `numpy.frombuffer` take it without a copy; a byte becomes 1 when its chunk
        is whole in the region. It is for looking: before bytes of the region are used, ask
        `chunks` or `wait_chunks`. The bytes are about this receive while `is_current`; they belong
        to a later one that has its slot. None while the fabric has not taken the receive, and once
        a later one has its slot.
        """
        return self.loop.call(self.asynchronous.bitmap)

    def chunks(self) -> bytes | None:
        """Return a byte for each chunk of the buffer: 1 if it is whole in the region.

        None while the fabric has not taken the receive, and once a later receive has its slot.
        """
        return self.loop.call(self.asynchronous.chunks)

    def wait_chunks(
        self, start: int = 0, end: int | None = None, *, timeout_seconds: float | None = None
    ) -> None:
        """Wait until the chunks `start` to `end` (all: None) are in the region, or it has ended.

        Raises as `wait`, if the receive ends badly before.
        """
        self.loop.run(self.asynchronous.wait_chunks(start, end, timeout_seconds=timeout_seconds))


class Session(Facade):
    """A session: the i-th send of either end lands in the i-th receive of the other.

    It ends for good when it is closed, when the peer closes it, or when a process of it dies.
    """

    asynchronous: async_session.Session

    @property
    def session(self) -> sessions_pb2.Session:
        """The fabric's grant: name, peer, unit, rate."""
        return self.asynchronous.session

    @property
    def region(self) -> memoryview:
        """All of the shared memory, writable. `empty` doesn't see what is used through it."""
        return self.asynchronous.region

    @property
    def chunk_bytes(self) -> int:
        """Length of a chunk, the unit in which a receive reports progress."""
        return self.asynchronous.chunk_bytes

    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, alignment: int = 64
    ) -> RegionArray:
        """Allocate an array in the region, its bytes as they happen to be.

        `dtype` is a name as NumPy and torch have them ("float32", "bfloat16"), or their own types.
        `numpy.from_dlpack`, `torch.from_dlpack` and `torch.frombuffer` take it without a copy. Its
        bytes are free again when no view of it is left. Raises UnavailableError
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
    ) -> SendOperation:
        """Post a message: `data`, which lies in the region, or a range of it. Waits for room.

        The bytes must not change until the send has ended. Raises UsageError for bytes elsewhere.
        """
        return SendOperation(
            self.loop,
            self.loop.run(
                self.asynchronous.post_send(
                    data, offset=offset, length=length, reliability=reliability, immediate=immediate
                )
            ),
        )

    def post_stream(
        self,
        length: int,
        *,
        reliability: SelectiveRepeat | Unreliable | None = None,
        immediate: int | None = None,
    ) -> StreamOperation:
        """Begin a message whose parts are written later, into the first `length` bytes there."""
        return StreamOperation(
            self.loop,
            self.loop.run(
                self.asynchronous.post_stream(length, reliability=reliability, immediate=immediate)
            ),
        )

    def post_receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> ReceiveOperation:
        """Offer `into`, which lies in the region, or a range of it, to the next message.

        Waits for room on the ring. Raises UsageError for bytes elsewhere.
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
    ) -> Sent:
        """Send a message and return when the peer has it: `post_send`, then `wait`.

        Selective repeat unless said otherwise. `immediate`: 32 bits for the receiver.
        """
        return self.loop.run(
            self.asynchronous.send(
                data, offset=offset, length=length, reliability=reliability, immediate=immediate
            )
        )

    def receive(
        self, into: "Bytes | None" = None, *, offset: int = 0, length: int | None = None
    ) -> Received:
        """Take the next message and return when it is whole: `post_receive`, then `wait`.

        Raises SessionError if the message is longer than the room for it, or the session ended.
        """
        return self.loop.run(self.asynchronous.receive(into, offset=offset, length=length))

    def statistics(self) -> dict[str, int]:
        """Return the session's counters, as the fabric published them last.

        Raises SessionError `session.closed` after `close`.
        """
        return self.loop.call(self.asynchronous.statistics)

    def drain(self, *, timeout_seconds: float | None = None) -> None:
        """Post nothing more, and wait until everything posted has ended, well or not.

        Raises SessionError `session.wait.timeout`; the session stays as it is, without new posts.
        """
        self.loop.run(self.asynchronous.drain(timeout_seconds=timeout_seconds))

    def close(self) -> None:
        """Give the rings back; the fabric then ends the session. Views of the region stay."""
        self.loop.call(self.asynchronous.close)


class Group(Facade):
    """A ring of jobs; `join` makes it. All ranks call the same operations in the same order.

    Operations of one rank run one after the other. When one fails or takes too long, the group is
    over at this rank: its sessions close, so the neighbours' operations fail, and theirs, until
    all ranks know. Errors are SessionError: `group.timeout`, `group.aborted`, `group.order`.
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

        All results are equal bit by bit. `array` is contiguous and has the buffer protocol;
        `dtype` "bfloat16" says that 16-bit integers are bits of that.
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
        """Combine arrays of as many equal parts as there are ranks; rank r gets the r-th part.

        `array` stays as it is; `into` is as long as a part.
        """
        self.loop.run(
            self.asynchronous.reduce_scatter(
                array, into, operator, dtype=dtype, timeout_seconds=timeout_seconds
            )
        )

    def broadcast(self, array: Any, root: int = 0, *, timeout_seconds: float | None = None) -> None:
        """Give all ranks the root's array."""
        self.loop.run(self.asynchronous.broadcast(array, root, timeout_seconds=timeout_seconds))

    def all_gather(self, array: Any, into: Any, *, timeout_seconds: float | None = None) -> None:
        """Put the arrays of all ranks, equal in length and type, into `into`, rank after rank."""
        self.loop.run(self.asynchronous.all_gather(array, into, timeout_seconds=timeout_seconds))

    def gather(
        self, array: Any, into: Any = None, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Put the arrays of all ranks, equal in length and type, into the root's `into`."""
        self.loop.run(self.asynchronous.gather(array, into, root, timeout_seconds=timeout_seconds))

    def scatter(
        self, array: Any, into: Any, root: int = 0, *, timeout_seconds: float | None = None
    ) -> None:
        """Give each rank its part of the root's `array`, the only one that is looked at."""
        self.loop.run(self.asynchronous.scatter(array, into, root, timeout_seconds=timeout_seconds))

    def all_to_all(self, array: Any, into: Any, *, timeout_seconds: float | None = None) -> None:
        """Give rank r the r-th part of `array`; what rank r gives is the r-th part of `into`."""
        self.loop.run(self.asynchronous.all_to_all(array, into, timeout_seconds=timeout_seconds))

    def barrier(self, *, timeout_seconds: float | None = None) -> None:
        """Return when all ranks have called it."""
        self.loop.run(self.asynchronous.barrier(timeout_seconds=timeout_seconds))

    def send(
        self, array: Any, to: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Send an array to one rank, which takes it by `receive`; returns when it has it.

        What one rank sends another arrives in the order of the calls; tags are only compared. It
        is independent of the operations of all.
        """
        self.loop.run(self.asynchronous.send(array, to, tag=tag, timeout_seconds=timeout_seconds))

    def receive(
        self, array: Any, source: int, *, tag: int = 0, timeout_seconds: float | None = None
    ) -> None:
        """Take the next array of one rank, of the same length and tag."""
        self.loop.run(
            self.asynchronous.receive(array, source, tag=tag, timeout_seconds=timeout_seconds)
        )

    def abort(self) -> None:
        """End the group at once, here and with that everywhere."""
        self.loop.call(self.asynchronous.abort)


class Client(Facade):
    """An open connection.

    `sessions` is the stub that `sealane.client.session` builds on, `subsystems` that of a target's
    plain subsystems, `operator` that of a broker's keys and leases, `devices` that of its devices,
    `membership` that of its nodes, `policies` and `audit_log` those of its verifier.
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
    ) -> Disk:
        """Read and write a volume that `attach` returned: `with client.open(volume) as disk`.

        `timeout_seconds` is how long one command may take; `hold_seconds` how long a call is tried
        again while the gateway, or what is behind it, is away.
        """
        return Disk(
            self.loop,
            self.asynchronous.open(
                volume,
                queue_count=queue_count,
                timeout_seconds=timeout_seconds,
                hold_seconds=hold_seconds,
            ),
        )

    def open_session(
        self,
        display_name: str,
        *,
        region_bytes: int,
        peer_node: str,
        peer_address: str,
        rate_bits_per_second: int,
        via_addresses: Sequence[str] = (),
        wait_seconds: float = 0.0,
        peer_tenant: str = "",
        secret: bytes = b"",
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
            ),
            Session,
        )

    def listen_session(
        self,
        display_name: str,
        *,
        region_bytes: int,
        peer_nodes: Sequence[str] = (),
        peer_tenants: Sequence[str] = (),
        secret: bytes = b"",
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
            ),
            Session,
        )

    def node(self) -> nodes_pb2.Node:
        """Return what the daemon is, and what its roles show to their peers."""
        return self.loop.run(self.asynchronous.node())

    def status(self) -> NodeStatus:
        """Return what the daemon is."""
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
        """Form a group of that name with all members; leave it at the end of the block.

        All ranks call it with the same arguments except `rank` and `client`. A session is accepted
        only from the node of the member that it should come from; `secret`, 16 to 64 bytes that all
        members know, also keeps out other jobs on those nodes. At most `slots` messages of
        `slot_bytes` are in flight to the next rank; the path stays full if that is at least the
        rate times the round trip. `timeout_seconds` bounds joining, and each operation that names
        no time-out of its own.
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
